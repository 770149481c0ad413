"""500 clients that leave at random points, over both frontends and every way to ask: nothing runs on, and nothing stays allocated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 500
AT_ONCE = 50
PARAMETERS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 3000}
MESSAGES = [{"role": "user", "content": "Hello"}]


def request(rng: random.Random) -> bytes:
    """One of the ways to ask for many tokens."""
    native: dict[str, Any] = {"max_new_tokens": 3000, "ignore_eos": True, "n": rng.choice((1, 1, 3))}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "Hello", "sampling_params": native}),
        ("/generate", {"text": ["Hello", "World"], "sampling_params": native}),
        ("/v1/completions", {"prompt": ["Hello", [5, 6, 7]], "n": 2, "logprobs": 1, "echo": True, **PARAMETERS}),
        ("/v1/completions", {"prompt": "word " * rng.choice((1, 500)), **PARAMETERS}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **PARAMETERS}),
    ]
    path, body = rng.choice(ways)
    content = json.dumps({**body, "stream": rng.random() < 0.7}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def leave_somewhere(host: str, port: int, rng: random.Random, left: dict[str, int]) -> None:
    """In the middle of the request, right behind it, after a while without an answer, or after so many bytes of one."""
    whole = request(rng)
    reader, writer = await asyncio.open_connection(host, port)
    point = rng.choice(("request", "behind", "waiting", "answer", "answer"))
    left[point] += 1
    try:
        writer.write(whole[: rng.randrange(len(whole))] if point == "request" else whole)
        await writer.drain()
        if point == "waiting":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), rng.random() * 0.2)
        elif point == "answer":
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readexactly(rng.randrange(1, 20_000)), 2.0)
    finally:
        writer.transport.abort()


async def all_leave(url: str, left: dict[str, int]) -> None:
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 0)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with turns:
            await leave_somewhere(host, port, random.Random(number), left)

    await asyncio.gather(*map(one, range(NUM_CLIENTS)))


def test_clients_that_leave_at_random_points_leave_nothing_behind(server: Server, client: httpx.Client) -> None:
    left = dict.fromkeys(("request", "behind", "waiting", "answer"), 0)
    asyncio.run(all_leave(server.url, left))
    # The flush waits until nothing runs, and fails only if that never comes.
    flushed = client.post("/flush_cache", params={"timeout": 60})
    assert flushed.status_code == 200, flushed.text
    print(f"{NUM_CLIENTS} left: {left}")
    assert min(left.values()) > 30
    seen: dict[int, Any] = {}
    while len(seen) < 2:  # either frontend answers a new connection
        info = httpx.get(server.url + "/server_info", params={"deep": "true"}, timeout=60).json()
        seen[info["frontend"]["index"]] = info
    for info in seen.values():
        state = info["internal_states"][0]
        assert {name: value for name, value in info["frontend"].items() if name.startswith("live_") and value} == {}
        assert state["num_running"] == state["num_waiting"] == state["num_pinned"] == 0
        assert (state["num_free_pages"], state["num_free_slots"]) == (state["num_total_pages"], state["num_slots"])


def test_a_client_program_that_is_killed_leaves_nothing_running(server: Server, client: httpx.Client) -> None:
    program = (
        "import httpx, sys\n"
        "body = {'text': 'x', 'stream': True, 'sampling_params': {'max_new_tokens': 4000, 'ignore_eos': True}}\n"
        "with httpx.stream('POST', sys.argv[1] + '/generate', json=body, timeout=60) as answer:\n"
        "    for _ in answer.iter_raw():\n"
        "        print('chunk', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, server.url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"chunk\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


def test_who_does_not_read_holds_up_nobody_and_gets_all_of_it_in_fewer_pieces(
    server: Server, client: httpx.Client
) -> None:
    params = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 3}
    body = {"text": "Once", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 20}
    content = json.dumps({**body, "stream": True}).encode()  # each chunk has all there is so far: many megabytes
    parts = urlsplit(server.url)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((parts.hostname, parts.port))
        head = b"POST /generate HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        reader.sendall(head % len(content) + content)
        reader.recv(100)  # it has begun
        whole = client.post("/generate", json=body).json()
        assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200  # the other has ended too
        told = bytearray()
        while part := reader.recv(1 << 16):
            told += part
    *events, done, end = bytes(told).partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert len(events) < 300
    last = json.loads(events[-1].removeprefix(b"data: "))
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert len(last["meta_info"]["output_top_logprobs"]) == 300
