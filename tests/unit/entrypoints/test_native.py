"""/generate and the calls that look after the server, over ASGI with a fake engine."""

from __future__ import annotations

import time

import pytest

from srt.managers.tokenizer_manager.api_types import RequestError
from tests.unit.entrypoints.fake_engine import World, choice_update, typing_out
from tests.unit.entrypoints.sse import events

TIMES = (
    *("e2e_latency", "request_received_ts", "request_finished_ts", "response_sent_to_client_ts"),
    *("forward_entry_time", "prefill_finished_time"),
)


def test_a_text_is_answered_with_text_ids_and_meta() -> None:
    world = World()
    response = world.post("/generate", {"text": "hi", "sampling_params": {"sampling_seed": 7}, "rid": "mine"})
    assert response.status_code == 200
    answer = response.json()
    assert answer["text"] == "Hello!"
    assert answer["output_ids"] == [ord(letter) for letter in "Hello!"]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert (meta.pop("first_token_latency"), meta.pop("decode_throughput")) == (0.25, 10.0)
    received, finished, sent = (
        meta.pop(name) for name in ("request_received_ts", "request_finished_ts", "response_sent_to_client_ts")
    )
    assert time.time() - 60 < received <= finished <= sent
    queue_s, entered, prefilled = (
        meta.pop(name) for name in ("queue_time", "forward_entry_time", "prefill_finished_time")
    )
    assert queue_s == 0.125
    assert prefilled - entered == pytest.approx(0.25 - (0.01 + 0.125), abs=1e-3)
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": 0},
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "cached_tokens": 2,
        "cached_tokens_details": {"device": 2, "host": 0},
        "reasoning_tokens": 0,
        "weight_version": "default",
        "num_retractions": 0,
        "dp_rank": None,
        "seed": 7,
    }


def test_put_is_as_good_as_post() -> None:
    assert World().call("PUT", "/generate", json={"text": "hi"}).json()["text"] == "Hello!"


def test_a_batch_with_choices_is_a_flat_list() -> None:
    world = World()
    answers = world.post("/generate", {"input_ids": [[1], [2, 3]], "sampling_params": {"n": 2}}).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 1, 2, 2]


def test_a_stream_carries_the_text_so_far() -> None:
    chunks = events(World().post("/generate", {"text": "hi", "stream": True}))
    assert [chunk["text"] for chunk in chunks] == ["H", "He", "Hel", "Hell", "Hello", "Hello!"]
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert chunks[0]["meta_info"]["finish_reason"] is None


def test_a_stream_carries_what_is_new_if_the_server_is_told_so() -> None:
    chunks = events(World(incremental_streaming_output=True).post("/generate", {"text": "hi", "stream": True}))
    assert [chunk["text"] for chunk in chunks] == list("Hello!")


def test_a_stream_of_a_batch_says_whose_chunk_it_is() -> None:
    chunks = events(World(answer="ab").post("/generate", {"text": ["x", "y"], "stream": True}))
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert last == {0: "ab", 1: "ab"}
    assert len(chunks) == 4


def test_the_stream_interval_counts_tokens_and_delays_neither_the_first_nor_the_last() -> None:
    chunks = events(World(stream_interval=3, answer="abcdefgh").post("/generate", {"text": "x", "stream": True}))
    assert [chunk["text"] for chunk in chunks] == ["a", "abcd", "abcdefg", "abcdefgh"]


