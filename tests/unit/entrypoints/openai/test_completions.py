"""/v1/completions over ASGI with a fake engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from srt.managers.tokenizer_manager.api_types import RequestError
from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.sse import events

PATH = "/v1/completions"


def test_a_prompt_is_answered_in_openais_shape() -> None:
    answer = World().post(PATH, {"model": "tiny", "prompt": "hi", "seed": 7, "max_tokens": 50}).json()
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop", "matched_stop": 0, "seed": 7}
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("hi", [2]), (["hi", "you"], [2, 3]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2])],
)
def test_prompts_are_text_or_ids_one_or_many(prompt: Any, lengths: list[int]) -> None:
    answer = World().post(PATH, {"prompt": prompt, "n": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(lengths)))
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 6 * 2 * len(lengths)


def test_sixteen_tokens_are_the_default_limit() -> None:
    world = World(answer="x" * 100)
    choice = world.post(PATH, {"prompt": "hi"}).json()["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"], choice["matched_stop"]) == (16, "length", None)


def test_the_extras_reach_the_engine() -> None:
    world = World(schedule_policy="priority")
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "stop_regex": "a+",
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {"5": 1},
        "seed": -1,
        "stop": ["x"],
        "presence_penalty": 0.5,
        "rid": "mine",
        "priority": 3,
        "cache_salt": "s",
    }
    assert world.post(PATH, {"prompt": "hi", **extras}).json()["id"] == "mine"
    request = world.engine.handles[0].request
    assert (request.rid, request.cache_salt, request.priority) == ("mine", "s", 3)
    params = request.params
    assert (params.top_k, params.min_p, params.min_new_tokens, params.repetition_penalty) == (5, 0.1, 1, 1.1)
    assert (params.ignore_eos, params.no_stop_trim, params.skip_special_tokens) == (True, True, False)
    assert (params.stop, params.stop_regex, params.stop_token_ids) == (("x",), ("a+",), (3,))
    assert (params.logit_bias, params.sampling_seed) == (((5, 1.0),), (1 << 64) - 1)


def test_echo_puts_the_prompt_in_front() -> None:
    world = World()
    for prompt in ("hi", [ord("h"), ord("i")]):
        answer = world.post(PATH, {"prompt": prompt, "echo": True}).json()
        assert answer["choices"][0]["text"] == "hiHello!"
        chunks = events(world.post(PATH, {"prompt": prompt, "echo": True, "stream": True}))
        assert chunks[0]["choices"][0]["text"] == "hiH"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hiHello!"


def test_logprobs_are_parallel_lists_with_the_prompt_if_echoed() -> None:
    world = World(answer="ab")
    logprobs = world.post(PATH, {"prompt": "xy", "logprobs": 1, "echo": True}).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["x", "y", "a", "b"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"A": -0.25, "y": -0.5}, {"A": -0.25, "a": -0.5}, {"A": -0.25, "b": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert world.post(PATH, {"prompt": "xy", "logprobs": 0}).json()["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


def test_a_streams_chunks_join_to_the_whole_answer() -> None:
    world = World(answer='ab\n"c" \x00 🙂')
    body = {"prompt": ["x", "y"], "n": 2, "logprobs": 2, "max_tokens": 50}
    whole = world.post(PATH, body).json()["choices"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in events(world.post(PATH, {**body, "stream": True})):
        (choice,) = chunk["choices"]
        so_far = joined.setdefault(choice["index"], choice)
        if so_far is not choice:
            so_far["text"] += choice["text"]
            for name, values in choice["logprobs"].items():
                so_far["logprobs"][name] += values
            so_far |= {name: choice[name] for name in ("finish_reason", "matched_stop")}
    assert [joined[index] for index in range(4)] == whole


def test_usage_comes_in_a_last_chunk_if_asked_for() -> None:
    world = World(answer="ab")
    body = {"prompt": "hi", "stream": True}
    assert all("usage" not in chunk for chunk in events(world.post(PATH, body)))
    *chunks, last = events(world.post(PATH, {**body, "stream_options": {"include_usage": True}}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(world.post(PATH, {**body, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_only_names_of_parameters_are_written_as_the_client_knows_them() -> None:
    world = World()
    message = "max_new_tokens is 9, but with a prompt of 3 tokens of text only 2 fit."
    world.engine.script = lambda request: [RequestError(400, message, "max_new_tokens")]
    error = world.post(PATH, {"prompt": "hi"}).json()["error"]
    assert error["message"] == "max_tokens is 9, but with a prompt of 3 tokens of text only 2 fit."
    assert error["param"] == "max_tokens"


def test_the_model_must_be_served() -> None:
    world = World()
    assert world.post(PATH, {"prompt": "hi", "model": "org/big"}).json()["model"] == "org/big"
    for absent in (None, "default"):
        assert world.post(PATH, {"prompt": "hi", "model": absent}).json()["model"] == "tiny"
    assert world.get("/v1/models/default").json()["id"] == "tiny"
    response = world.post(PATH, {"prompt": "hi", "model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model 'gpt-4' does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    "neutral",
    [
        {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto"},
        {"suffix": None, "best_of": 1, "response_format": {"type": "text"}, "lora_path": None, "temperature": None},
        {"return_hidden_states": False, "stream_options": None, "stop": None, "logit_bias": None, "logprobs": None},
    ],
)
def test_fields_without_meaning_and_neutral_values_are_accepted(neutral: dict[str, Any]) -> None:
    assert World().post(PATH, {"prompt": "hi", **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "parameter"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [5000], "echo": True}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 128}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"seed": 10**30}, "seed"),
        ({"seed": (1 << 64) - 1 + 1}, "seed"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"bogus": 1}, "bogus"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], parameter: str) -> None:
    response = World().post(PATH, {"prompt": "hi", **wrong})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", parameter, None)
    assert parameter in error["message"]
