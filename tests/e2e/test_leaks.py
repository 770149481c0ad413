"""Nothing leaks: a thousand requests, a third of them broken off in every state, leave each page, slot, ledger and descriptor as before."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.checkpoints import CheckpointFactory
from tests.support.raw_http import RawRequest
from tests.support.server_process import ServerProcess

NUM_REQUESTS = 1000
NUM_LONG = 96
BROKEN_WAITING, BROKEN_DECODING = 140, 140
MEMORY_SLACK = 48 << 20  # bytes a process may hold on to beyond what it held after the first hundred


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    processes: dict[str, psutil.Process]


@pytest.fixture(scope="module")
def server(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = [
        "--model-path",
        str(checkpoint("qwen3")),
        "--port",
        "0",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tp",
        "2",
    ]
    words += ["--max-total-tokens", "60000", "--max-running-requests", "64", "--chunked-prefill-size", "32"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("server")) as process:
        url = process.wait_ready()
        supervisor = psutil.Process(process.pid)
        processes = {f"{p.cmdline()[2]} {p.pid}": p for p in (supervisor, *supervisor.children())}
        assert len(processes) == 5
        yield Server(url, processes)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


class Companion:
    """A stream that shows how the engine's steps go on."""

    def __init__(self, request: RawRequest) -> None:
        self.request = request
        self._num_tokens = 0
        self._news = asyncio.Condition()

    async def read(self) -> None:
        assert await self.request.status() == 200
        async for event in self.request.events():
            async with self._news:
                self._num_tokens = event["meta_info"]["completion_tokens"]
                self._news.notify_all()
        raise AssertionError("the stream ended before all long prompts were broken off")

    async def wait_for_more(self, num_tokens: int) -> None:
        goal = self._num_tokens + num_tokens
        async with self._news:
            await self._news.wait_for(lambda: self._num_tokens >= goal)


@dataclass(slots=True)
class Burst:
    """All requests of the burst, open at the same time; who is broken off when."""

    url: str
    rng: random.Random
    answered: int = 0
    broken: int = 0

    async def run(self) -> None:
        """A stream of many tokens, then prompts so long that each fills the chunks of a hundred steps, then all the others, which have
        to wait behind those. With every few tokens of the stream the long prompt that is at it by then is broken off."""
        companion = Companion(await self._post(prompt_len=8, max_new_tokens=3800))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(companion.read())
            await companion.wait_for_more(1)
            long = [await self._post(prompt_len=3500, max_new_tokens=4) for _ in range(NUM_LONG)]
            kinds = ["wait"] * BROKEN_WAITING + ["decode"] * BROKEN_DECODING
            kinds += ["whole"] * (NUM_REQUESTS - NUM_LONG - 1 - len(kinds))
            self.rng.shuffle(kinds)
            for kind in kinds:
                tasks.create_task(self.short(kind))
            for request in long:
                await companion.wait_for_more(4)
                request.disconnect()
            reading.cancel()
            companion.request.disconnect()
            self.broken += NUM_LONG + 1

    async def short(self, kind: str) -> None:
        request = await self._post(prompt_len=self.rng.randint(1, 60), max_new_tokens=400 if kind == "decode" else 24)
        if kind == "wait":
            self.broken += 1
            request.disconnect()
            return
        assert await request.status() == 200
        events = aiter(request.events())
        if kind == "decode":
            await anext(events)
            self.broken += 1
            request.disconnect()
            return
        await self._read_to_the_end(request, events)

    async def _read_to_the_end(self, request: RawRequest, events: AsyncIterator[dict[str, Any]]) -> None:
        async for event in events:
            assert "error" not in event
        await request.close()
        self.answered += 1

    async def _post(self, prompt_len: int, max_new_tokens: int) -> RawRequest:
        ids = [self.rng.randrange(16, 500) for _ in range(prompt_len)]
        parameters = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        return await RawRequest.post(self.url, {"input_ids": ids, "stream": True, "sampling_params": parameters})


@pytest.mark.e2e
@pytest.mark.full
def test_a_thousand_requests_a_third_of_them_broken_off_leave_nothing_behind(server: Server) -> None:
    asyncio.run(_first_hundred(server))
    before = _settled(server)
    processes = server.processes
    descriptors, memory = _descriptors(server), _memory(processes)

    burst = Burst(server.url + "/generate", random.Random(3))
    asyncio.run(burst.run())
    after = _settled(server)

    aborted = {
        state: after[f"num_aborted_{state}"] - before[f"num_aborted_{state}"]
        for state in ("waiting", "prefill", "decode")
    }
    print(f"answered {burst.answered}, broken off {burst.broken}, of those the scheduler aborted {aborted}")
    assert burst.answered + burst.broken == NUM_REQUESTS
    assert burst.broken >= NUM_REQUESTS // 3
    assert min(aborted.values()) >= 50
    assert _descriptors(server) == descriptors
    for name, held in _memory(processes).items():
        assert held <= memory[name] + MEMORY_SLACK, f"{name} grew from {memory[name]} to {held} bytes"


async def _first_hundred(server: Server) -> None:
    burst = Burst(server.url + "/generate", random.Random(2))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(burst.short("whole"))


def _settled(server: Server) -> dict[str, Any]:
    """Flush, then the deep report, in which every process compares its tables: all pages and slots are free."""
    flushed = httpx.post(server.url + "/flush_cache", params={"timeout": 60}, timeout=120)
    assert flushed.status_code == 200, flushed.text
    info = httpx.get(server.url + "/server_info", params={"deep": "true"}, timeout=60)
    assert info.status_code == 200, info.text
    state: dict[str, Any] = info.json()["internal_states"][0]
    assert state["num_free_pages"] == state["num_total_pages"]
    assert state["num_free_slots"] == state["num_slots"] == 64
    assert state["num_running"] == state["num_waiting"] == state["num_pinned"] == state["num_cached_pages"] == 0
    assert state["live_requests_of_frontend_0"] == state["unacknowledged_batches_of_frontend_0"] == 0
    assert {value for name, value in info.json()["frontend"].items() if name.startswith("live_")} == {0}
    return state


def _descriptors(server: Server) -> dict[str, int]:
    """Once the server has seen that the last client has left, which it may learn a moment after the client has closed."""
    port = urlsplit(server.url).port
    while any(
        connection.laddr.port == port and connection.status != psutil.CONN_LISTEN
        for process in server.processes.values()
        for connection in process.net_connections("tcp")
    ):
        time.sleep(0.01)
    return {name: process.num_fds() for name, process in server.processes.items()}


def _memory(processes: dict[str, psutil.Process]) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in processes.items()}
