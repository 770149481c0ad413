"""A scheduler's end of the link, in the test's own event loop: the test reads what a frontend sends and says what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import zmq

from srt.protocol.links import Received, RouterLink, frontend_path
from srt.protocol.messages import (
    AckBatch,
    FrontendHello,
    Message,
    RequestDone,
    SchedulerHello,
    TokenBatch,
    TokenLogprobs,
    int32_array,
)
from srt.protocol.views import RequestView

Expected = TypeVar("Expected", bound=Message)
PATIENCE_S = 120  # far more than anything takes; reached only when something hangs


class FakeScheduler:
    """One frontend at a time. `expect` returns the next message and checks its kind; acknowledgements are counted, not returned."""

    def __init__(self, run_dir: str, generation: int = 1) -> None:
        self._run_dir, self._generation = run_dir, generation
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = RouterLink(self._context, frontend_path(run_dir, generation), generation)
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[Message | RequestView] = asyncio.Queue()
        self._peer = b""
        self._next_number = 0
        self.acknowledged = -1
        self._fd = int(self._link.socket.FD)
        self._loop.add_reader(self._fd, self._read)

    async def expect(self, kind: type[Expected]) -> Expected:
        async with asyncio.timeout(PATIENCE_S):
            message = await self._received.get()
        assert isinstance(message, kind), message
        return message

    def successor(self) -> FakeScheduler:
        """One of the next generation."""
        return FakeScheduler(self._run_dir, self._generation + 1)

    def has_received(self) -> bool:
        return not self._received.empty()

    async def welcome(self, max_request_tokens: int = 512) -> FrontendHello:
        hello = await self.expect(FrontendHello)
        self.send(SchedulerHello(max_total_num_tokens=4096, max_request_tokens=max_request_tokens, page_size=16))
        return hello

    def send(self, message: Any) -> None:
        self._link.send(self._peer, message)
        self._loop.call_soon(self._read)

    def send_tokens(
        self,
        rid: int,
        ids: Sequence[int],
        *,
        first: int = 0,
        choice: int = 0,
        done: RequestDone | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        cached: int = 0,
    ) -> None:
        """A batch with one range."""
        self.send_ranges([(rid, choice, first, ids)], [done] if done else [], logprobs, cached)

    def send_ranges(
        self,
        ranges: Sequence[tuple[int, int, int, Sequence[int]]],
        done: Sequence[RequestDone] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        cached: int = 0,
    ) -> None:
        number = self._next_number
        self._next_number += 1
        self.send(
            TokenBatch(
                number=number,
                rids=np.asarray([r[0] for r in ranges], np.int64),
                choices=int32_array([r[1] for r in ranges]),
                first=int32_array([r[2] for r in ranges]),
                counts=int32_array([len(r[3]) for r in ranges]),
                cached=int32_array([cached] * len(ranges)),
                ids=int32_array([i for r in ranges for i in r[3]]),
                logprobs=list(logprobs),
                done=list(done),
            )
        )

    def send_raw(self, data: bytes) -> None:
        self._link.socket.send_multipart((self._peer, data))

    def close(self) -> None:
        if not self._context.closed:
            self._loop.remove_reader(self._fd)
            self._link.close()
            self._context.term()

    def _read(self) -> None:
        while not self._context.closed:
            received = self._link.receive()
            if received is None:
                return
            assert isinstance(received, Received), received
            self._peer = received.peer
            if isinstance(received.message, AckBatch):
                self.acknowledged = received.message.number
            else:
                self._received.put_nowait(received.message)


def ended(rid: int, num_output: int, reason: str = "length", choice: int = 0, **fields: Any) -> RequestDone:
    return RequestDone(
        rid=rid,
        choice=choice,
        reason=reason,
        matched=fields.get("matched", -1),
        num_output=num_output,
        cached_tokens=fields.get("cached_tokens", 0),
        status=fields.get("status", 0),
        message=fields.get("message", ""),
    )