def test_a_refusal_before_the_first_token_has_its_status_even_for_a_stream() -> None:
    world = World()
    world.engine.script = lambda request: [RequestError(429, "The queue is full.", retry_after_s=3)]
    response = world.post("/generate", {"text": "hi", "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json() == {"error": {"message": "The queue is full."}}


def test_an_error_in_a_stream_that_has_begun_is_told_in_the_stream() -> None:
    world = World()
    world.engine.script = lambda request: [
        [choice_update(request, "abc", 0)],
        RequestError(503, "The engine has ended."),
    ]
    first, error = events(world.post("/generate", {"text": "hi", "stream": True}))
    assert first["text"] == "a"
    assert error == {
        "error": {
            "message": "The engine has ended.",
            "type": "service_unavailable_error",
            "code": 503,
            "retryable": True,
        }
    }


def test_when_one_prompt_of_a_batch_fails_the_others_are_aborted() -> None:
    world = World()
    world.engine.script = lambda request: [RequestError(500, "It broke.")] if request.text == "bad" else [None]
    response = world.post("/generate", {"text": ["good", "bad"]})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "It broke.")
    assert [handle.is_ended for handle in world.engine.handles] == [True, True]


def test_when_a_prompt_is_refused_those_before_it_are_aborted() -> None:
    world = World()
    assert world.post("/generate", {"text": ["good", ""]}).status_code == 400
    assert [handle.was_aborted for handle in world.engine.handles] == [True]


def test_logprobs_come_with_text_if_asked_for() -> None:
    body = {"text": "xy", "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = World(answer="ab").post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, ord("x"), "x"], [-0.5, ord("y"), "y"]]
    assert meta["output_token_logprobs"] == [[-0.5, ord("a"), "a"], [-0.5, ord("b"), "b"]]


def test_model_info_tells_what_is_served() -> None:
    for path in ("/model_info", "/get_model_info"):
        info = World().get(path).json()
        assert (info["model_path"], info["served_model_name"], info["model_type"]) == ("/m", "tiny", "llama")


def test_server_info_has_options_limits_and_counters_but_no_key() -> None:
    world = World(api_key="secret")
    response = world.get("/server_info", headers={"authorization": "Bearer secret"})
    assert "secret" not in response.text
    info = response.json()
    assert (info["page_size"], info["max_total_num_tokens"], info["status"]) == (16, 8192, "ready")
    assert info["startup_time"] == 1.5
    assert info["internal_states"][0]["num_running"] == 0
    assert info["frontend"] == {"index": 0, "live_requests": 0}


def test_a_deep_look_that_finds_a_difference_is_a_500_with_the_reason() -> None:
    world = World()
    assert world.get("/server_info?deep=true").status_code == 200
    world.engine.difference = "Rank 1 has other pages."
    assert world.get("/server_info?deep=false").status_code == 200
    response = world.get("/server_info?deep=true")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "Rank 1 has other pages.")
    for query in ("deep=maybe", "bogus=1"):
        assert world.get(f"/server_info?{query}").status_code == 400


def test_generation_is_paused_in_one_of_three_ways_and_goes_on() -> None:
    world = World()
    for body, mode in (({}, "abort"), ({"mode": "retract"}, "retract"), ({"mode": "in_place"}, "in_place")):
        answer = world.post("/pause_generation", body)
        assert (answer.status_code, answer.json()) == (200, {"message": "Generation is paused.", "status": "ok"})
        assert world.engine.paused == mode
    answer = world.post("/pause_generation", {"mode": "later"})
    assert (answer.status_code, "mode" in answer.text) == (400, True)
    assert world.call("POST", "/continue_generation", content=b"garbage{").status_code == 400
    assert "bogus" in world.post("/continue_generation", {"bogus": 1}).text
    assert world.engine.paused == "in_place"
    for content in (b"", b"{}", b'{"torch_empty_cache": true}'):
        assert world.call("POST", "/pause_generation").status_code == 200
        assert world.engine.paused == "abort"
        answer = world.call("POST", "/continue_generation", content=content)
        assert (answer.status_code, answer.json()) == (200, {"message": "Generation continues.", "status": "ok"})
        assert world.engine.paused == ""
    world.engine.why_not_paused = "Generation was continued."
    answer = world.post("/pause_generation", {})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Generation was continued.")


def test_flush_cache_is_a_400_while_requests_run() -> None:
    world = World()
    world.engine.num_flushes_refused = 1
    assert world.call("POST", "/flush_cache").status_code == 400
    assert world.get("/flush_cache").status_code == 200


def test_flush_cache_waits_for_its_timeout() -> None:
    world = World()
    world.engine.num_flushes_refused = 2
    assert world.call("POST", "/flush_cache?timeout=60").status_code == 200


@pytest.mark.parametrize("query", ["timeout=soon", "timeout=-1", "timeout=nan", "timeout=1e9", "bogus=1"])
def test_flush_cache_names_a_wrong_parameter(query: str) -> None:
    response = World().get(f"/flush_cache?{query}")
    assert response.status_code == 400
    assert query.partition("=")[0] in response.json()["error"]["message"]


def test_abort_request_takes_a_rid_or_all() -> None:
    world = World()
    response = world.post("/abort_request", {"rid": "mine"})
    assert (response.status_code, response.content) == (200, b"")
    assert world.post("/abort_request", {"abort_all": True}).status_code == 200
    assert world.engine.aborted_labels == ["mine", ""]
    for body in ({}, {"rid": ""}, {"rid": "a", "abort_all": True}, {"rid": 3}, {"bogus": 1}):
        assert world.post("/abort_request", body).status_code == 400, body


def test_streamed_and_whole_answers_are_equal() -> None:
    world = World(answer="Grüße, 世界 🙂")
    body = {"text": "hi", "return_logprob": True, "return_prompt_token_ids": True}
    whole = world.post("/generate", body).json()
    last = events(world.post("/generate", {**body, "stream": True}))[-1]
    for answer in (whole, last):
        for name in TIMES:
            del answer["meta_info"][name]
    assert whole == last


def test_an_answer_cut_short_says_so() -> None:
    answer = World().post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}}).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_a_default_limit_is_not_a_wish() -> None:
    world = World()
    world.engine.script = lambda request: typing_out(request, "ok")
    assert world.post("/generate", {"text": "x" * 4000}).status_code == 200
    refused = world.post("/generate", {"text": "x" * 4000, "sampling_params": {"max_new_tokens": 128}})
    assert refused.status_code == 400
    assert "max_new_tokens" in refused.json()["error"]["message"]


def test_a_body_in_a_content_encoding_is_refused_by_that_name() -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    refused = World().call("POST", "/generate", content=b"\x1f\x8b", headers=headers)
    assert (refused.status_code, "Content-Encoding" in refused.json()["error"]["message"]) == (415, True)
    headers["content-encoding"] = "identity"
    assert World().call("POST", "/generate", content=b'{"text": "hi"}', headers=headers).status_code == 200
