"""The frontend process from start to end, in this process: a real socket, a supervisor and an engine in the test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import pytest

from srt.entrypoints import http_protocol
from srt.entrypoints.http_server import Frontend
from srt.managers.process.child import Child, SupervisorGone
from srt.managers.process.heartbeats import HeartbeatWriter
from srt.managers.process.tracer import Tracer
from srt.managers.tokenizer_manager.api_types import EngineDied, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.messages import ChildStart, EngineReplaced, ServerReady, Stop
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from tests.support.raw_http import RawRequest
from tests.unit.entrypoints.fake_engine import FakeEngine, choice_update


class FakeSupervisor:
    """Both ends of the link: what the child sends is kept, what it shall receive is queued."""

    def __init__(self) -> None:
        args = ServerArgs(model_path="/m")
        self._run_dir = tempfile.TemporaryDirectory()
        for name in ("supervisor", "scheduler 0", "worker 0"):
            HeartbeatWriter(self._run_dir.name, name).beat(time.monotonic() + 3600)  # alive, however long a test takes
        self.start = ChildStart("frontend", 3, 1, self._run_dir.name, "/m", 1, args)
        self.tracer = Tracer()
        self.phases: list[str] = []
        self.is_ready = asyncio.Event()
        self.beats: Any = None
        self._orders: list[ServerReady | EngineReplaced | Stop | SupervisorGone] = []
        self._ours, self._theirs = socket.socketpair()

    def say(self, order: ServerReady | EngineReplaced | Stop | SupervisorGone) -> None:
        self._orders.append(order)
        self._ours.send(b".")

    async def has_read(self) -> None:
        """All that was said."""
        while self._orders:  # noqa: ASYNC110 - there is no event, on purpose: only this test looks
            await asyncio.sleep(0)

    # ---- As the child sees it

    def fileno(self) -> int:
        return self._theirs.fileno()

    def receive(self) -> ServerReady | EngineReplaced | Stop | None:
        if not self._orders:
            return None
        self._theirs.recv(1)
        order = self._orders.pop(0)
        if isinstance(order, SupervisorGone):
            raise order
        return order

    def report_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def report_ready(self) -> None:
        self.is_ready.set()

    def start_heartbeats(self, progress_age_s: Any) -> None:
        self.beats = progress_age_s

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        self._run_dir.cleanup()


class Process:
    """A frontend that runs; ended by the test, or at the end of the block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.supervisor = FakeSupervisor()
        self.engine = FakeEngine()
        self.connecting = asyncio.Event()
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.error: Exception | None = None
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def connect(**_: Any) -> FakeEngine:
            self.connecting.set()
            await self.may_connect.wait()
            if self.error:
                raise self.error
            return self.engine

        monkeypatch.setattr(TokenizerManager, "connect", connect)
        self.task = asyncio.create_task(Frontend(cast(Child, self.supervisor), listener).run())

    async def begin(self) -> None:
        await self.supervisor.is_ready.wait()
        self.supervisor.say(ServerReady(2.5))
        async with httpx.AsyncClient(base_url=self.url) as client:
            while (await client.get("/ready")).status_code != 200:
                pass

    async def listens_no_more(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, headers={"connection": "close"}) as client:
            with contextlib.suppress(httpx.TransportError):
                while True:
                    assert (await client.get("/ready")).status_code in (200, 503)


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    process = Process(monkeypatch)
    try:
        yield process
    finally:
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)
        process.supervisor.close()


def test_it_answers_503_until_the_whole_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process, httpx.AsyncClient(base_url=process.url) as client:
            process.may_connect.clear()
            await process.connecting.wait()
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/generate", json={"text": "hi"})).status_code == 503
            process.may_connect.set()
            await process.supervisor.is_ready.wait()
            assert (await client.post("/generate", json={"text": "hi"})).status_code == 503
            await process.begin()
            assert (await client.post("/generate", json={"text": "hi"})).json()["text"] == "Hello!"
            info = (await client.get("/server_info")).json()
            assert (info["startup_time"], info["frontend"]["index"], info["startup"]) == (2.5, 3, None)
            assert process.supervisor.phases == ["tokenizer", "waiting for the engine"]
            assert 0 <= process.supervisor.beats() < 60

    asyncio.run(go())


def test_told_to_stop_it_lets_what_runs_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.script = lambda request: [[choice_update(request, "ab", 0)], None]
            stream = await RawRequest.post(process.url + "/generate", {"text": "hi", "stream": True})
            events = stream.events()
            assert (await anext(events))["text"] == "a"
            process.supervisor.say(Stop(60.0))
            await process.listens_no_more()
            (handle,) = process.engine.handles
            handle.finish([choice_update(handle.request, "ab", 1)])
            assert [event["text"] async for event in events] == ["ab"]
            await process.task
            assert process.engine.is_closed
            await stream.close()

    asyncio.run(go())


def test_what_does_not_finish_within_the_grace_ends_with_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.script = lambda request: [[choice_update(request, "ab", 0)], None]
            stream = await RawRequest.post(process.url + "/generate", {"text": "hi", "stream": True})
            waiting = await RawRequest.post(process.url + "/generate", {"text": "hi"})
            events = stream.events()
            await anext(events)
            while len(process.engine.handles) < 2:
                await process.engine.has_submitted.wait()
                process.engine.has_submitted.clear()
            process.supervisor.say(Stop(0.0))
            (error,) = [event["error"] async for event in events]
            assert (error["code"], error["retryable"]) == (503, True)
            assert "shutting down" in error["message"]
            assert await waiting.status() == 503
            await process.task
            await stream.close()
            await waiting.close()

    asyncio.run(go())


def test_told_to_stop_while_it_starts_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            process.may_connect.clear()
            await process.connecting.wait()
            process.supervisor.say(Stop(5.0))
            await process.task

    asyncio.run(go())


def test_a_checkpoint_that_cannot_be_used_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            process.error = StartError("The tokenizer is broken.")
            with pytest.raises(StartError, match="The tokenizer is broken"):
                await process.task

    asyncio.run(go())


def test_an_engine_that_ends_at_the_start_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_ready(engine: FakeEngine) -> None:
        raise EngineDied("The engine has ended: the scheduler has gone.")

    async def go() -> None:
        monkeypatch.setattr(FakeEngine, "wait_ready", wait_ready)
        async with running(monkeypatch) as process:
            with pytest.raises(StartError, match="the scheduler has gone"):
                await process.task

    asyncio.run(go())


def test_without_its_supervisor_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.supervisor.say(SupervisorGone("its socket was closed"))
            with pytest.raises(SupervisorGone):
                await process.task

    asyncio.run(go())


def test_without_its_engine_it_waits_for_the_supervisor_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.entrypoints.http_server.STOP_AFTER_BREAK_S", 0.01)

    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.engine_died("the scheduler has gone")
            with pytest.raises(StartError, match="The link to the engine broke: the scheduler has gone"):
                await process.task

    asyncio.run(go())


def test_it_tells_its_engine_of_the_next_one_also_while_it_connects_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            process.may_connect.clear()
            await process.connecting.wait()
            process.supervisor.say(EngineReplaced(2, by_request=False))
            process.supervisor.say(EngineReplaced(3, by_request=False))
            await process.supervisor.has_read()
            process.may_connect.set()
            await process.begin()
            assert process.engine.generations == [3]
            process.supervisor.say(EngineReplaced(4, by_request=False))
            await process.supervisor.has_read()
            assert process.engine.generations == [3, 4]

    asyncio.run(go())


def test_requests_wait_while_the_engine_is_replaced_and_health_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.ready = False
            async with httpx.AsyncClient(base_url=process.url) as client:
                health = await client.get("/health")
                assert health.status_code == 503
                assert "being replaced" in health.text
                answer = await client.post("/generate", json={"text": "hi"})
                assert (answer.status_code, answer.json()["text"]) == (200, "Hello!")

    asyncio.run(go())


def test_a_second_stop_with_a_reason_ends_what_the_first_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.script = lambda request: [[choice_update(request, "ab", 0)], None]
            async with httpx.AsyncClient(base_url=process.url) as client:
                body = {"text": "hi", "stream": True}
                async with client.stream("POST", "/generate", json=body) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    process.supervisor.say(Stop(600.0))
                    process.supervisor.say(Stop(1.0, "Worker 0 is gone."))
                    assert "Worker 0 is gone" in "".join([line async for line in lines])
            await process.task

    asyncio.run(go())


