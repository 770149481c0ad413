"""The page behind a real socket, with an engine in front of it that says what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from srt.entrypoints.http_protocol import http_config
from srt.entrypoints.http_server import HttpServer
from tests.unit.entrypoints.fake_engine import World

Result = TypeVar("Result")
DEADLINE_S = 60.0
COUNTERS = {
    "num_running": 3,
    "num_waiting": 2,
    "num_total_pages": 100,
    "num_free_pages": 50,
    "num_cached_pages": 30,
    "num_pinned": 10,
    "page_size": 16,
    "num_steps": 100,
    "num_rows": 400,
    "num_prompt_rows": 100,
    "num_prompt_tokens": 1000,
    "num_cached_tokens": 250,
    "num_computed_prompt_tokens": 750,
    "num_generated_tokens": 300,
    "num_finished": 7,
    "num_preempted": 1,
    "step_us": 500_000,
}


class PageServer:
    """A World that a browser can reach. Its loop runs in a thread: `do` is the way in."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        self._options = options
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._is_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="page-server")
        self._thread.start()
        self._is_up.result(DEADLINE_S)

    def do(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, called on the server's loop."""

        async def go() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(go(), self._loop).result(DEADLINE_S)

    def wait(self, claim: Callable[[], Result]) -> Result:
        """The result of `claim` once it is true; asked whenever the loop has a turn for it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (result := self.do(claim)):
            assert time.monotonic() < deadline_s, "never true"
        return result

    @property
    def num_open(self) -> int:
        """Answers on their way."""
        return len(self._server.server_state.tasks)

    def close(self) -> None:
        """Cut all connections. Twice does no harm."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._server.stop, 0)
        self._loop.call_soon_threadsafe(setattr, self._server, "force_exit", True)
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            if self._is_up.done():
                raise
            self._is_up.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self.world = World(**self._options)
        self.world.engine.counters |= COUNTERS
        self._server = HttpServer(http_config(self.world.app, self.world.service.args))
        self._is_up.set_result(None)
        await self._server.serve(sockets=[self._socket])
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@contextlib.contextmanager
def page_server(port: int = 0, **options: Any) -> Iterator[PageServer]:
    server = PageServer(port, **options)
    try:
        yield server
    finally:
        server.close()
