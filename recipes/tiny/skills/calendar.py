"""Days and months. The tables are small and closed, so phrasings are held out, operands are not."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split
from recipes.tiny.skills.wording import dress

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "10th", "11th", "12th")
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

NEXT = Phrasings(
    "[I forgot|I do not know|I wonder|I want to know|Remind me] [which|what] {u} [follows|comes after|is after|comes"
    " next after] {x}[.|?]",
    "[If|When|Suppose] [today is|it is|we have|this is] {x}, [what|which] {u} [comes next|is next|follows|is"
    " tomorrow or next|is the next one|is the one after]?",
    "[Which|What] {u} is it the {u} after {x}?",
    "[Which|What] {u} [do we have|is there|will it be|do we get|starts] [after|right after|following] {x}?",
    "[{x} is over|{x} has ended|{x} is done|{x} is past]. [What|Which] {u} [comes|is it now|follows|starts|is next]?",
    "{x}, and then[?| what comes?| which {u}?| what {u}?]",
    "The {u} [after|following|next to come after] {x} is [what|which][?| one?]",
    "[Today|Now|It] is {x}. [What|Which] {u} [comes next|is next|follows|is the next one|comes after it]?",
    "[Once|As soon as] {x} is over, [what|which] {u} [is it|comes|begins|follows]?",
    "[What|Which] {u} [comes|is|is next|comes right|is the one|comes just] after {x}?",
    "[What|Which] {u} follows [|after |on ]{x}?",
    "[What is|What's|Tell me|Name|Give me|Say] the {u} [after|following|that comes after|that follows|right"
    " after] {x}[?|.]",
    "[After|Right after|Just after|Following|Directly after] {x} [comes|is|comes always|follows] [which|what] {u}?",
    "What [comes|follows|is] [|right |directly |just ]after {x}?",
    "[What|Which] is the [next {u}|{u} that is next] after {x}?",
)
PREVIOUS = Phrasings(
    "[I forgot|I do not know|I wonder|I want to know|Remind me] [which|what] {u} [precedes|comes before|is before"
    "|was right before] {x}[.|?]",
    "[If|When|Suppose] [today is|it is|we have|this is] {x}, [what|which] {u} [was it before|came before|was the"
    " last one|was the one before|was just before]?",
    "[Which|What] {u} [do we have|is there|did we have|was there] [before|right before|ahead of] {x}?",
    "[{x} begins|{x} has just begun|{x} starts now]. [What|Which] {u} [was it before|has just ended|came before|went"
    " before]?",
    "The {u} [before|preceding|just ahead of] {x} is [what|which][?| one?]",
    "[Today|Now|It] is {x}. [What|Which] {u} [came before|was before it|was the one before|came just before it|went"
    " before it]?",
    "[Going|Stepping|Looking] [back|backwards] [one {u}|by one {u}] from {x}, [what do I get|where am I|what is it"
    "|which {u} is it]?",
    "[What|Which] {u} [ends|is over] [when|as] {x} [begins|starts]?",
    "[What|Which] {u} [comes|is|comes right|is the one|comes just|was] before {x}?",
    "[What|Which] {u} [precedes|comes ahead of|goes before] {x}?",
    "[What is|What's|Tell me|Name|Give me|Say] the {u} [before|preceding|that comes before|that precedes|right"
    " before] {x}[?|.]",
    "[Before|Right before|Just before|Ahead of|Directly before] {x} [comes|is|comes always|was] [which|what] {u}?",
    "What [comes|goes|is] [|right |directly |just ]before {x}?",
    "[What|Which] is the [previous {u}|{u} that is just|last {u}] before {x}?",
)
LATER = Phrasings(
    "[Counting|Going|Stepping|Moving|Looking] {n} {u}s [on|forward|ahead|further|onwards] from {x}, [where do I land"
    "|what do I get|what {u} is it|which {u} is it|where am I]?",
    "[From|Starting at|Beginning with] {x}[,|] [go|count|move|step] {n} {u}s [forward|on|ahead|further]. [Where do I"
    " land|What {u} is it|Which {u} is that][?|]",
    "{x} plus {n} {u}s[?| is what?| is which {u}?|: which {u}?]",
    "[Add|Put] {n} {u}s [to|on] {x}[.|: what {u} is it?|. Which {u} is it?]",
    "[Which|What] {u} [do we have|have we|is there|comes|will we have] {n} {u}s [after|past|later than|from] {x}?",
    "[When|If] {n} {u}s have passed [since|after] {x}, [what|which] {u} is it?",
    "{n} {u}s [after|from|past] {x}[:|,] [what|which] {u}[?| is it?| is that?]",
    "[Today|Now|It] is {x}[.|, and] [I wait|we wait|I travel for] {n} {u}s[.|,] [What|Which] {u} is it [then|after"
    " that]?",
    "[What|Which] {u} [is|comes|is it|will it be|follows] {n} {u}s after {x}?",
    "[It is|Today it is|Now it is|Today is|It's] {x}. [What|Which] {u} [is it|will it be|is|comes] in {n} {u}s?",
    "[What is|What comes|What's|What follows] {n} {u}s after {x}?",
    "[Tell me|Name|Give me|Say] the {u} [|that is |that comes |which is ]{n} {u}s after {x}.",
    "If [it is|today is|now it is] {x}[| now], [what|which] {u} [is it|will it be|comes] in {n} {u}s?",
    "[What|Which] {u} [is it|will it be] {n} {u}s [after|from|later than] {x}?",
)
EARLIER = Phrasings(
    "[Counting|Going|Stepping|Moving|Looking] {n} {u}s [back|backwards|into the past] from {x}, [where do I land"
    "|what do I get|what {u} is it|which {u} is it|where am I]?",
    "[From|Starting at|Beginning with] {x}[,|] [go|count|move|step] [back {n} {u}s|{n} {u}s back|{n} {u}s"
    " backwards]. [Where do I land|What {u} is it|Which {u} is that][?|]",
    "{x} minus {n} {u}s[?| is what?| is which {u}?|: which {u}?]",
    "[Take|Subtract] {n} {u}s [from|off] {x}[.|: what {u} is it?|. Which {u} is it?]",
    "[Which|What] {u} [did we have|had we|was there|came] {n} {u}s [before|ahead of|earlier than] {x}?",
    "{n} {u}s [before|earlier than|ahead of] {x}[:|,] [what|which] {u}[?| is it?| is that?| was it?]",
    "[What|Which] {u} [is|comes|is it|was it|was] {n} {u}s before {x}?",
    "[It is|Today it is|Now it is|Today is|It's] {x}. [What|Which] {u} [was it|was] {n} {u}s ago?",
    "[What is|What comes|What's|What was] {n} {u}s before {x}?",
    "[Tell me|Name|Give me|Say] the {u} [|that is |that comes |which is ]{n} {u}s before {x}.",
    "If [it is|today is|now it is] {x}[| now], [what|which] {u} was it {n} {u}s ago?",
    "[What|Which] {u} [is it|was it] {n} {u}s [before|earlier than] {x}?",
)
MONTH_NUMBER = Phrasings(
    "[Which|What] [one |]is the {o} month[?| in the calendar?| of the calendar?]",
    "[Month|The month with the] number {n}[ is which one| is what|, which one|][?|]",
    "[I need|Find|Look up|Show me|Remind me of] the [name of the |]{o} month[.|, please.]",
    "[If|When] [the month is|it is] number {n}, what is [it called|its name]?",
    "What [do we call|is the name of|is called] the {o} month[?| of the year?]",
    "[What|Which] is the {o} month[| of the year| of a year]?",
    "[Which|What] month [is|comes as] [|the ]{o}[| of the year| in the year]?",
    "[Name|Tell me|Give me|Say] the {o} month[| of the year| of a year].",
    "[What|Which] month [is|has the|is the] number {n}[| of the year]?",
    "[What|Which|Tell me which] is month [|number ]{n}[?| of the year?]",
)
MONTH_LENGTH = Phrasings(
    "How many days long is [|the month of |the month ]{x}?",
    "{x}[:|,] how many days[?| is that?| has it?| does it have?]",
    "[What|How great] is the length of [|the month of ]{x}[?| in days?]",
    "[I wonder|I want to know|Find out|I forgot] how [long|many days long] [|the month of ]{x} is[.|?]",
    "[Out of|Of] how many days does [|the month of ]{x} [consist|exist]?",
    "[Does anyone know|Can you tell me|Could you say] how many days [there are in|make up|are in] {x}?",
    "How many days [does {x} have|are in {x}|are there in {x}|has {x}|does the month of {x} have|are in the"
    " month of {x}|are there in the month of {x}][?|, please?]",
    "[What is|Give me|Tell me|Say] the number of days [in|of] [|the month of ]{x}[?|.]",
    "How long is [|the month of |the month ]{x}?",
    "[Tell me|Say|Do you know|I want to know] how many days [|the month of ]{x} has[.|?]",
    "[Count|Please count] the days [of|in] [|the month of ]{x}.",
)
LIST_DAYS = Phrasings(
    "[Could you|Can you|Please|Will you|I want you to] [recite|enumerate|tell me|say|write down|give me] [|all |all"
    " of ]the [|seven |week]days[| of the week| of a week| in a week][.|?|, please.]",
    "What are the names of the [|seven ]days[| of the week| in a week]?",
    "[Days of the week|All days of the week|The seven days|The days of a week][:|, please|][?|.|]",
    "[I need|I want|I would like|Show me] [a list of |all ]the [|seven ]days [of the week|in a week][.|, please.]",
    "[Start|Begin] with Monday and [name|list|say|tell me] all the days[.| of the week.]",
    "[What|Which] are [|all ][the|the seven] days [of the|of a|in a] week?",
    "[List|Name|Tell me|Give me|Say|Write down|Can you list|Can you name|Please list] [|all ][the|the seven]"
    " days [of the|of a|in a] week[.|?]",
    "[Which|What] days [does a week have|are in a week|are there in a week|has a week|make a week]?",
)
LIST_MONTHS = Phrasings(
    "[Could you|Can you|Please|Will you|I want you to] [recite|enumerate|tell me|say|write down|give me] [|all |all"
    " of ]the [|twelve |]months[| of the year| of a year| in a year][.|?|, please.]",
    "What are the names of the [|twelve ]months[| of the year| in a year]?",
    "[Months of the year|All months of the year|The twelve months|The months of a year][:|, please|][?|.|]",
    "[I need|I want|I would like|Show me] [a list of |all ]the [|twelve ]months [of the year|in a year][.|, please.]",
    "[Start|Begin] with January and [name|list|say|tell me] all the months[.| of the year.]",
    "[What|Which] are [|all ][the|the twelve] months [of the|of a|in a] year?",
    "[List|Name|Tell me|Give me|Say|Write down|Can you list|Can you name|Please list] [|all ][the|the twelve]"
    " months [of the|of a|in a] year[.|?]",
    "[Which|What] months [does a year have|are in a year|are there in a year|has a year|make a year]?",
)


def calendar(rng: random.Random, split: Split) -> Exchange:
    kind = rng.choices((_step, _jump, _month_number, _month_length, _list), weights=(30, 40, 12, 12, 6))[0]
    phrasing, question, answer = kind(rng, split)
    return ask("calendar", dress(rng, question), answer, phrasing)


Draft = tuple[str, str, str]


def _cycle(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    return rng.choice((("day", DAYS), ("month", MONTHS)))


def _step(rng: random.Random, split: Split) -> Draft:
    unit, cycle = _cycle(rng)
    here = rng.randrange(len(cycle))
    if rng.random() < 0.5:
        phrasing, word, there = NEXT.pick(rng, split), "after", cycle[(here + 1) % len(cycle)]
    else:
        phrasing, word, there = PREVIOUS.pick(rng, split), "before", cycle[here - 1]
    return phrasing, phrasing.format(u=unit, x=cycle[here]), f"The {unit} {word} {cycle[here]} is {there}."


def _jump(rng: random.Random, split: Split) -> Draft:
    unit, cycle = _cycle(rng)
    here, distance = rng.randrange(len(cycle)), rng.randint(2, 10)
    if rng.random() < 0.6:
        phrasing, word, there = LATER.pick(rng, split), "after", cycle[(here + distance) % len(cycle)]
    else:
        phrasing, word, there = EARLIER.pick(rng, split), "before", cycle[(here - distance) % len(cycle)]
    question = phrasing.format(u=unit, x=cycle[here], n=distance)
    return phrasing, question, f"{distance} {unit}s {word} {cycle[here]} is {there}."


def _month_number(rng: random.Random, split: Split) -> Draft:
    index, phrasing = rng.randrange(12), MONTH_NUMBER.pick(rng, split)
    question = phrasing.format(o=ORDINALS[index], n=index + 1)
    return phrasing, question, f"The {ORDINALS[index]} month is {MONTHS[index]}."


def _month_length(rng: random.Random, split: Split) -> Draft:
    index, phrasing = rng.randrange(12), MONTH_LENGTH.pick(rng, split)
    leap = ", and 29 in leap years" if index == 1 else ""
    return phrasing, phrasing.format(x=MONTHS[index]), f"{MONTHS[index]} has {LENGTHS[index]} days{leap}."


def _list(rng: random.Random, split: Split) -> Draft:
    if rng.random() < 0.5:
        phrasing = LIST_DAYS.pick(rng, split)
        return phrasing, phrasing, f"The days of the week are {_and(DAYS)}."
    phrasing = LIST_MONTHS.pick(rng, split)
    return phrasing, phrasing, f"The months of the year are {_and(MONTHS)}."


def _and(items: tuple[str, ...]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"
