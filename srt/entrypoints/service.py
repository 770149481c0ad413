"""What all routes share: the options, the engine once it is there, and whether requests are taken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from srt.managers.io_struct import RequestError
from srt.managers.tokenizer_manager import TokenizerManager
from srt.server_args import ServerArgs

STARTING, READY, DRAINING = "starting", "ready", "draining"


class Service:
    """Starting, then ready, then draining. Only the process's main loop moves it on."""

    def __init__(self, args: ServerArgs, index: int = 0, startup_file: Path | None = None) -> None:
        """`index` is this frontend's number; `startup_file` is where the supervisor leaves its start-up report."""
        self.args = args
        self.index = index
        self._startup_file = startup_file
        self.status = STARTING
        self.startup_s: float | None = None
        self._engine: TokenizerManager | None = None
        self._draining = asyncio.Event()

    def begin(self, engine: TokenizerManager, startup_s: float) -> None:
        """The whole server is ready: requests are taken from now on."""
        self._engine = engine
        self.startup_s = startup_s
        if self.status == STARTING:
            self.status = READY

    def drain(self) -> None:
        """Take no more requests; those that run may finish."""
        self.status = DRAINING
        self._draining.set()

    async def wait_draining(self) -> None:
        """Return when no more requests are taken."""
        await self._draining.wait()

    def startup_report(self) -> Any:
        """When each phase of each process began; None if the supervisor has not written it."""
        if self._startup_file is None:
            return None
        try:
            return orjson.loads(self._startup_file.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None

    @property
    def is_ready(self) -> bool:
        return self.status == READY and self._engine is not None and self._engine.is_ready

    @property
    def has_lost_engine(self) -> bool:
        """There was an engine, and it does not answer any more."""
        return self._engine is not None and not self._engine.is_ready

    def engine(self) -> TokenizerManager:
        """The engine for a new request; RequestError 503 while there is none."""
        if self.status == DRAINING:
            raise RequestError(503, "The server is shutting down.", retry_after_s=5)
        if self._engine is None:
            raise RequestError(503, "The server is starting.", retry_after_s=2)
        if not self._engine.is_ready:
            raise RequestError(503, "The engine is not available at the moment.", retry_after_s=2)
        return self._engine
