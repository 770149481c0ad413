"""The answers that the model is taught are right."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from recipes.tiny.chat import Exchange, Message
from recipes.tiny.corpus import SKILLS, held_out_case, with_memory
from recipes.tiny.evaluate import MANY_PATTERNS
from recipes.tiny.holdout import NothingUnseen, Split
from recipes.tiny.skills import stories, tools
from recipes.tiny.skills.calendar import DAYS, MONTHS
from recipes.tiny.skills.facts import FACTS
from recipes.tiny.skills.letters import count_letters
from srt.server_args import make_parser

Drawn = TypeVar("Drawn")


def draw_each(split: Split, count: int, make: Callable[[random.Random, Split], Drawn]) -> Iterator[Drawn]:
    """At least one, and fewer than `count` where not everything has patterns that training does not see."""
    rng, num_drawn = random.Random(split.value), 0
    for _ in range(count):
        with contextlib.suppress(NothingUnseen):
            yield make(rng, split)
            num_drawn += 1
    assert num_drawn == count or (num_drawn and split is Split.UNSEEN)


def draw(skill: str, count: int = 300) -> list[Exchange]:
    make = SKILLS[skill][0]
    splits = [Split.TRAINING, Split.HELD_OUT, *([Split.UNSEEN] if skill in MANY_PATTERNS else [])]
    return [exchange for split in splits for exchange in draw_each(split, count, make)]


def test_sums_and_differences_are_right_and_within_three_digits() -> None:
    for exchange in [*draw("add"), *draw("subtract")]:
        match = re.fullmatch(r"(\d{1,3}) ([+-]) (\d{1,3}) = (-?\d+)", exchange.answer)
        assert match, exchange.answer
        a, b = int(match[1]), int(match[3])
        assert int(match[4]) == (a + b if match[2] == "+" else a - b)
        assert {match[1], match[3]} <= set(re.findall(r"\d+", exchange.messages[0].content))


def test_comparisons_are_right() -> None:
    for exchange in draw("compare"):
        a, b = map(int, re.findall(r"\d+", exchange.answer))
        word = "equal" if a == b else "larger" if a > b else "smaller"
        assert word in exchange.answer


def test_what_is_sorted_is_what_was_given() -> None:
    for exchange in draw("sort"):
        items = exchange.answer.removeprefix("Sorted: ").split(", ")
        assert items == (sorted(items, key=int) if items[0].isdigit() else sorted(items))
        given = re.findall(r"\w+", exchange.messages[0].content)
        assert all(given.count(item) >= items.count(item) for item in items)


def test_words_are_spelled_and_reversed() -> None:
    for exchange in draw("spell"):
        assert exchange.answer.replace("-", "") == exchange.operands in exchange.messages[0].content
    for exchange in draw("reverse"):
        assert exchange.answer[::-1] == exchange.operands in exchange.messages[0].content


def test_letters_are_counted() -> None:
    rng = random.Random(0)
    for _ in range(300):
        exchange = count_letters(rng, Split.TRAINING)
        word = exchange.operands
        if "appears" in exchange.answer:
            letter, times = re.findall(r'^"(\w)" appears (\d+)', exchange.answer)[0]
            assert int(times) == word.count(letter)
        else:
            assert f"{len(word)} letters" in exchange.answer


def test_days_and_months_follow_each_other() -> None:
    seen = 0
    for exchange in draw("calendar"):
        match = re.fullmatch(r"(\d+) (day|month)s (after|before) (\w+) is (\w+)\.", exchange.answer)
        if match:
            cycle = DAYS if match[2] == "day" else MONTHS
            step = int(match[1]) * (1 if match[3] == "after" else -1)
            assert cycle[(cycle.index(match[4]) + step) % len(cycle)] == match[5]
            seen += 1
    assert seen > 50


def test_records_are_json_that_holds_what_was_told() -> None:
    for exchange in draw("json"):
        record = json.loads(exchange.answer)
        for value in record.values():
            if not isinstance(value, bool | list):
                assert str(value) in exchange.messages[0].content


def test_what_is_repeated_was_said() -> None:
    assert all(exchange.answer in exchange.messages[0].content for exchange in draw("repeat"))


def test_a_story_follows_its_grammar_and_is_about_whom_it_should_be() -> None:
    rng = random.Random(0)
    assert stories.follows_grammar(stories.tell_story(rng))
    told = stories.tell_story(rng, "brave fox", "Nora")
    assert stories.follows_grammar(told, "brave fox", "Nora")
    assert not stories.follows_grammar(told, "brave owl", "Nora")
    assert not stories.follows_grammar(told, "brave fox", "Ada")
    assert not stories.follows_grammar(told.replace("found", "lost"), "brave fox", "Nora")


def test_a_tool_is_called_by_the_names_that_its_description_gives() -> None:
    for split in (Split.TRAINING, Split.HELD_OUT):
        for exchange in draw_each(split, 200, tools.call_tool):
            call = json.loads(exchange.messages[1].content.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            described = {tool["function"]["name"]: tool["function"]["parameters"] for tool in exchange.tools}
            assert list(call["arguments"]) == list(described[call["name"]]["properties"])
            for name, value in call["arguments"].items():
                kind = described[call["name"]]["properties"][name]["type"]
                assert type(value) is {"string": str, "integer": int, "boolean": bool}[kind]


@pytest.mark.parametrize("split", list(Split))
def test_what_is_remembered_was_told_before(split: Split) -> None:
    for conversation in draw_each(split, 200, lambda rng, split: with_memory(rng, split, [])):
        messages = conversation.messages
        if split is Split.TRAINING and "have not told" in "".join(message.content for message in messages):
            continue
        value = messages[-1].content.rstrip(".").split()[-1]
        assert any(value.lower() in earlier.content.lower() for earlier in messages[:-1] if earlier.role == "user")


def test_every_option_that_the_model_explains_exists() -> None:
    known = set(make_parser()._option_string_actions)
    explained = {fact.names[0] for group in FACTS for fact in group if fact.kind == "option"}
    assert explained <= known


def test_a_case_ends_with_the_answer_to_its_last_question() -> None:
    rng = random.Random(0)
    for skill in (*SKILLS, "memory", "tools"):
        conversation = held_out_case(rng, skill)
        assert conversation.exchanges[-1].skill == skill
        assert conversation.messages[-1] == Message("assistant", conversation.exchanges[-1].answer)
