"""How `srt chat` gathers and prints the pieces of an answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from srt.cli.chat_answer import Answer, Printer


def begun(name: str) -> dict[str, Any]:
    call = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": ""}}
    return {"tool_calls": [call]}


def argued(text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


DELTAS = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "The "},
    {"reasoning_content": "weather."},
    {"content": "I "},
    {"content": "look."},
    begun("weather"),
    argued('{"city"'),
    argued(': "Rome"}'),
    begun("time"),
    argued("{}"),
]


def printed(deltas: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], *, is_terminal: bool) -> str:
    printer = Printer(is_terminal=is_terminal)
    for number, delta in enumerate(deltas):
        printer.show(delta, num_reasoning_tokens=number)
    printer.end()
    return capsys.readouterr().out


def test_calls_are_lines_and_reasoning_is_not_printed_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(DELTAS, capsys, is_terminal=False).split("\n")
    assert lines == ["I look.", 'weather({"city": "Rome"})', "time({})", ""]


def test_a_terminal_shows_one_dim_line_of_reasoning_with_its_count(capsys: pytest.CaptureFixture[str]) -> None:
    reasoning, *lines = printed(DELTAS, capsys, is_terminal=True).split("\n")
    assert lines == ["I look.", 'weather({"city": "Rome"})', "time({})", ""]
    shown = re.fullmatch(r"(?:\r\x1b\[2m… reasoning[^\r]*\x1b\[0m)+", reasoning)
    assert shown and reasoning.endswith("\r\x1b[2m… reasoning, 3 tokens\x1b[0m")


def test_text_that_follows_calls_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([begun("time"), {"content": "Done."}], capsys, is_terminal=False) == "time()\nDone.\n"


def test_an_empty_answer_is_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([], capsys, is_terminal=True) == "\n"


def test_an_error_amid_an_answer_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(is_terminal=False)
    printer.break_off()
    printer.show({"content": "Hel"}, 0)
    printer.break_off()
    assert capsys.readouterr().out == "Hel\n"


def test_the_pieces_make_the_message_that_is_sent_back() -> None:
    answer = Answer()
    assert answer.is_empty
    for delta in DELTAS:
        answer.add(delta)
    assert not answer.is_empty
    calls = [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert answer.message() == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "The weather.",
        "tool_calls": [
            {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }
