"""Clients that leave, and clients that wait: over hand-made ASGI channels, which the test opens and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from srt.entrypoints.direct_write import EXTENSION, DirectWriter
from srt.entrypoints.exchange import Exchange
from tests.unit.entrypoints.fake_engine import World, choice_update


class Connection:
    """One request to an application; the client's end is in the test's hands."""

    def __init__(self, world: World, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": orjson.dumps(body), "more_body": False})
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        self.task = asyncio.create_task(world.app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._news.set()

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, claim: Callable[[], bool]) -> None:
        while not claim():
            self._news.clear()
            await self._news.wait()


PATHS = [
    ("/generate", {"text": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_aborts_its_request(path: str, body: dict[str, Any], stream: bool) -> None:
    async def go() -> None:
        world = World()
        world.engine.script = lambda request: [None]
        connection = Connection(world, path, {**body, "stream": stream})
        await world.engine.has_submitted.wait()
        connection.disconnect()
        await connection.task
        assert world.engine.handles[0].was_aborted
        assert connection.sent == []

    asyncio.run(go())


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_its_request(path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        world = World()
        world.engine.script = lambda request: [[choice_update(request, "abc", 0)], None]
        connection = Connection(world, path, {**body, "stream": True})
        await connection.until(lambda: b'"a"' in connection.body)
        connection.disconnect()
        await connection.task
        assert world.engine.handles[0].was_aborted
        assert b"[DONE]" not in connection.body

    asyncio.run(go())


def test_a_client_that_leaves_before_its_body_came_starts_nothing() -> None:
    async def go() -> None:
        world = World()
        sent = []

        async def gone() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        await world.app(scope, gone, send)
        assert sent == []
        assert world.engine.handles == []

    asyncio.run(go())


def test_a_silent_stream_carries_comments_and_a_waiting_answer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange.__init__, "__kwdefaults__", {"keep_alive_s": 0.01})

    async def go() -> None:
        world = World()
        world.engine.script = lambda request: [None]
        stream = Connection(world, "/generate", {"text": "hi", "stream": True})
        waiting = Connection(world, "/generate", {"text": "hi"})
        await stream.until(lambda: stream.body.count(b": keep-alive\n\n") == 3)
        assert stream.sent[0]["status"] == 200
        assert waiting.sent == []
        for connection in (stream, waiting):
            connection.disconnect()
            await connection.task

    asyncio.run(go())


def test_nothing_overtakes_what_waits_for_the_socket() -> None:
    async def go() -> None:
        may_send = asyncio.Event()
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await may_send.wait()
                sent.append(message["body"])

        class Transport:
            def write(self, part: bytes) -> None:
                sent.append(part)

        cycle: Any = SimpleNamespace(
            response_started=True,
            response_complete=False,
            disconnected=False,
            chunked_encoding=True,
            flow=SimpleNamespace(write_paused=False),
            transport=Transport(),
        )
        scope = {"method": "POST", "path": "/generate", "headers": [], "extensions": {EXTENSION: DirectWriter(cycle)}}
        exchange = Exchange(scope, receive_nothing, send)
        assert not exchange.can_write_now  # the answer has not begun
        writing = asyncio.ensure_future(exchange.write(b"first"))
        await asyncio.sleep(0)
        assert not exchange.can_write_now
        may_send.set()
        await writing
        assert exchange.can_write_now
        exchange.write_now(b"second")
        assert sent == [b"first", b"6\r\nsecond\r\n"]
        for name, value in (("disconnected", True), ("response_complete", True)):
            setattr(cycle, name, value)
            assert not exchange.can_write_now
            setattr(cycle, name, not value)
        cycle.flow.write_paused = True
        assert not exchange.can_write_now

    asyncio.run(go())


async def receive_nothing() -> Any:
    raise AssertionError("nothing is to be received")


def test_each_round_of_tokens_is_one_write() -> None:
    async def go() -> None:
        world = World()
        world.engine.script = lambda request: [
            [choice_update(request, "ab", at, choice) for choice in (0, 1)] for at in (0, 1)
        ]
        body = {"text": "hi", "stream": True, "sampling_params": {"n": 2}}
        connection = Connection(world, "/generate", body)
        await connection.task
        start, first, second, done, end = connection.sent
        assert (start["type"], end["more_body"]) == ("http.response.start", False)
        assert first["body"].count(b"data: ") == second["body"].count(b"data: ") == 2
        assert done["body"] == b"data: [DONE]\n\n"

    asyncio.run(go())