async def answer_to(process: Process, sent: bytes) -> tuple[int, dict[str, str], str]:
    """All that comes back until the server closes: the status, the headers and the error's sentence; 0 if nothing comes."""
    host, port = process.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.setblocking(False)
    num_sent = client.send(sent)  # before the server has taken the connection: its time for the headers has not begun
    reader, writer = await asyncio.open_connection(sock=client)
    with contextlib.suppress(ConnectionError):
        writer.write(sent[num_sent:])
        await writer.drain()
    answer = await reader.read()
    writer.close()
    if not answer:
        return 0, {}, ""
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status", "sentence"),
    [
        (b"", 0, ""),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", 408, "The headers were not complete within 0.01 s."),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
            408,
            "The body was not complete, and no part of it came for 0.01 s.",
        ),
        (b"GET /" + b"x" * (70 << 10), 431, "The headers are larger than 64 KiB, the limit."),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (70 << 10), 431, "The headers are larger than 64 KiB, the limit."),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (40 << 10), 431, "The headers are larger than 64 KiB, the limit."),
        (b"\x16\x03\x01 this is no HTTP", 400, "Invalid HTTP request received."),
        (b"PUT", 408, "The headers were not complete within 0.01 s."),
        (
            b"GET /ping HTTP/1.1\r\n\r\n",
            400,
            "An HTTP/1.1 request needs exactly one Host header, but this one has none.",
        ),
        (
            b"GET /ping HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n",
            400,
            "An HTTP/1.1 request needs exactly one Host header, but this one has 2.",
        ),
        (
            b"POST /generate HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
            400,
            "An HTTP/1.1 request needs exactly one Host header, but this one has none.",
        ),
        (b"GET /ping\r\n\r\n", 400, "The request line must end with HTTP/1.1 or HTTP/1.0."),
        (b"GET /ping\r\nhost: a\r\n\r\n", 400, "The request line must end with HTTP/1.1 or HTTP/1.0."),
        (b"GET /ping HTTP/2.0\r\nhost: a\r\n\r\n", 400, "The request line must end with HTTP/1.1 or HTTP/1.0."),
    ],
)
def test_what_is_slow_greedy_or_no_http_is_refused_in_the_apis_shape(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int, sentence: str
) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            if "body" in sentence:
                monkeypatch.setattr(http_protocol, "MAX_BODY_PAUSE_S", 0.01)
            elif status in (0, 408):
                monkeypatch.setattr(http_protocol, "MAX_HEADER_S", 0.01)
            found, headers, message = await answer_to(process, sent)
            assert (found, message) == (status, sentence)
            if status:
                assert headers["x-request-id"]
                assert headers["connection"] == "close"

    asyncio.run(go())


def test_a_pipelined_mess_does_not_write_into_an_answer_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse, is_refused = http_protocol.HttpProtocol._refuse, asyncio.Event()

    def note(self: http_protocol.HttpProtocol, status: bytes, sentence: str) -> None:
        refuse(self, status, sentence)
        is_refused.set()

    monkeypatch.setattr(http_protocol.HttpProtocol, "_refuse", note)

    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            process.engine.script = lambda request: [[choice_update(request, "ab", 0)], None]
            host, port = process.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"text": "hi", "stream": true}'
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            await reader.readuntil(b"data: ")
            writer.write(b"\x16\x03\x01\r\n\r\n")
            await is_refused.wait()
            process.engine.handles[0].fail(RequestError(500, "Enough."))
            rest = await reader.read()
            assert b"HTTP/1.1" not in rest and b"Enough." in rest
            writer.close()

    asyncio.run(go())


def test_a_mess_behind_a_request_that_was_answered_before_its_body_came_is_answered_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            host, port = process.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
            writer.write(b"abc\x16\x03\x01\r\n\r\n")
            assert b"HTTP/1.1 400" in await reader.read()
            writer.close()

    asyncio.run(go())


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_request_before_a_pipelined_mess_has_its_own_answer(monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            body = b'{"text": "hi"}'
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            answers = (await everything(process, head % (len(body), body) + garbage)).split(b"HTTP/1.1 ")
            assert [answer[:3] for answer in answers] == [b"", b"200"]
            assert b'"text":"Hello!"' in answers[1]

    asyncio.run(go())


@pytest.mark.parametrize("packet", [1, 7, 1 << 16])
def test_an_offer_to_speak_another_protocol_is_declined_and_the_request_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, packet: int
) -> None:
    """However it is cut into packets; what looks like a request within its body is none."""
    take = http_protocol.HttpProtocol.data_received

    def take_packets(self: http_protocol.HttpProtocol, data: bytes) -> None:
        for begin in range(0, len(data), packet):
            take(self, data[begin : begin + packet])

    monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", take_packets)
    body = b'{"text": "GET /ping HTTP/1.1\\r\\n\\r\\n"}'
    offer = b"connection: %b, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    sent = [head % (offer % words, len(body)) + body for words in (b"Upgrade", b"Upgrade, close")]

    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            answers = (await everything(process, b"".join(sent))).split(b"HTTP/1.1 ")
            assert [answer[:3] for answer in answers] == [b"", b"200", b"200"]
            assert all(b'"text":"Hello!"' in answer for answer in answers[1:])
            assert [handle.request.text for handle in process.engine.handles] == ["GET /ping HTTP/1.1\r\n\r\n"] * 2

    asyncio.run(go())
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_pipelined_requests_are_answered_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            whole, streamed = b'{"text": "hi"}', b'{"text": "hi", "stream": true}'
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            ping = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
            sent = [head % (len(whole), whole), ping, head % (len(streamed), streamed), ping]
            answers = (await everything(process, b"".join(sent)[:-2] + b"connection: close\r\n\r\n")).split(
                b"HTTP/1.1 "
            )
            assert [answer[:3] for answer in answers] == [b"", b"200", b"200", b"200", b"200"]
            assert [b'"text":"Hello!"' in answer for answer in answers[1:]] == [True, False, True, False]
            assert [b'"ready":true' in answer for answer in answers[1:]] == [False, True, False, True]
            assert b"[DONE]" in answers[3]

    asyncio.run(go())


