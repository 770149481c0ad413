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
    "[What|Which] {u} [comes|is|is next|comes right|is the one|comes just] after {x}?",
    "[What|Which] {u} follows [|after |on ]{x}?",
    "[What is|What's|Tell me|Name|Give me|Say] the {u} [after|following|that comes after|that follows|right"
    " after] {x}[?|.]",
    "[After|Right after|Just after|Following|Directly after] {x} [comes|is|comes always|follows] [which|what] {u}?",
    "What [comes|follows|is] [|right |directly |just ]after {x}?",
    "[What|Which] is the [next {u}|{u} that is next] after {x}?",
)
PREVIOUS = Phrasings(
    "[What|Which] {u} [comes|is|comes right|is the one|comes just|was] before {x}?",
    "[What|Which] {u} [precedes|comes ahead of|goes before] {x}?",
    "[What is|What's|Tell me|Name|Give me|Say] the {u} [before|preceding|that comes before|that precedes|right"
    " before] {x}[?|.]",
    "[Before|Right before|Just before|Ahead of|Directly before] {x} [comes|is|comes always|was] [which|what] {u}?",
    "What [comes|goes|is] [|right |directly |just ]before {x}?",
    "[What|Which] is the [previous {u}|{u} that is just|last {u}] before {x}?",
)
LATER = Phrasings(
    "[What|Which] {u} [is|comes|is it|will it be|follows] {n} {u}s after {x}?",
    "[It is|Today it is|Now it is|Today is|It's] {x}. [What|Which] {u} [is it|will it be|is|comes] in {n} {u}s?",
    "[What is|What comes|What's|What follows] {n} {u}s after {x}?",
    "[Tell me|Name|Give me|Say] the {u} [|that is |that comes |which is ]{n} {u}s after {x}.",
    "If [it is|today is|now it is] {x}[| now], [what|which] {u} [is it|will it be|comes] in {n} {u}s?",
    "[What|Which] {u} [is it|will it be] {n} {u}s [after|from|later than] {x}?",
)
EARLIER = Phrasings(
    "[What|Which] {u} [is|comes|is it|was it|was] {n} {u}s before {x}?",
    "[It is|Today it is|Now it is|Today is|It's] {x}. [What|Which] {u} [was it|was] {n} {u}s ago?",
    "[What is|What comes|What's|What was] {n} {u}s before {x}?",
    "[Tell me|Name|Give me|Say] the {u} [|that is |that comes |which is ]{n} {u}s before {x}.",
    "If [it is|today is|now it is] {x}[| now], [what|which] {u} was it {n} {u}s ago?",
    "[What|Which] {u} [is it|was it] {n} {u}s [before|earlier than] {x}?",
)
MONTH_NUMBER = Phrasings(
    "[What|Which] is the {o} month[| of the year| of a year]?",
    "[Which|What] month [is|comes as] [|the ]{o}[| of the year| in the year]?",
    "[Name|Tell me|Give me|Say] the {o} month[| of the year| of a year].",
    "[What|Which] month [is|has the|is the] number {n}[| of the year]?",
    "[What|Which|Tell me which] is month [|number ]{n}[?| of the year?]",
)
MONTH_LENGTH = Phrasings(
    "How many days [does {x} have|are in {x}|are there in {x}|has {x}|does the month of {x} have|are in the"
    " month of {x}|are there in the month of {x}][?|, please?]",
    "[What is|Give me|Tell me|Say] the number of days [in|of] [|the month of ]{x}[?|.]",
    "How long is [|the month of |the month ]{x}?",
    "[Tell me|Say|Do you know|I want to know] how many days [|the month of ]{x} has[.|?]",
    "[Count|Please count] the days [of|in] [|the month of ]{x}.",
)
LIST_DAYS = Phrasings(
    "[What|Which] are [|all ][the|the seven] days [of the|of a|in a] week?",
    "[List|Name|Tell me|Give me|Say|Write down|Can you list|Can you name|Please list] [|all ][the|the seven]"
    " days [of the|of a|in a] week[.|?]",
    "[Which|What] days [does a week have|are in a week|are there in a week|has a week|make a week]?",
)
LIST_MONTHS = Phrasings(
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
