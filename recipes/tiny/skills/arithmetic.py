"""Sums and differences of numbers up to three digits."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import pick_number

ADD = Phrasings(
    "[I have|There are|We have|She has|He owns|A shop has] {a} [apples|coins|books|eggs|cards|pens|things] and [buy"
    "|get|find|receive|add] {b} more. [How many are there|How many is that|How many now|How many apples are there"
    "|How many in total|What is the total][| now| in all| together]?",
    "[Put|Bring|Take] {a} and {b} together[.| and tell me the sum.|, what is it?|. How much?]",
    "[What would|What does|What will] {a} [increased by|raised by|grown by|with] {b} [be|make|give|come to]?",
    "[Increase|Raise|Enlarge|Grow] {a} by {b}[.|, please.|: what is it?]",
    "[sum|total|addition|the sum|the total|their sum|plus][:| of| for] {a}[,| and] {b}",
    "[Start|Begin] [with|at|from] {a} and [add|go up by|count on] {b}[.|, where do I land?|. What is the result?]",
    "[I|We] [add|added|put] {a} [to|and] {b}[.| together.] [What do I get|What comes out|How much is it|What is the"
    " result]?",
    "[What number|Which number] is {b} [more|larger|bigger|greater|higher] than {a}?",
    "{a} and {b} [make|give|are|add up to|come to] [how much|what|how many]?",
    "[Help me|Can you help me|Please help me] [add|to add|with adding] {a} and {b}[.|?]",
    "[Combine|Join|Unite|Merge|Total] {a} [and|with] {b}[.| into one number.|, please.]",
    "If [I|you|we|one] [put|add|count|take] {a} and {b} together, what [do I get|comes out|is it|is the sum]?",
    "[My bill is|It costs|I pay] {a} and [another|then|also] {b}. [How much in all|What is the total|How much is"
    " that together|What is the sum]?",
    "[Find|Get|Show|Figure out|Do|Run] {a}[ + | plus | and ]{b}[.|, please.| for me.]",
    "[The sum|The total|An addition]: {a} [+|plus|and] {b}[.|?]",
    "{a}[ + |+]{b}[| =| = ?|=|=?|?]",
    "[What is|What's|How much is|What would be|Compute|Calculate|Work out|Solve|Evaluate|Tell me|Give me|I need"
    "|I need to know|What makes|Say] {a}[ + |+| plus ]{b}[?|.]",
    "[Compute|Calculate|Work out|Find|Give me|Tell me|What is|What's|I need|How much is|Determine] the [sum"
    "|total|result] of {a} [and|plus|+] {b}[?|.]",
    "[Add|Sum|Sum up|Add up|Please add|Can you add|Could you add|Now add|Add together] {a} [and|plus|to|with]"
    " {b}[.|?| for me.]",
    "What [do you get|do I get|is the result|comes out] [if you add|when you add|if I add|from adding] {a} [and"
    "|to] {b}?",
    "{a} plus {b}[ is what| equals what| makes what| equals| is| makes|, please][?|]",
    "What [does|do] {a} [+|plus|and] {b} [make|give|equal|add up to|come to]?",
    "How much [is|are|does|do] {a} and {b} [together|in total|make together|in sum]?",
    "If I have {a} and [add|get|receive] {b} [more|], [how many|what|how much] [do I have|is that|does it make]?",
)
SUBTRACT = Phrasings(
    "[I have|There are|We have|She has|He owns|A shop has|I had] {a} [apples|coins|books|eggs|cards|euros|things]"
    " and [lose|give away|sell|eat|spend|spent] {b}[| of them]. [How many are left|How many remain|How much is left"
    "|What remains|What is left][| now]?",
    "[What would|What does|What will] {a} [decreased by|reduced by|lowered by|less|without] {b} [be|make|give|come"
    " to]?",
    "[Decrease|Lower|Reduce|Cut|Shrink|Diminish] {a} by {b}[.|, please.|: what is it?]",
    "[the difference|difference|minus|subtraction][:| of| for] {a} [minus|less|-] {b}",
    "[the difference|the result|what is left|what remains] when {b} is [removed|taken|taken away|subtracted"
    "|deducted] from {a}[?|.|]",
    "[What is|What's|Find|Tell me|Give me] the [difference|distance|gap] [from|between] {a} [down to|and the"
    " smaller] {b}[?|.]",
    "[Start|Begin] [with|at|from] {a} and [take away|go down by|count back|subtract] {b}[.|, where do I land?|. What"
    " is the result?]",
    "[What number|Which number] is {b} [less|smaller|lower|fewer] than {a}?",
    "[What|How much|How many] [remains|is left|stays|is there] [when|if|after] [I|you|we|one] [take|takes|subtract"
    "|remove] {b} [away from|from|out of|off] {a}?",
    "[I|We] [take|took|subtract|subtracted] {b} [from|off|away from] {a}. [What do I get|What comes out|How much is"
    " it|What is the result|What is left]?",
    "[Help me|Can you help me|Please help me] [subtract|to subtract|with subtracting] {b} from {a}[.|?]",
    "[compute|Compute|Work out|Find|Get|Show|Figure out|Do|Run] {a} [less|minus|-|without] {b}[.|, please.| for me.]",
    "{a} [with|after] {b} [taken away|removed|taken off|gone] [is|makes|leaves] [what|how much]?",
    "[It costs|I have to pay|The price is] {a} and [I already paid|I get a discount of|there is a discount of] {b}."
    " [How much is left|What remains|What do I still pay]?",
    "[From|Out of] {a} [take|remove|subtract] {b}[.|, what is left?|. What remains?]",
    "{a}[ - |-]{b}[| =| = ?|=|=?|?]",
    "[What is|What's|How much is|What would be|Compute|Calculate|Work out|Solve|Evaluate|Tell me|Give me|I need"
    "|I need to know|What makes|Say] {a}[ - |-| minus ]{b}[?|.]",
    "[Compute|Calculate|Work out|Find|Give me|Tell me|What is|What's|I need|How much is|Determine] the"
    " [difference|result] of {a} [minus|-] {b}[?|.]",
    "[Subtract|Take|Take away|Please subtract|Can you subtract|Could you subtract|Now subtract|Remove|Deduct]"
    " {b} from {a}[.|?| for me.]",
    "What [do you get|do I get|is the result|comes out] [if you subtract|when you subtract|if I take|if you"
    " take] {b} from {a}?",
    "{a} minus {b}[ is what| equals what| makes what| equals| is| makes|, please][?|]",
    "What [does|do] {a} [-|minus|less] {b} [make|give|equal|come to]?",
    "What is left [of|from] {a} [if you take away|when you take away|after taking away|if I subtract|without] {b}?",
    "If I have {a} and [lose|give away|spend|take away] {b}, [how many|what|how much] [do I have|is left|remains]?",
)
COMPARE = Phrasings(
    "[Of|Out of|Between] {a} and {b}[,|:] [which one|what|which|which number] is [bigger|larger|the larger|the"
    " bigger|the greater one|more]?",
    "Is {a} [more than|less than|above|below|over|under|beyond|the smaller one, next to|bigger or smaller than] {b}?",
    "[Would you say|Do you think|Is it true|Can you tell me if|Check if|Check whether|Tell me whether|Tell me if]"
    " [that |]{a} is [less|more|bigger|larger|smaller|greater] than {b}[?|.]",
    "[Are|Is] {a} and {b} [the same|equal|the same number|equally large|different][?|, or not?]",
    "[Pick|Choose|Take|Select|Point out|Show me] the [greater|larger|bigger|higher|smaller|lower] [one|number|of the"
    " two|][:|,|of] {a} [or|and] {b}[.|?]",
    "[Who wins|Which wins|Which is ahead|What is more|What is larger][:|,] {a} or {b}?",
    "[Does|Would] {a} [come before|come after|lie above|lie below|exceed|top|beat] {b}[?| in size?]",
    "[compare|a comparison of|Comparison:|Compare these:|compare the two numbers|Compare two numbers:] {a} [and|,"
    "|with] {b}",
    "[Which of these|Which of those|Which of the two numbers|Which of the numbers] [is larger|is bigger|is smaller"
    "|is greater][:|,|?] {a}[,| or| and] {b}[?|]",
    "[Where|How] does {a} [stand|rank|lie] [next to|compared to|against] {b}?",
    "[Is|Can it be that] {a} [is|] [at least|not more than|really larger than] {b}?",
    "[Look at|Consider|Take|Here are] {a} and {b}[.|:] [Which is larger|Which one is bigger|Compare them|What is"
    " greater][?|.]",
    "[Which|Which number|Which one|What|Which of them|Which of the two] is [larger|greater|bigger|more|higher][,"
    "|:] {a} or {b}?",
    "[Compare|Please compare|Can you compare|Now compare] [|the numbers ]{a} [and|with|to] {b}[.|?| for me.]",
    "Is {a} [larger|greater|bigger|more|higher|smaller|less|lower] than {b}?",
    "[What is|Tell me|Give me|Find|Say|Which is] the [larger|greater|bigger|higher|largest] [number|one|][,|:]"
    " {a} or {b}[?|.]",
    "[Tell me|Say|Do you know|I want to know|Find out] [which of|whether] {a} [and|or] {b} is [larger|greater"
    "|bigger|higher][.|?]",
    "Of {a} and {b}, which [one |number |]is [larger|greater|bigger|higher]?",
    "How [does|do|would] {a} and {b} compare[?| to each other?| with each other?]",
    "How [does|would|do] [|the number ]{a} compare [with|to|against] [|the number ]{b}[?|, please?]",
    "{a} or {b}[:|,] [which|what] is [larger|greater|bigger|more]?",
)

Pair = tuple[int, int]


def _pair(rng: random.Random) -> Pair:
    return pick_number(rng), pick_number(rng)


def _close_pair(rng: random.Random) -> Pair:
    """Numbers that differ late, or not at all, as often as such that differ at once."""
    a = pick_number(rng)
    return a, rng.choice((pick_number(rng), pick_number(rng), max(0, a + rng.randint(-9, 9)), a))


def add(rng: random.Random, split: Split) -> Exchange:
    a, b = draw_operands(rng, split, _pair, lambda pair: f"add {pair[0]} {pair[1]}")
    phrasing = ADD.pick(rng, split)
    return ask("add", dress(rng, phrasing.format(a=a, b=b)), f"{a} + {b} = {a + b}", phrasing, f"{a} {b}")


def subtract(rng: random.Random, split: Split) -> Exchange:
    def pair(rng: random.Random) -> Pair:
        a, b = _pair(rng)
        return (b, a) if a < b and rng.random() < 0.5 else (a, b)  # three quarters are not negative

    a, b = draw_operands(rng, split, pair, lambda pair: f"subtract {pair[0]} {pair[1]}")
    phrasing = SUBTRACT.pick(rng, split)
    return ask("subtract", dress(rng, phrasing.format(a=a, b=b)), f"{a} - {b} = {a - b}", phrasing, f"{a} {b}")


def compare(rng: random.Random, split: Split) -> Exchange:
    a, b = draw_operands(rng, split, _close_pair, lambda pair: f"compare {pair[0]} {pair[1]}")
    phrasing = COMPARE.pick(rng, split)
    if a == b:
        answer = f"{a} and {b} are equal."
    else:
        answer = f"{a} is {'larger' if a > b else 'smaller'} than {b}."
    return ask("compare", dress(rng, phrasing.format(a=a, b=b)), answer, phrasing, f"{a} {b}")
