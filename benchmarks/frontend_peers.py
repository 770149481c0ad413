"""The processes around a frontend for benchmarks/frontend.py: an engine that says tokens at a rate, and two servers to compare.

python -m benchmarks.frontend_peers engine RUN_DIR RATE NUM_TOKENS NUM_STREAMS
python -m benchmarks.frontend_peers server RUN_DIR MODEL_FOLDER     the real frontend; prints its URL, then answers on its input
python -m benchmarks.frontend_peers bare CHUNKS_FILE RATE           an ASGI app without anything that streams given chunks
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq

from srt.entrypoints.app import App
from srt.entrypoints.http_protocol import http_config
from srt.entrypoints.http_server import HttpServer, settle_garbage
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.links import Received, RouterLink, frontend_path
from srt.protocol.messages import (
    Abort,
    AckBatch,
    FrontendHello,
    GenerateRequest,
    RequestDone,
    SchedulerHello,
    TokenBatch,
    int32_array,
)
from srt.server_args import ServerArgs

MOST_UNACKNOWLEDGED = 8  # batches, as the scheduler has it
CONTEXT = 1 << 21
FIRST_ID, NUM_IDS = 300, 1000  # the tokens that are said
PROBE_S = 0.001


def said(first_prompt_id: int, position: int) -> int:
    """Token `position` of the answer to a prompt that begins with this id: known to whoever reads the stream."""
    return FIRST_ID + (first_prompt_id * 31 + position * 7) % NUM_IDS


class PacedEngine:
    """Says `num_tokens` tokens to each request, `rate` a second, in one batch for all of them each 1/rate s. With eight batches that
    the frontend has not acknowledged it waits, and then says all that is due: as the scheduler does. The clock starts when all
    streams are there."""

    def __init__(self, run_dir: str, rate: float, num_tokens: int, num_streams: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = RouterLink(self._context, frontend_path(run_dir, 1), 1)
        self._rate, self._num_tokens, self._num_streams = rate, num_tokens, num_streams
        self._rids: list[int] = []
        self._firsts: list[int] = []
        self._sent: list[int] = []
        self._began_s: float | None = None
        self._next_number = self._acknowledged = 0
        self._peer = b""

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        next_tick_s = time.monotonic()
        while True:
            poller.poll(max(0, round((next_tick_s - time.monotonic()) * 1000)))
            while (received := self._link.receive()) is not None:
                assert isinstance(received, Received), received
                self._take(received)
            now = time.monotonic()
            if now >= next_tick_s:
                next_tick_s = max(next_tick_s + 1 / self._rate, now)
                self._say(now)

    def _take(self, received: Received) -> None:
        self._peer = received.peer
        match received.message:
            case FrontendHello():
                self._link.send(self._peer, SchedulerHello(CONTEXT, CONTEXT, 16))
            case AckBatch(number):
                self._acknowledged = number + 1
            case GenerateRequest():
                message = received.message
                if message.sampling.max_new_tokens == 1:
                    self._answer_at_once(message.rid)
                    return
                self._rids.append(message.rid)
                self._firsts.append(int(message.prompt_ids[0]))
                self._sent.append(0)
            case Abort(rid):
                if rid in self._rids:
                    self._forget([self._rids.index(rid)])

    def _answer_at_once(self, rid: int) -> None:
        self._send([rid], [0], [[FIRST_ID]], [RequestDone(rid, 0, "length", -1, 1, 0)])

    def _say(self, now: float) -> None:
        if self._began_s is None:
            if len(self._rids) < self._num_streams:
                return
            self._began_s = now
        if not self._rids:
            self._began_s = None
            return
        if self._next_number - self._acknowledged >= MOST_UNACKNOWLEDGED:
            return
        due = min(self._num_tokens, int((now - self._began_s) * self._rate) + 1)
        rows = [row for row, sent in enumerate(self._sent) if sent < due]
        if not rows:
            return
        ids = [[said(self._firsts[row], at) for at in range(self._sent[row], due)] for row in rows]
        ended = due == self._num_tokens
        done = [RequestDone(self._rids[row], 0, "length", -1, due, 0) for row in rows] if ended else []
        self._send([self._rids[row] for row in rows], [self._sent[row] for row in rows], ids, done)
        for row in rows:
            self._sent[row] = due
        if ended:
            self._forget(rows)

    def _send(self, rids: list[int], first: list[int], ids: list[list[int]], done: list[RequestDone]) -> None:
        zeros = np.zeros(len(rids), np.int32)
        counts = int32_array([len(one) for one in ids])
        batch = TokenBatch(
            number=self._next_number,
            rids=np.asarray(rids, np.int64),
            choices=zeros,
            first=int32_array(first),
            counts=counts,
            cached=zeros,
            ids=int32_array([token for one in ids for token in one]),
            logprobs=[],
            done=done,
        )
        self._next_number += 1
        self._link.send(self._peer, batch)

    def _forget(self, rows: list[int]) -> None:
        for row in sorted(rows, reverse=True):
            del self._rids[row], self._firsts[row], self._sent[row]


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    return listener


async def serve_ours(run_dir: str, folder: str) -> None:
    """The real frontend. Each line on its input starts (`probe`) or ends (`stop`) sampling how late its event loop is."""
    args = ServerArgs(model_path=folder, json_model_override_args=json.dumps({"max_position_embeddings": CONTEXT}))
    manager = await TokenizerManager.connect(index=0, generations=[1], run_dir=run_dir, model_folder=folder, args=args)
    await manager.wait_ready()
    service = Service(args)
    service.begin(manager, 0.0)
    settle_garbage()
    listener = listening()
    server = HttpServer(http_config(App(service), args))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await _answer_orders()
    server.stop(0.0)
    await serving
    await manager.close()


async def _answer_orders() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    delays: list[float] = []
    probing: asyncio.Task[None] | None = None
    while line := await orders.readline():
        if line == b"probe\n":
            delays = []
            probing = asyncio.create_task(_probe(delays))
        elif line == b"stop\n" and probing is not None:
            probing.cancel()
            print(json.dumps(delays), flush=True)


async def _probe(delays: list[float]) -> None:
    """How much later than asked for the loop comes back, once a millisecond."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        delays.append(loop.time() - due)


class BareApp:
    """Streams the same chunks to everybody who asks, `rate` a second: nothing but ASGI."""

    def __init__(self, chunks: Sequence[bytes], rate: float) -> None:
        self._chunks = chunks
        self._rate = rate
        self._waiting: list[asyncio.Future[None]] = []

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + 1 / self._rate, loop.time())
            await asyncio.sleep(next_s - loop.time())
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if not one.done():
                    one.set_result(None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        while (await receive()).get("more_body"):
            pass
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for chunk in self._chunks:
            due = loop.create_future()
            self._waiting.append(due)
            await due
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def serve_bare(chunks: list[bytes], rate: float) -> None:
    app = BareApp(chunks, rate)
    settle_garbage()
    listener = listening()
    server = HttpServer(http_config(app, ServerArgs(model_path="none")))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ticking = asyncio.create_task(app.tick())
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await _answer_orders()
    ticking.cancel()
    server.stop(0.0)
    await serving


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "engine":
        run_dir, rate, num_tokens, num_streams = words
        PacedEngine(run_dir, float(rate), int(num_tokens), int(num_streams)).run()
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if kind == "server":
            runner.run(serve_ours(words[0], words[1]))
        else:
            chunks = [bytes.fromhex(line) for line in Path(words[0]).read_text().split()]
            runner.run(serve_bare(chunks, float(words[1])))


if __name__ == "__main__":
    main()
