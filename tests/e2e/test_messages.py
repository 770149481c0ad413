"""Anthropic's Messages API through the real server, with the shipped model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from recipes.tiny.evaluate import draw_cases
from tests.e2e.conftest import Server
from tests.unit.entrypoints.anthropic.named_events import accumulated, named_events

pytestmark = pytest.mark.e2e

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
NUM_CASES = 20
BAD_FORM = {"format": {"type": "json_schema", "schema": {"type": 7}}}
SUM = {"role": "user", "content": "What is 12 + 30?"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def api(tiny_server: Server) -> Iterator[httpx.Client]:
    with tiny_server.client() as client:
        yield client


def ask(api: httpx.Client, **fields: Any) -> Any:
    """The message; the one that the stream makes must be the same."""
    body = {"model": "tiny", "max_tokens": 160, "temperature": 0, **fields}
    answer = api.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    streamed = accumulated(named_events(api.post(PATH, json={**body, "stream": True}).text))
    assert comparable(streamed) == comparable(whole)
    return whole


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """The message without its random names, and with one count of the prompt: more of it is cached the second time."""
    usage = message["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content, "usage": (num_prompt, usage["output_tokens"])}


def test_a_text_is_answered_and_the_count_of_its_tokens_is_right(api: httpx.Client) -> None:
    fields = {"messages": [SUM], "system": [{"type": "text", "text": "You are helpful."}]}
    answer = ask(api, **fields)
    assert answer["content"] == [{"type": "text", "text": "12 + 30 = 42"}]
    assert (answer["stop_reason"], answer["model"]) == ("end_turn", "tiny")
    count = api.post(COUNT, json={"model": "tiny", **fields}).json()
    again = ask(api, **fields)["usage"]
    assert count == {"input_tokens": again["input_tokens"] + again["cache_read_input_tokens"]}
    assert again["cache_read_input_tokens"] > 0


def test_a_text_is_counted_beyond_the_context_but_not_if_it_is_far_too_long(api: httpx.Client) -> None:
    context = api.get("/model_info").json()["context_length"]
    longer = {"model": "tiny", "messages": [{"role": "user", "content": "1 " * context}]}
    assert context < api.post(COUNT, json=longer).json()["input_tokens"] <= 2 * context + 100
    far_too_long = {"model": "tiny", "messages": [{"role": "user", "content": "1 " * 50 * context}]}
    refusals = [
        api.post(path, json={**far_too_long, **more}) for path, more in ((COUNT, {}), (PATH, {"max_tokens": 1}))
    ]
    assert [answer.status_code for answer in refusals] == [400, 400]
    sentences = {answer.json()["error"]["message"] for answer in refusals}
    assert sentences == {f"messages has more than {2 * context} tokens, but the model's context holds {context}."}, (
        "both routes say the same"
    )


def test_answers_end_at_limits_and_stop_sequences_and_begin_where_they_are_told(api: httpx.Client) -> None:
    assert ask(api, messages=[SUM], max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(api, messages=[SUM], stop_sequences=[" ="])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " =")
    assert stopped["content"][0]["text"] == "12 + 30"
    begun = ask(api, messages=[SUM, {"role": "assistant", "content": "12 + 30"}])
    assert begun["content"][0]["text"] == " = 42"


def test_a_limit_beyond_the_context_is_that_of_the_context(api: httpx.Client) -> None:
    assert ask(api, messages=[SUM], max_tokens=1_000_000)["stop_reason"] == "end_turn"


def test_held_out_questions_are_answered_by_the_right_call(api: httpx.Client) -> None:
    right = asked = 0
    for case in draw_cases("tools", 2 * NUM_CASES, seed=5):
        expected = case.exchange.answer
        if asked == NUM_CASES or not expected.startswith("<tool_call>"):
            continue
        turns = [{"role": one.role, "content": one.content} for one in case.conversation.messages[:-1]]
        tools = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description"),
                "input_schema": tool["function"]["parameters"],
            }
            for tool in case.conversation.tools
        ]
        answer = ask(api, messages=turns, tools=tools)
        wanted = json.loads(expected.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        found = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        asked += 1
        right += found == [(wanted["name"], wanted["arguments"])] and answer["stop_reason"] == "tool_use"
    print(f"{right} of {asked} calls are right")
    assert asked == NUM_CASES and right >= NUM_CASES - 1


def test_the_result_of_a_call_is_read(api: httpx.Client) -> None:
    question = {"role": "user", "content": "What is the weather in Lisbon?"}
    answer = ask(api, messages=[question], tools=[WEATHER])
    (call,) = answer["content"]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Lisbon"})
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": '{"weather": "sunny", "temperature": 21}'}],
    }
    turns = [question, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    last = ask(api, messages=turns, tools=[WEATHER])
    assert last["stop_reason"] == "end_turn" and "21" in last["content"][0]["text"]
    chat = {
        "messages": [
            question,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": json.dumps(call["input"])},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": result["content"]},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": WEATHER["description"],
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        "temperature": 0,
    }
    same = api.post("/v1/chat/completions", json=chat).json()
    assert same["choices"][0]["message"]["content"] == last["content"][0]["text"]
    usage = last["usage"]
    assert same["usage"]["prompt_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_calls_that_are_demanded_are_made_and_are_valid(api: httpx.Client) -> None:
    forecast = {"type": "object", "properties": {"days": {"enum": [1, 3, 7]}}, "required": ["days"]}
    tools = [WEATHER, {"name": "get_forecast", "input_schema": {**forecast, "additionalProperties": False}}]
    story = {"role": "user", "content": "Tell me a story."}
    named = ask(api, messages=[story], tools=tools, tool_choice={"type": "tool", "name": "get_forecast"})
    (call,) = named["content"]
    assert (call["name"], named["stop_reason"]) == ("get_forecast", "tool_use")
    assert call["input"]["days"] in (1, 3, 7)
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    (call,) = ask(api, messages=[story], tools=tools[1:], tool_choice=any_one)["content"]
    assert call["input"]["days"] in (1, 3, 7)


def test_an_answer_is_held_to_a_form(api: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    text = ask(api, messages=[SUM], output_config=config)["content"][0]["text"]
    assert isinstance(json.loads(text)["ok"], bool)


def test_errors_have_anthropics_shape(api: httpx.Client) -> None:
    for fields, status, kind, named in (
        ({}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 5, "model": "claude"}, 404, "not_found_error", "claude"),
        ({"max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "b"}]}, 400, "invalid_request_error", "bash_20250124"),
        ({"max_tokens": 5, "output_config": BAD_FORM}, 400, "invalid_request_error", "output_config.format.schema"),
    ):  # fmt: skip
        answer = api.post(PATH, json={"messages": [SUM], **fields})
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
        assert named in body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"]
