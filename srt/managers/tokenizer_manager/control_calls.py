"""Questions and orders to the scheduler that it answers one by one, beside all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from srt.protocol.messages import ControlReply, FromFrontend


class ControlCalls:
    """Owner of the calls that have no answer yet."""

    def __init__(self, send: Callable[[FromFrontend], None]) -> None:
        self._send = send
        self._open: dict[int, tuple[FromFrontend, asyncio.Future[ControlReply]]] = {}
        self._num_made = 0
        self._num_own = 0  # that are open

    @property
    def num_of_clients(self) -> int:
        return len(self._open) - self._num_own

    async def call(self, make: Callable[[int], FromFrontend], is_own: bool = False) -> ControlReply:
        """Send what `make` makes for a number, and wait for the answer with that number. `is_own`: no client waits for it."""
        number = self._num_made
        self._num_made += 1
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        message = make(number)
        self._open[number] = message, answer
        self._num_own += is_own
        try:
            self._send(message)
            return await answer
        finally:
            del self._open[number]
            self._num_own -= is_own

    def take(self, reply: ControlReply) -> None:
        """Nothing if nobody waits for it any more."""
        _, answer = self._open.get(reply.call, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def send_again(self) -> None:
        """All that have no answer: whoever was asked has gone, and another one is there."""
        for message, _ in self._open.values():
            self._send(message)

    def fail(self, error: Exception) -> None:
        """No answer will come: whoever waits gets this."""
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)
