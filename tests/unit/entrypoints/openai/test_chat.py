"""/v1/chat/completions over ASGI with a fake engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.sse import events

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def chat(world: World, *messages: dict[str, Any], **more: Any) -> Any:
    return world.post(PATH, {"messages": list(messages) or [USER], **more})


def prompt_of(world: World) -> str:
    return world.engine.handles[-1].request.text or ""


def test_a_conversation_is_answered_in_openais_shape() -> None:
    world = World()
    answer = chat(world, model="tiny", seed=7).json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": 0,
                "seed": 7,
            }
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 6,
            "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert prompt_of(world) == "<user>hi<assistant>"
    assert world.engine.handles[0].request.add_special_tokens is False


def test_content_is_a_string_or_text_parts() -> None:
    world = World()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    developer = {"role": "developer", "content": parts}
    # As clients send it back after model_dump().
    assistant: dict[str, Any] = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    assert chat(world, developer, assistant, USER).status_code == 200
    assert prompt_of(world) == "<system>ab<assistant>c<user>hi<assistant>"


@pytest.mark.parametrize("content", ["It", [{"type": "text", "text": "I"}, {"type": "text", "text": "t"}]])
def test_the_last_message_can_be_continued(content: Any) -> None:
    world = World()
    assert chat(world, USER, {"role": "assistant", "content": content}, continue_final_message=True).status_code == 200
    assert prompt_of(world) == "<user>hi<assistant>It"


def test_the_templates_variables_are_passed_on() -> None:
    world = World()
    assert chat(world, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert "enable_thinking" in prompt_of(world)


def test_without_a_limit_all_that_fits_is_allowed() -> None:
    world = World()
    chat(world)
    params = world.engine.handles[0].request.params
    assert (params.max_new_tokens, params.may_shorten) == (None, True)
    chat(world, max_completion_tokens=3)
    assert world.engine.handles[1].request.params.max_new_tokens == 3


def test_logprobs_have_bytes_and_alternatives() -> None:
    world = World(answer="é")
    logprobs = chat(world, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [{"token": "A", "logprob": -0.25, "bytes": [65]}],
            }
        ],
        "refusal": None,
    }


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    chunks = events(chat(World(answer="ab"), stream=True, seed=3))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert choices[-1]["matched_stop"] == 0
    assert {choice["seed"] for choice in choices} == {3}


def test_streamed_choices_join_to_the_whole_answer() -> None:
    world = World(answer='Grüße "🙂"\n')
    for more in ({}, {"logprobs": True, "top_logprobs": 2}):
        whole = chat(world, n=3, **more).json()["choices"]
        texts = [""] * 3
        logprobs: list[list[Any]] = [[], [], []]
        for chunk in events(chat(world, n=3, stream=True, **more)):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            logprobs[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
        assert texts == [choice["message"]["content"] for choice in whole]
        assert logprobs == [(choice["logprobs"] or {}).get("content", []) for choice in whole]


def test_usage_comes_in_a_last_chunk_if_asked_for() -> None:
    world = World(answer="ab")
    *chunks, last = events(chat(world, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    "neutral",
    [
        {"stream": False, "web_search_options": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"tools": None, "tool_choice": "none", "modalities": ["text"], "audio": None, "function_call": "none"},
        {"user": "me", "metadata": {}, "store": False, "safety_identifier": "x", "prompt_cache_key": "k"},
        {"max_tokens": 5, "max_completion_tokens": 5, "top_logprobs": 0, "n": 1, "separate_reasoning": True},
    ],
)
def test_fields_without_meaning_and_neutral_values_are_accepted(neutral: dict[str, Any]) -> None:
    assert chat(World(), **neutral).status_code == 200


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
CHOSEN = {"type": "function", "function": {"name": "get_weather"}}
CALLING = {"role": "assistant", "content": None}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("wrong", "parameter", "message"),
    [
        ({"messages": None}, "messages", "messages is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "hi"}, "messages", "must be a list of objects"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be an object"),
        ({"messages": [{}]}, "messages", "messages[0].role must be one of"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "messages[0].role must be one of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages", "messages[0].role must be one of"),
        ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages", "messages[1].role must be one of"),
        ({"messages": [USER, {"role": "tool"}]}, "messages", "messages[1].content is required"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "must not be an empty list"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "messages[0].content[0] is a part of type"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages", "messages[0].content[0] is a part without"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages", "messages[0].content[0] must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "content[0].text must be"),
        (
            {"messages": [{**USER, "tool_calls": [1]}]},
            "messages",
            "messages[0].tool_calls belongs to messages of the role assistant",
        ),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages", "messages[0].tool_call_id belongs to"),
        ({"messages": [{**CALLING, "tool_calls": 1}]}, "messages", "messages[0].tool_calls must be a list"),
        ({"messages": [{**CALLING, "tool_calls": [1]}]}, "messages", "messages[0].tool_calls[0] must be an object"),
        ({"messages": [{**CALLING, "tool_calls": [{}]}]}, "messages", "tool_calls[0].function must be an object"),
        ({"messages": [{**CALLING, "tool_calls": [{"type": "x"}]}]}, "messages", "tool_calls[0].type must be"),
        (
            {"messages": [{**CALLING, "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages",
            "messages[0].tool_calls[0].function.arguments must be a string",
        ),
        (
            {"messages": [{**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "", "x": 1}}]}]},
            "messages",
            "messages[0].tool_calls[0].x is not a known field",
        ),
        (
            {"messages": [{**CALLING, "content": "x", "reasoning": 1}]},
            "messages",
            "messages[0].reasoning must be a string",
        ),
        ({"messages": [{**USER, "bogus": 1}]}, "messages", "messages[0].bogus is not a known field"),
        ({"messages": [{**USER, "name": 1}]}, "messages", "messages[0].name must be a string"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "messages"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type must be function"),
        ({"tools": [{**WEATHER, "function": {"name": ""}}]}, "tools", "tools[0].function.name must be"),
        ({"tools": [{**WEATHER, "function": {"name": "f", "parameters": 1}}]}, "tools", "parameters must be an object"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1].function.name is 'get_weather', as that of"),
        (
            {"tools": [{**WEATHER, "function": {"name": "f", "strict": 1}}]},
            "tools",
            "tools[0].function.strict must be true or false, not",
        ),
        ({"tools": [WEATHER]}, "tools", "tools are not supported with this model"),
        ({"tool_choice": "required"}, "tool_choice", "(required) demands a call, but the request has no tools"),
        ({"tool_choice": "often"}, "tool_choice", "tool_choice must be none, auto, required or an object, not 'often'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice.type must be function, not 'allowed"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function must be an object"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "tool_choice.function.name must be"),
        ({"tool_choice": {**CHOSEN, "name": "f"}}, "tool_choice", "tool_choice.name is not a known field"),
        ({"tool_choice": "required", "tools": [WEATHER]}, "tools", "tools are not supported with this model"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with the schema"),
        ({"web_search_options": {}}, "web_search_options", "not supported"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "(high) is not supported by this model's chat template"),
        ({"reasoning_effort": "none"}, "reasoning_effort", "(none) is not supported by this model's chat template"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort", "must be one of none, minimal"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "at most"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "exclude each other"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "max_completion_tokens is 1000000, but"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be"),
        ({"continue_final_message": True}, "continue_final_message", "needs a last message with the role assistant"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "must be an object"),
        ({"prompt": "hi"}, "prompt", "not a known parameter"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], parameter: str, message: str) -> None:
    response = World().post(PATH, {"messages": [USER], **wrong})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", parameter)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("set_by_user", "parameter", "message"),
    [
        ({"tool_choice": CHOSEN}, "tool_choice", "tool_choice (get_weather) demands a call, but the request has no"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tool_choice (required) demands a call, but the"),
        (
            {"tool_choice": {**CHOSEN, "function": {"name": "f"}}, "tools": [WEATHER]},
            "tool_choice",
            "tool_choice names the tool 'f', which the request does not have",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "functions (f) is not supported yet"),
        ({"function_call": {"name": "f"}}, "function_call", "function_call (f) is not supported yet"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type must be text, json_object"),
        ({"regex": "a", "ebnf": "root ::= b"}, "ebnf", "ebnf and regex are two constraints on one answer"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice must be a list"),
        ({"functions": [{"name": "x" * 9000}]}, "functions", f"functions ({'x' * 200}) is not"),
    ],
)
def test_what_an_agent_library_set_is_named(set_by_user: dict[str, Any], parameter: str, message: str) -> None:
    response = World().post(PATH, {"messages": [USER], **set_by_user})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == parameter
    assert error["message"].startswith(message)


def test_defaults_of_agent_libraries_that_ask_for_nothing_pass() -> None:
    for nothing in (
        {"tools": None, "tool_choice": None},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
    ):
        assert World().post(PATH, {"messages": [USER], "response_format": {"type": "text"}, **nothing}).is_success


def test_a_model_that_is_not_served_is_a_404() -> None:
    assert chat(World(), model="gpt-4").json()["error"]["code"] == "model_not_found"


def test_models_are_listed_and_found_by_name() -> None:
    world = World()
    assert [card["id"] for card in world.get("/v1/models").json()["data"]] == ["tiny", "org/big"]
    assert world.get("/v1/models/org/big").json()["max_model_len"] == 4096
    assert world.get("/v1/models/nope").status_code == 404
