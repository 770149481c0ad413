"""Outputs in harmony are read as OpenAI's own library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srt.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text, merged
from srt.parsers.output_parser import OutputParser
from tests.unit.parsers.harmony_cases import FILE, WRITTEN
from tests.unit.parsers.outputs import TOOLS

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())


def read(pieces: list[str]) -> list[Event]:
    parser = OutputParser("gpt-oss", "gpt-oss", TOOLS, is_open=False)
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def told(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content, and the calls with their arguments."""
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.json
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Text))
    calls = [(event.name, arguments[event.index]) for event in events if isinstance(event, CallBegin)]
    return reasoning, content, calls


def told_by_library(messages: list[list[Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """The same of what the library has read: a recipient that is no function is the library's name for a content type."""
    reasoning, content, calls = "", "", []
    for channel, recipient, text in messages:
        if recipient is not None and recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), text))
        elif channel == "analysis":
            reasoning += text
        else:
            content += text
    return reasoning, content, calls


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:60])
def test_an_output_is_read_as_the_library_reads_it(case: dict[str, Any]) -> None:
    text = case["text"]
    whole = read([text])
    assert told(whole) == told_by_library(case["messages"])
    assert read([*text]) == whole, "character by character"
    assert "".join(event.source for event in whole) == text


def test_the_recorded_cases_have_all_kinds() -> None:
    assert {case["text"] for case in CASES} >= {*WRITTEN}
    assert len(CASES) > 50
    kinds = {(channel, recipient is None) for case in CASES for channel, recipient, _ in case["messages"]}
    assert kinds >= {("analysis", True), ("commentary", True), ("final", True), ("commentary", False)}


@pytest.mark.parametrize(
    "text", [" to", "to=", " to=nobody and nothing", " today", "to=x<|message|>y", " to=functions.no<|message|>{}"]
)
def test_what_only_begins_like_a_recipient_is_text(text: str) -> None:
    assert told(read([text])) == told(read([*text])) == ("", text, [])
