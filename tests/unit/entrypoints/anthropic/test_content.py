"""Content blocks from a model's text: a stream says what the whole message says, wherever the text is cut."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any, cast

import orjson
import pytest

from srt.entrypoints.anthropic.content import BlockWriter, whole_content
from srt.entrypoints.openai.message_parts import MessageParts, OutputForm
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.parsers.tools import Tools
from srt.sampling.sampling_params import SamplingParams
from tests.unit.entrypoints.anthropic.named_events import accumulated_content
from tests.unit.entrypoints.fake_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = Tools({"weather": SCHEMA, "now": {"type": "object"}})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"am\\" Rhein", "days": 12}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"
)
TEXTS = {
    "text": ("hermes", "Hello!\n\nHow are you?"),
    "nothing": ("hermes", ""),
    "all": ("hermes", f"<think>\nThe weather.\n</think>\n\nI look.\n{CALL}\nAnd then:\n{CALL}"),
    "call": ("hermes", CALL),
    "without arguments": ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'),
    "unknown": ("hermes", CALL.replace("weather", "winter")),
    "cut in a string": ("hermes", CALL[: CALL.index("Rhein")]),
    "cut in a number": ("hermes", CALL[: CALL.index("}}") - 1]),
    "cut in a key": ("hermes", CALL[: CALL.index("days") + 2]),
    "broken arguments": ("hermes", CALL.replace("12", "12; 13")),
    "large number": ("hermes", CALL.replace("12", "1" + "0" * 30)),
    "large number, cut": ("hermes", CALL.replace("12", "1" + "0" * 30 + ', "more": ')[:-20]),
    "markup": ("qwen3_coder", XML_CALL),
    "markup, cut in a tag": ("qwen3_coder", XML_CALL[: XML_CALL.rindex("</parameter") + 5]),
    "thinking, cut": ("hermes", "<think>\nThe weath"),
}


def new_parts(parser: str) -> MessageParts:
    form = OutputForm(parser, "qwen3", TOOLS, is_open=False)
    return form.new_parts(cast(TokenizerManager, FakeEngine()), SamplingParams())


def update(text: str, *, is_last: bool) -> ChoiceUpdate:
    finish = Finish("stop", matched=0) if is_last else None
    return ChoiceUpdate(0, text, tuple(map(ord, text)), 1, 1, 0, 0, "", finish)


def whole(parser: str, text: str) -> list[dict[str, Any]]:
    blocks = whole_content(new_parts(parser).push(update(text, is_last=True)))
    content: list[dict[str, Any]] = json.loads(orjson.dumps(blocks))
    return without_ids(content)


def streamed(parser: str, pieces: list[str]) -> list[dict[str, Any]]:
    parts, writer = new_parts(parser), BlockWriter()
    events: list[Any] = []
    for number, piece in enumerate(pieces, 1):
        events += writer.push(parts.push(update(piece, is_last=number == len(pieces))))
    events += writer.finish()
    return without_ids(accumulated_content(events))


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_equals_the_whole_for_every_split(name: str) -> None:
    parser, text = TEXTS[name]
    expected = whole(parser, text)
    assert streamed(parser, [text]) == expected
    assert streamed(parser, [*text, ""]) == expected
    for first, second in combinations(range(0, len(text), 1 + len(text) // 24), 2):
        assert streamed(parser, [text[:first], text[first:second], text[second:]]) == expected
    for first in range(len(text)):
        assert streamed(parser, [text[:first], text[first:]]) == expected


def test_blocks_stand_in_the_order_of_the_text() -> None:
    call = {"type": "tool_use", "name": "weather", "input": {"city": 'Köln "am" Rhein', "days": 12}}
    assert whole(*TEXTS["all"]) == [
        {"type": "thinking", "thinking": "The weather.", "signature": ""},
        {"type": "text", "text": "I look."},
        call,
        {"type": "text", "text": "And then:"},
        call,
    ]
    assert whole(*TEXTS["call"]) == [call]
    assert whole(*TEXTS["without arguments"]) == [{"type": "tool_use", "name": "now", "input": {}}]


def test_nothing_said_is_no_block_and_a_call_of_no_tool_is_text() -> None:
    assert whole(*TEXTS["nothing"]) == []
    parser, text = TEXTS["unknown"]
    assert whole(parser, text) == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cut in a string", {}),
        ("cut in a number", {"city": 'Köln "am" Rhein'}),
        ("cut in a key", {"city": 'Köln "am" Rhein'}),
        ("broken arguments", {"city": 'Köln "am" Rhein'}),
        ("markup", {"city": "Köln", "days": 12}),
    ],
)
def test_of_arguments_that_were_cut_off_the_whole_members_are_there(name: str, expected: dict[str, Any]) -> None:
    (call, *_) = whole(*TEXTS[name])
    assert call["input"] == expected


def test_reasoning_that_is_not_to_be_shown_makes_no_blocks() -> None:
    parser, text = TEXTS["all"]
    deltas = new_parts(parser).push(update(text, is_last=True))
    shown = whole_content(deltas, shows_thinking=False)
    assert [block["type"] for block in shown] == ["text", "tool_use", "text", "tool_use"]
    events: list[Any] = BlockWriter(shows_thinking=False).push(deltas)
    assert [one["index"] for one in events if one["type"] == "content_block_start"] == [0, 1, 2, 3]


def test_random_texts_of_marks_are_equal_however_they_are_cut() -> None:
    rng = random.Random(5)
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "now"',
        ', "arguments": {',
        '"city": "x"',
        "}}",
    ]
    for _ in range(300):
        text = "".join(rng.choice([*words, "\n", "Hello", "12"]) for _ in range(rng.randrange(12)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert streamed("hermes", pieces) == whole("hermes", text), (text, pieces)