def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            for body in (b'{"text": "hi", "stream": true}', b'{"text": "hi"}', b"{}"):
                connection_header = b"connection: keep-alive\r\n" if b"stream" in body else b""
                head = b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n" + connection_header + b"\r\n%b"
                answer = await everything(process, head % (len(body), body))
                headers, _, told = answer.partition(b"\r\n\r\n")
                assert b"transfer-encoding" not in headers and b"connection: close" in headers
                if b"stream" in body:
                    events = told.split(b"\n\n")
                    assert all(event.startswith(b"data: ") for event in events[:-1])
                    assert events[-2:] == [b"data: [DONE]", b""]
                else:
                    assert b"content-length: %d\r\n" % len(told) in headers + b"\r\n"

    asyncio.run(go())


def test_a_connection_of_http_1_0_is_kept_for_a_client_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = b"GET /ping HTTP/1.0\r\nconnection: Keep-Alive\r\n\r\n"
    refused = b"POST /generate HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\n{}"
    head = b"HEAD /ping HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"

    async def go() -> None:
        async with running(monkeypatch) as process:
            await process.begin()
            told = await everything(process, kept + refused + head + b"GET /ping HTTP/1.0\r\n\r\n" + kept)
            heads = [answer.partition(b"\r\n\r\n")[0] for answer in told.split(b"HTTP/1.1 ")[1:]]
            assert [answer[:3] for answer in heads] == [b"200", b"400", b"200", b"200"]
            assert [b"connection: keep-alive" in answer for answer in heads] == [True, True, True, False]
            assert [b"connection: close" in answer for answer in heads] == [False, False, False, True]

    asyncio.run(go())


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000006040000000000000300000064")
ASKED = bytes.fromhex("000001010500000003 82")  # HEADERS of stream 3: GET, and nothing else


@pytest.mark.parametrize("packet", [1, 24, 1 << 16])
@pytest.mark.parametrize("sent", [PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS + ASKED, PREFACE + b"\xff" * 9])
def test_http_2_is_told_in_its_own_words_that_it_is_not_spoken(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, packet: int
) -> None:
    take = http_protocol.HttpProtocol.data_received

    def take_packets(self: http_protocol.HttpProtocol, data: bytes) -> None:
        for begin in range(0, len(data), packet):
            take(self, data[begin : begin + packet])

    monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", take_packets)
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.01)

    async def go() -> None:
        async with running(monkeypatch) as process:
            told = await everything(process, sent)
            assert not told.startswith(b"HTTP/1")
            frames = list(http2_frames(told))
            assert frames[0] == (4, 0, 0, b"")
            kind, _, stream, payload = frames[-1]
            last, error = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
            assert (kind, stream, payload[8:]) == (7, 0, b"This server speaks HTTP/1.1 and HTTP/1.0, not HTTP/2.")
            assert (last, error) == (3 if ASKED in sent else 0, 1 if b"\xff" in sent else 13)
            assert [frame[:3] for frame in frames[1:-1]] == ([(1, 4, 3), (0, 1, 3)] if ASKED in sent else [])
            if ASKED in sent:
                message = "This server speaks HTTP/1.1 and HTTP/1.0, not HTTP/2."
                assert json.loads(frames[2][3]) == {"error": {"message": message}}

    asyncio.run(go())


def http2_frames(told: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each."""
    while told:
        size = int.from_bytes(told[:3], "big")
        yield told[3], told[4], int.from_bytes(told[5:9], "big"), told[9 : 9 + size]
        told = told[9 + size :]


async def everything(process: Process, sent: bytes) -> bytes:
    """What the server says to this until it closes the connection."""
    host, port = process.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    told = await reader.read()
    writer.close()
    return told
