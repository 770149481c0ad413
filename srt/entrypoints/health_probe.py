"""The probe behind /health_generate: it generates one token, ahead of all other requests."""

from __future__ import annotations

import asyncio
import uuid

from srt.managers.tokenizer_manager.api_types import GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager

RID_PREFIX = "HEALTH_CHECK"
DEADLINE_S = 20.0
FRESH_S = 1.0


class HealthProbe:
    """A shared probe: at most one runs at a time, and a success is reused for a second, because each may cost a request its slot."""

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._well_at = float("-inf")

    async def run(self, engine: TokenizerManager) -> None:
        """Wait for a token; raise RequestError (503) if none comes within the deadline."""
        loop = asyncio.get_running_loop()
        if self._running is None:
            if loop.time() - self._well_at < FRESH_S:
                return
            self._running = loop.create_task(self._ask(engine))
            self._running.add_done_callback(self._handle_end)
        await asyncio.shield(self._running)

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is None:
            self._well_at = task.get_loop().time()

    async def _ask(self, engine: TokenizerManager) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not await _has_token(engine):
                    pass  # try again: a client that aborted all requests aborted this one too
        except TimeoutError:
            raise RequestError(503, f"No token came within {DEADLINE_S:g} s.") from None
        except RequestError as error:
            raise RequestError(503, f"No token could be generated: {error.message}") from error


async def _has_token(engine: TokenizerManager) -> bool:
    request = GenerateInput(
        params=engine.sampling_params({"max_new_tokens": 1, "temperature": 0}),
        input_ids=[0],
        rid=f"{RID_PREFIX}_{uuid.uuid4().hex}",
        urgent=True,
    )
    with await engine.submit(request) as handle:
        return any(update.completion_tokens for update in await handle.collect())
