"""Every route of the real server, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import ALIAS, Server
from tests.support.raw_http import RawRequest
from tests.unit.entrypoints.sse import events

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json={"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_server_is_alive_ready_and_generates(client: httpx.Client) -> None:
    for path in ("/health", "/ping", "/ready", "/health_generate"):
        assert client.get(path).status_code == 200, path


def test_models_and_facts_are_told(client: httpx.Client, server: Server) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [server.model, ALIAS]
    assert client.get(f"/v1/models/{ALIAS}").json()["id"] == ALIAS
    assert client.get("/model_info").json()["architectures"] == ["Qwen3ForCausalLM"]
    info = client.get("/server_info").json()
    assert (info["status"], info["max_total_num_tokens"], info["page_size"]) == ("ready", 32768, 16)
    assert info["startup"]["children"].keys() == {"worker 0", "scheduler 0", "frontend 0", "frontend 1"}
    assert info["internal_states"][0]["world_size"] == 1
    assert client.get("/server_info?deep=true").status_code == 200


def test_a_greedy_answer_is_the_same_in_every_way_to_ask(client: httpx.Client) -> None:
    text = generate(client, text="The capital of France is")
    ids = client.post(
        "/generate",
        json={
            "text": "The capital of France is",
            "sampling_params": {"max_new_tokens": 1},
            "return_prompt_token_ids": True,
        },
    ).json()["prompt_token_ids"]
    assert generate(client, input_ids=ids)["output_ids"] == text["output_ids"]
    batch = generate(client, text=["The capital of France is"] * 3)
    assert [answer["output_ids"] for answer in batch] == [text["output_ids"]] * 3
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text["text"]


def test_streamed_and_whole_answers_are_equal(client: httpx.Client) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 48, "ignore_eos": True, "sampling_seed": 5}
    whole = generate(client, text="Once upon a time", sampling_params=params)
    body = {"text": "Once upon a time", "sampling_params": params, "stream": True}
    chunks = events(client.post("/generate", json=body))
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    openai = {"prompt": "Once upon a time", "temperature": 1.5, "max_tokens": 48, "ignore_eos": True, "seed": 5}
    chunks = events(client.post("/v1/completions", json={**openai, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_logprobs_cover_prompt_and_output(client: httpx.Client) -> None:
    answer = generate(
        client,
        text="The capital of France is",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[7],
        return_prompt_token_ids=True,
    )
    meta = answer["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == answer["prompt_token_ids"]
    assert meta["input_token_logprobs"][0][0] is None
    assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
    # Greedy: the best of the top is the chosen one.
    assert [best[0][:2] for best in meta["output_top_logprobs"]] == [row[:2] for row in meta["output_token_logprobs"]]
    assert all(row[0][1] == 7 for row in meta["output_token_ids_logprobs"])


def test_a_chat_is_answered_and_streamed_alike(client: httpx.Client, server: Server) -> None:
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 12,
        "seed": 3,
        "ignore_eos": True,
        "n": 2,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "length"]
    assert whole["usage"]["completion_tokens"] == 24
    texts = ["", ""]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/chat/completions", json={**body, **options}))
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_a_warm_prefix_is_reported_as_cached(client: httpx.Client) -> None:
    body = {"prompt": list(range(5, 5 + 100)), "max_tokens": 1, "cache_salt": "test-warm-prefix"}
    cold, warm = (client.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_stop_string_ends_the_answer(client: httpx.Client) -> None:
    text = generate(client, text="The capital of France is", sampling_params={**GREEDY, "max_new_tokens": 40})["text"]
    stop = text[len(text) // 2 :][:2]
    answer = generate(
        client, text="The capital of France is", sampling_params={**GREEDY, "max_new_tokens": 40, "stop": stop}
    )
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_request_can_be_aborted_by_its_rid_through_any_connection(server: Server) -> None:
    async def go() -> None:
        body = {"text": "x", "rid": "to-abort", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        stream = await RawRequest.post(server.url + "/generate", {**body, "stream": True})
        chunks = stream.events()
        await anext(chunks)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            # Each on a connection of its own, so that either frontend may get it.
            response = await client.post("/abort_request", json={"rid": "to-abort"}, headers={"connection": "close"})
            assert response.status_code == 200
        async for chunk in chunks:
            last = chunk
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        await stream.close()

    asyncio.run(go())


@pytest.mark.parametrize("name", ["my-batch", "my-batch_2"])
def test_a_batch_can_be_aborted_by_its_name_through_either_frontend(server: Server, name: str) -> None:
    async def go() -> None:
        params = {"max_new_tokens": 4000, "ignore_eos": True, "n": 2}
        body = {"text": ["a", "b", "c"], "rid": "my-batch", "sampling_params": params, "stream": True}
        stream = await RawRequest.post(server.url + "/generate", body)
        chunks = stream.events()
        begun: set[int] = set()
        while len(begun) < 6:
            begun.add((await anext(chunks))["index"])
        for _ in range(2):
            # On connections of their own: in the end everything is aborted, whichever frontend was asked.
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                assert (await client.post("/abort_request", json={"rid": name})).status_code == 200
        ended: dict[int, str] = {}
        meant = set(range(6)) if name == "my-batch" else {4, 5}
        while not meant <= ended.keys():
            chunk = await anext(chunks)
            if chunk["meta_info"]["finish_reason"] is not None:
                ended[chunk["index"]] = chunk["meta_info"]["finish_reason"]["type"]
        assert ended == dict.fromkeys(meant, "abort")
        stream.disconnect()

    asyncio.run(go())


def test_a_prompt_is_scored_without_generating(client: httpx.Client) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    with_more = client.post("/v1/completions", json={**body, "max_tokens": 3, "ignore_eos": True}).json()
    scored, more = (one["choices"][0]["logprobs"] for one in (answer, with_more))
    assert len(scored["tokens"]) == answer["usage"]["prompt_tokens"] == len(more["tokens"]) - 3
    assert scored["token_logprobs"][1:] == pytest.approx(more["token_logprobs"][1:-3], abs=1e-4)


def test_the_tokenizer_is_served(client: httpx.Client) -> None:
    text = "The capital of France is né 世 🙂"
    tokens = client.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    asked = {"text": text, "sampling_params": {"max_new_tokens": 0}, "return_prompt_token_ids": True}
    assert client.post("/generate", json=asked).json()["prompt_token_ids"] == tokens["tokens"]
    assert client.post("/detokenize", json={"tokens": [tokens["tokens"]]}).json() == {"text": [text]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server: Server, client: httpx.Client, stream: bool) -> None:
    async def go() -> None:
        params = {"max_new_tokens": 4000, "ignore_eos": True}
        body = {"text": "x", "sampling_params": params, "stream": stream}
        request = await RawRequest.post(server.url + "/generate", body)
        if stream:
            await anext(request.events())
        request.disconnect()

    asyncio.run(go())
    # The flush is refused while anything runs: it waits for the abort, and fails only if that never comes.
    assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


def test_two_requests_with_one_rid_are_refused_while_the_first_runs(server: Server) -> None:
    async def go() -> None:
        params = {"max_new_tokens": 4000, "ignore_eos": True}
        stream = await RawRequest.post(
            server.url + "/generate", {"text": "x", "rid": "twice", "sampling_params": params, "stream": True}
        )
        await anext(stream.events())
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(4):  # over both frontends
                again = await client.post(
                    "/generate", json={"text": "x", "rid": "twice"}, headers={"connection": "close"}
                )
                assert again.status_code == 400, again.text
        stream.disconnect()

    asyncio.run(go())


def test_pipelined_requests_of_a_client_that_leaves_are_freed(server: Server, client: httpx.Client) -> None:
    parts = urlsplit(server.url)
    body = json.dumps(
        {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    ).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    request = head % len(body) + body
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(request + request)
        assert b"data: " in connection.recv(1 << 16) + connection.recv(1 << 16)
    assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x00\xff\x16\x03\x01", 400),
        (b"GET /health HTTP/1.1\r\nhost: t\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: t\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
    ],
)
def test_what_is_no_http_is_refused_in_shape(server: Server, client: httpx.Client, raw: bytes, status: int) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(raw)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"]
    assert client.get("/health").status_code == 200


def test_a_client_of_http_1_0_that_asks_keeps_its_connection(server: Server) -> None:
    parts = urlsplit(server.url)
    line, logprob_spec = b"GET /v1/models HTTP/1.0\r\n", b"Connection: Keep-Alive\r\n"
    with socket.create_connection((parts.hostname, parts.port)) as connection, connection.makefile("rb") as answers:
        for header, state in ((logprob_spec, b"keep-alive"), (logprob_spec, b"keep-alive"), (b"", b"close")):
            connection.sendall(line + header + b"\r\n")
            assert answers.readline().startswith(b"HTTP/1.1 200 ")
            lines = iter(answers.readline, b"\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            assert headers[b"connection"] == state
            assert json.loads(answers.read(int(headers[b"content-length"])))["object"] == "list"
        assert answers.read() == b""


def test_http_2_without_an_offer_is_told_that_it_is_not_spoken(server: Server, client: httpx.Client) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("00000101050000000182"))
        assert b"This server speaks HTTP/1.1 and HTTP/1.0, not HTTP/2." in answers.read()
    assert client.get("/health").status_code == 200
