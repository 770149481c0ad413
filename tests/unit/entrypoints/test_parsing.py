"""/parse_function_call and /separate_reasoning over ASGI, in SGLang's shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.entrypoints.fake_engine import World

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


def test_calls_are_found_in_a_text() -> None:
    body = {"text": f"A moment.\n{CALL}", "tools": [TOOL], "tool_call_parser": "hermes"}
    answer = World().post("/parse_function_call", body).json()
    call = {"name": "now", "parameters": '{"zone": "UTC"}', "tool_index": 0}
    assert answer == {"normal_text": "A moment.", "calls": [call]}


def test_reasoning_is_told_from_the_answer() -> None:
    world = World()
    body = {"text": "<think>\nhm\n</think>\n\nYes.", "reasoning_parser": "qwen3"}
    assert world.post("/separate_reasoning", body).json() == {"reasoning_text": "hm", "text": "Yes."}
    body = {"text": "hm\n</think>\n\nYes.", "reasoning_parser": "deepseek-r1"}
    assert world.post("/separate_reasoning", body).json() == {"reasoning_text": "hm", "text": "Yes."}


def test_the_parsers_of_the_model_are_used_if_none_is_named() -> None:
    world = World()
    assert world.post("/parse_function_call", {"text": CALL, "tools": [TOOL]}).status_code == 400
    assert world.post("/separate_reasoning", {"text": "hm"}).status_code == 400
    world.engine.model = dataclasses.replace(world.engine.model, tool_call_parser="qwen25", reasoning_parser="glm45")
    assert len(world.post("/parse_function_call", {"text": CALL, "tools": [TOOL]}).json()["calls"]) == 1
    assert world.post("/separate_reasoning", {"text": "<think>a</think>b"}).json() == {
        "reasoning_text": "a",
        "text": "b",
    }


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/parse_function_call", {"tools": []}, "text"),
        ("/parse_function_call", {"text": "", "tools": [], "tool_call_parser": "klingon"}, "tool_call_parser"),
        ("/parse_function_call", {"text": "", "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/parse_function_call", {"text": "", "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ("/parse_function_call", {"text": "", "tools": [{**TOOL, "type": "web"}]}, "tools[0].type"),
        ("/separate_reasoning", {"text": 1}, "text"),
        ("/separate_reasoning", {"text": "", "reasoning_parser": "klingon"}, "reasoning_parser"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], named: str) -> None:
    response = World().post(path, body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
