"""Control calls to the scheduler, such as flushing the cache or reading its state; each gets one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import JoinUpdateGroup, ReceiveWeights, UpdateWeights
from srt.protocol.messages import ControlReply, FromFrontend


class ControlCalls:
    """Owner of the control calls that have no reply yet."""

    def __init__(self, send: Callable[[FromFrontend], None]) -> None:
        self._send = send
        self._open: dict[int, tuple[FromFrontend, asyncio.Future[ControlReply]]] = {}
        self._num_made = 0
        self._num_own = 0  # open calls made by the frontend itself

    @property
    def num_of_clients(self) -> int:
        return len(self._open) - self._num_own

    def call(self, make: Callable[[int], FromFrontend], is_own: bool = False) -> asyncio.Future[ControlReply]:
        """Send the message that `make` builds for a call number. The result, to be awaited, gets the reply with that number.

        is_own: the frontend itself asks; no client waits for the reply.
        """
        number = self._num_made
        self._num_made += 1
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        message = make(number)
        self._open[number] = message, answer
        self._num_own += is_own
        answer.add_done_callback(lambda _: self._forget(number, is_own))  # also if it is cancelled
        self._send(message)
        return answer

    def _forget(self, number: int, is_own: bool) -> None:
        del self._open[number]
        self._num_own -= is_own

    def handle(self, reply: ControlReply) -> None:
        """Resolve the call that this reply answers. Does nothing if the call was cancelled."""
        _, answer = self._open.get(reply.call, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def send_again(self) -> None:
        """Send all open calls to a new scheduler; the one they were sent to is gone.

        Those that need a trainer's process group fail: the trainer has met the ranks that are gone, and must begin again.
        """
        for message, answer in self._open.values():
            if not _needs_trainer(message):
                self._send(message)
            elif not answer.done():
                answer.set_exception(
                    RequestError(503, "The engine was replaced: call /init_weights_update_group again.")
                )

    def fail(self, error: Exception, kinds: tuple[type, ...] = (object,)) -> None:
        """Raise `error` in the open calls of these kinds: no reply will come."""
        for message, answer in self._open.values():
            if isinstance(message, kinds) and not answer.done():
                answer.set_exception(error)


def _needs_trainer(message: FromFrontend) -> bool:
    return isinstance(message, UpdateWeights) and isinstance(message.work, JoinUpdateGroup | ReceiveWeights)
