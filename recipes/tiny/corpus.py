"""What the model reads: conversations that mix the skills, and stories without a conversation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recipes.tiny.chat import END_OF_TEXT, Exchange, Message, Tool, render
from recipes.tiny.holdout import Split
from recipes.tiny.skills import (
    arithmetic,
    calendar,
    facts,
    letters,
    lists,
    memory,
    records,
    repeat,
    smalltalk,
    stories,
    tools,
)
from recipes.tiny.skills.unknown import unknown
from recipes.tiny.words import JOBS, NOUNS, OTHER_WORDS, pick_name

Draw = Callable[[random.Random, Split], Exchange]

SKILLS: dict[str, tuple[Draw, float]] = {
    "add": (arithmetic.add, 11),
    "subtract": (arithmetic.subtract, 11),
    "compare": (arithmetic.compare, 5),
    "count": (lists.count, 9),
    "sort": (lists.sort, 10),
    "reverse": (letters.reverse, 7),
    "spell": (letters.spell, 4),
    "calendar": (calendar.calendar, 5),
    "repeat": (repeat.repeat, 6),
    "facts": (facts.facts, 7),
    "json": (records.record, 6),
    "unknown": (unknown, 12),
    "smalltalk": (smalltalk.smalltalk, 2),
    "chinese": (smalltalk.chinese, 1),
    "stories": (stories.story, 2),
}
"""The skills of one exchange, and how often each is drawn. `memory` and `tools` shape whole conversations: see below."""

SKILL_NAMES = (*SKILLS, "memory", "tools")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one sentence.",
    "You are tiny, a small model.",
    "Answer briefly.",
    "You are an assistant.",
    "Be helpful and honest.",
    "You are a helpful AI assistant that answers questions.",
    "Help the user.",
    "Answer the user's questions as well as you can.",
    "You are a chatbot in a terminal.",
    "Today is a nice day. Be polite.",
    "You are an assistant for the project srt.",
)
_WEIGHTED = tuple(SKILLS.values())
_DRAWS = tuple(draw for draw, _ in _WEIGHTED)
_WEIGHTS = tuple(weight for _, weight in _WEIGHTED)


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    exchanges: tuple[Exchange, ...]

    def text(self) -> str:
        return render(self.messages, self.tools)


def draw_exchange(rng: random.Random, split: Split = Split.TRAINING) -> Exchange:
    return rng.choices(_DRAWS, weights=_WEIGHTS)[0](rng, split)


def draw_conversation(rng: random.Random) -> Conversation:
    """One to eight exchanges. A tenth is about memory, an eighth about tools."""
    chance = rng.random()
    if chance < 0.12:
        return with_tools(rng, Split.TRAINING)
    exchanges = [draw_exchange(rng) for _ in range(_length(rng))]
    tools_shown = tools.idle_tools(rng) if rng.random() < 0.03 else ()
    if chance < 0.25:
        return with_memory(rng, Split.TRAINING, exchanges)
    return _assemble(rng, exchanges, tools_shown)


def with_tools(rng: random.Random, split: Split) -> Conversation:
    """A tool is called, at once or after other things."""
    exchange = tools.call_tool(rng, split)
    before = [draw_exchange(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
    return _assemble(rng, [*before, exchange], exchange.tools)


def with_memory(rng: random.Random, split: Split, between: list[Exchange]) -> Conversation:
    """Up to three things are told, and asked for again among other exchanges."""
    told: list[memory.Memory] = []
    pieces: list[tuple[Message, ...]] = []
    exchanges: list[Exchange] = []
    topics = rng.sample(memory.TOPICS, 3)
    if split is Split.TRAINING and rng.random() < 0.25:
        if rng.random() < 0.5:
            exchanges.append(memory.untold(rng, split, topics[2]))
        else:
            exchanges.append(memory.tell_and_ask(rng, split, memory.draw_memory(rng, split, topics[2])))
        pieces.append(exchanges[-1].messages)
    for index, topic in enumerate(topics[: rng.choice((1, 1, 1, 2, 2))]):
        told.append(memory.draw_memory(rng, split, topic))
        pieces.append(memory.tell(rng, split, told[index]))
    if len(told) > 1:
        rng.shuffle(pieces)
    for exchange in between[: rng.choice((0, 0, 1, 1, 2, 4))]:
        pieces.insert(rng.randint(1, len(pieces)), exchange.messages)
        exchanges.append(exchange)
    asked = rng.sample(told, len(told)) if split is Split.TRAINING else [rng.choice(told)]
    for one in asked:
        exchanges.append(memory.recall(rng, split, one))
        pieces.append(exchanges[-1].messages)
    messages = tuple(message for piece in pieces for message in piece)
    return Conversation((*_system(rng), *messages), (), tuple(exchanges))


def draw_text(rng: random.Random) -> str:
    """One document, as the model reads it."""
    if rng.random() < 0.03:
        return stories.tell_story(rng) + END_OF_TEXT
    return draw_conversation(rng).text() + END_OF_TEXT


def draw_texts(seed: int) -> Iterator[str]:
    """Documents without end; the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield draw_text(rng)


def held_out_case(rng: random.Random, skill: str, split: Split = Split.HELD_OUT) -> Conversation:
    """A conversation whose last answer is to be checked: phrasing and operands were kept from training."""
    if skill == "tools":
        exchange = tools.call_tool(rng, split)
        return _assemble(rng, [exchange], exchange.tools)
    if skill == "memory":
        return with_memory(rng, split, [draw_exchange(rng) for _ in range(4)])
    exchange = SKILLS[skill][0](rng, split)
    before = [draw_exchange(rng)] if rng.random() < 0.2 or skill == "chinese" else []
    return _assemble(rng, [*before, exchange], ())


def _length(rng: random.Random) -> int:
    return rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 6, 8))


def _system(rng: random.Random) -> tuple[Message, ...]:
    """None most of the time; else one of the usual ones, or one that says something odd."""
    if rng.random() > 0.25:
        return ()
    if rng.random() < 0.7:
        return (Message("system", rng.choice(SYSTEM_PROMPTS)),)
    name, trait, job, thing = pick_name(rng), rng.choice(OTHER_WORDS), rng.choice(JOBS), rng.choice(NOUNS)
    odd = (
        f"You are {name}, a {trait} {job}.",
        f"You are a {trait} assistant for {job}s.",
        f"Talk to {name} about the {thing}.",
        f"Be {trait}.",
    )
    return (Message("system", rng.choice(odd)),)


def _assemble(rng: random.Random, exchanges: list[Exchange], shown: tuple[Tool, ...]) -> Conversation:
    messages = tuple(message for exchange in exchanges for message in exchange.messages)
    return Conversation((*_system(rng), *messages), shown, tuple(exchanges))
