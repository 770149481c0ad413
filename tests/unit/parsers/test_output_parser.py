"""What holds for every parser: its calls are those that were written, no cut of the text matters, and no character is lost."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence

import pytest

from srt.parsers.base_parser import Format
from srt.parsers.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text, merged
from srt.parsers.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS, OutputParser
from srt.parsers.reasoning.think_tags import ThinkTags
from srt.parsers.tool_calls.harmony import Harmony
from srt.parsers.tools import Tools
from tests.support.work import num_calls
from tests.unit.parsers.outputs import TOOLS, WRITERS, random_call, random_output, random_pieces

NUM_TEXTS = 1000
REASONING = ("qwen3", "kimi")  # the others have the same tags
EACH = (*WRITERS, *REASONING)
# Their calls have no marker each.
LISTS = ("llama3", "pythonic", "mistral")


def new_format(name: str, is_open: bool = False) -> Format:
    """The parser with this name, of calls or of reasoning."""
    if name in TOOL_CALL_PARSERS:
        return TOOL_CALL_PARSERS[name](TOOLS)
    tags = REASONING_PARSERS[name]
    return ThinkTags(tags, is_open) if tags else Harmony(TOOLS)


def parsed(parser: Format | OutputParser, pieces: Sequence[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def texts_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def calls_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """(name, arguments) of each call. Asserts that begins, arguments and ends come in order."""
    calls: list[tuple[str, str]] = []
    is_in_call = False
    for event in events:
        match event:
            case CallBegin(index=index, name=name):
                assert not is_in_call and index == len(calls)
                is_in_call = True
                calls.append((name, ""))
            case CallArguments(index=index, json=piece):
                assert is_in_call and index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
            case CallEnd(index=index):
                assert is_in_call and index == len(calls) - 1
                is_in_call = False
            case Text() | Reasoning():
                assert not is_in_call
    assert not is_in_call
    return calls


def test_every_parser_is_tried_here() -> None:
    tried = {TOOL_CALL_PARSERS[name] for name in WRITERS}
    assert set(TOOL_CALL_PARSERS.values()) == tried
    assert {REASONING_PARSERS[name] for name in (*REASONING, "gpt-oss")} == set(REASONING_PARSERS.values())


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_those_that_were_written(name: str) -> None:
    rng = random.Random(name)
    for _ in range(300):
        calls = [random_call(rng) for _ in range(rng.randint(1, 3))]
        text = rng.choice(WRITERS[name])(calls)
        events = parsed(new_format(name), random_pieces(rng, text))
        assert [(called, json.loads(arguments)) for called, arguments in calls_of(events)] == calls, text
        assert texts_of(events) == "", text


@pytest.mark.parametrize("name", EACH)
def test_no_cut_matters_and_no_character_is_lost(name: str) -> None:
    rng = random.Random(name)
    for _ in range(NUM_TEXTS):
        text, is_open = random_output(rng, name if name in WRITERS else "hermes"), rng.random() < 0.5
        whole = parsed(new_format(name, is_open), [text])
        pieces = random_pieces(rng, text)
        assert parsed(new_format(name, is_open), pieces) == whole, (text, pieces)
        assert "".join(event.source for event in whole) == text
        for event in whole:
            if isinstance(event, Text) and not any(isinstance(one, CallBegin | Reasoning) for one in whole):
                assert event.text == event.source or name == "gpt-oss"
        calls_of(whole)


@pytest.mark.parametrize("reasoning", [*REASONING, "gpt-oss"])
@pytest.mark.parametrize("calls", WRITERS)
def test_a_parser_of_both_does_not_depend_on_cuts_either(calls: str, reasoning: str) -> None:
    rng = random.Random(calls + reasoning)
    for _ in range(20):
        text = random_output(rng, calls)
        whole = OutputParser(calls, reasoning, TOOLS, is_open=False).parse(text)
        assert parsed(OutputParser(calls, reasoning, TOOLS, is_open=False), random_pieces(rng, text)) == whole


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_of_an_unknown_tool_is_text_as_it_was_written(name: str) -> None:
    for writer in WRITERS[name]:
        text = writer([("get_weather", {"city": "Berlin"}), ("now", {})])
        events = parsed(TOOL_CALL_PARSERS[name](Tools({"other": {}})), [text])
        assert events == [Text(text, text)]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in LISTS])
def test_a_known_call_behind_an_unknown_one_is_found(name: str) -> None:
    text = WRITERS[name][0]([("get_weather", {"city": "Berlin"}), ("now", {})])
    events = parsed(TOOL_CALL_PARSERS[name](Tools({"now": {}})), [text])
    assert calls_of(events) == [("now", "{}")]


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_come_before_the_call_is_complete(name: str) -> None:
    text = WRITERS[name][0]([("get_weather", {"city": "Berlin " * 50, "days": 3})])
    parser = new_format(name)
    early = parser.push(text[: text.rindex("Berlin")])
    assert isinstance(early[0], CallBegin) and early[0].name == "get_weather"
    if name != "pythonic":  # which converts a literal as a whole
        told = "".join(event.json for event in early if isinstance(event, CallArguments))
        assert told.count("Berlin") > 40


@pytest.mark.parametrize("name", EACH)
def test_hostile_texts_take_work_in_proportion_to_their_length(name: str) -> None:
    """A parser that starts over at each marker would make four times the calls for twice the text."""
    begins = sorted(
        {*new_format(name).BEGINS, "<think>", " ", '{"name": "now", "arguments": ', "[", '"', "<|channel|>"}
    )
    for begin in begins:
        pieces = [(begin * 50)[at : at + 50] for at in range(0, 50 * len(begin), 50)] * (20_000 // (50 * len(begin)))
        half, whole = (num_calls(functools.partial(parsed, new_format(name), pieces * n)) for n in (1, 2))
        assert whole < 3 * half, begin
