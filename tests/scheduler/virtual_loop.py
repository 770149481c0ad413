"""What of an event loop a frontend's coroutines need, in the world's virtual time: futures, and turns in which they go on."""

from __future__ import annotations

import asyncio
from asyncio.events import _set_running_loop
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast


class VirtualLoop:
    """`call_later` does something after some seconds, if the process still lives."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        self._call_later = call_later
        self.is_over = False

    def run(self, coroutine: Coroutine[Any, Any, None], late_s: Callable[[], float] = lambda: 0.0) -> Task:
        """Begin with it at once. Where it waits it goes on `late_s()` after what it waits for has come."""
        return Task(self, coroutine, late_s)

    def do(self, action: Callable[[], Any]) -> Any:
        """As a callback of this loop."""
        before = asyncio._get_running_loop()
        _set_running_loop(cast("asyncio.AbstractEventLoop", self))
        try:
            return action()
        finally:
            _set_running_loop(before)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._call_later(seconds, action)

    # ---- As asyncio asks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast("asyncio.AbstractEventLoop", self))

    def call_soon(self, callback: Callable[..., None], *arguments: object, context: object = None) -> None:
        callback(*arguments)

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        """Of handles that are dropped with their world."""

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self.is_over


class Task:
    """A coroutine that runs to its end unless the process dies. What it raises is raised where it was woken."""

    __slots__ = ("_coroutine", "_late_s", "_loop", "is_done", "waits_for")

    def __init__(self, loop: VirtualLoop, coroutine: Coroutine[Any, Any, None], late_s: Callable[[], float]) -> None:
        self._loop, self._coroutine, self._late_s = loop, coroutine, late_s
        self.is_done = False
        self.waits_for: asyncio.Future[Any] | None = None
        self._go_on()

    @property
    def is_asleep(self) -> bool:
        """It waits, and nobody has woken it."""
        return self.waits_for is not None and not self.waits_for.done()

    def _go_on(self) -> None:
        if self._loop.is_over:
            return
        self.waits_for = None
        try:
            future = self._loop.do(partial(self._coroutine.send, None))
        except StopIteration:
            self.is_done = True
            return
        future._asyncio_future_blocking = False
        self.waits_for = future
        future.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        self._loop.later(self._late_s(), self._go_on)
