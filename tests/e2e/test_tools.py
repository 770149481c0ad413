"""Tools through the real server: the shipped model calls them, as OpenAI's client sees it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from recipes.tiny.evaluate import draw_cases
from tests.e2e.conftest import Server

pytestmark = pytest.mark.e2e

NUM_CASES = 30
NUM_DEMANDED = 12


@pytest.fixture
def api(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none") as client:
        yield client


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def streamed_calls(stream: Any) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_held_out_questions_are_answered_by_the_right_call_whole_and_streamed(api: openai.OpenAI) -> None:
    right = asked = 0
    for case in draw_cases("tools", 2 * NUM_CASES, seed=3):
        expected = case.exchange.answer
        if asked == NUM_CASES or not expected.startswith("<tool_call>"):
            continue
        messages: Any = [{"role": one.role, "content": one.content} for one in case.conversation.messages[:-1]]
        request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 160}
        request["tools"] = list(case.conversation.tools)
        answer = api.chat.completions.create(**request)
        found = calls_of(answer.choices[0].message)
        assert streamed_calls(api.chat.completions.create(**request, stream=True)) == found
        wanted = json.loads(expected.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        asked += 1
        right += found == [(wanted["name"], wanted["arguments"])] and answer.choices[0].finish_reason == "tool_calls"
    print(f"{right} of {asked} calls are right")
    assert asked == NUM_CASES and right >= NUM_CASES - 1


def test_demanded_calls_are_valid_for_every_question_whole_and_streamed(api: openai.OpenAI) -> None:
    """Also for those that need no call."""
    rng = random.Random(4)
    for number, case in enumerate(draw_cases("tools", NUM_DEMANDED, seed=4)):
        parallel = number % 2 == 0
        tools = list(case.conversation.tools)
        messages: Any = [{"role": one.role, "content": one.content} for one in case.conversation.messages[:-1]]
        request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 1.0, "max_tokens": 160}
        request |= {"tools": tools, "seed": rng.randrange(1000), "parallel_tool_calls": parallel}
        name = rng.choice(tools)["function"]["name"]
        choices: list[Any] = ["required", {"type": "function", "function": {"name": name}}]
        for choice in choices[number % 3 == 0 :]:
            (answer,) = api.chat.completions.create(**request, tool_choice=choice).choices
            if answer.finish_reason == "length":
                assert parallel, "one call is short"
                continue
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            found = calls_of(answer.message)
            assert found and (len(found) == 1 or (parallel and choice == "required"))
            for called, arguments in found:
                assert called == name or choice == "required"
                (schema,) = [one["function"]["parameters"] for one in tools if one["function"]["name"] == called]
                jsonschema.validate(arguments, schema)
            assert streamed_calls(api.chat.completions.create(**request, tool_choice=choice, stream=True)) == found


def test_a_call_that_is_demanded_is_the_right_one(api: openai.OpenAI) -> None:
    """The constraint does not disturb the model, which would call the tool by itself."""
    right = asked = 0
    for case in draw_cases("tools", 2 * NUM_DEMANDED, seed=3):
        expected = case.exchange.answer
        if asked == NUM_DEMANDED or not expected.startswith("<tool_call>"):
            continue
        messages: Any = [{"role": one.role, "content": one.content} for one in case.conversation.messages[:-1]]
        request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 160}
        request |= {"tools": list(case.conversation.tools), "tool_choice": "required"}
        wanted = json.loads(expected.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        (answer,) = api.chat.completions.create(**request).choices
        asked += 1
        right += answer.finish_reason == "tool_calls" and calls_of(answer.message) == [
            (wanted["name"], wanted["arguments"])
        ]
    print(f"{right} of {asked} demanded calls are right")
    assert asked == NUM_DEMANDED and right >= NUM_DEMANDED - 1
