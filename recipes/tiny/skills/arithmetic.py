"""Sums and differences of numbers up to three digits."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import pick_number

ADD = Phrasings(
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
