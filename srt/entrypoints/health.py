"""Is it alive, is it ready, does it really generate? Three questions, three routes. None of them needs a key."""

from __future__ import annotations

import asyncio
import uuid

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.managers.io_struct import GenerateInput, RequestError
from srt.managers.tokenizer_manager import TokenizerManager

HEALTH_RID = "HEALTH_CHECK"
DEADLINE_S = 20.0


async def health(exchange: Exchange, service: Service) -> None:
    """Liveness: this process runs its loop, and has not lost its engine. It waits for nothing, so it answers under any load."""
    if service.has_lost_engine:
        raise RequestError(503, "The engine has ended.")
    await exchange.send(200, b"")


async def ready(exchange: Exchange, service: Service) -> None:
    """Readiness: a request sent now would be taken."""
    await exchange.send_json(
        {"status": service.status, "ready": service.is_ready},
        200 if service.is_ready else 503,
        [] if service.is_ready else [(b"retry-after", b"1")],
    )


async def health_generate(exchange: Exchange, service: Service) -> None:
    """A real token within the deadline, or 503."""
    await exchange.read_body()
    await exchange.run_while_connected(_generate(exchange, service.engine()))


async def _generate(exchange: Exchange, engine: TokenizerManager) -> None:
    request = GenerateInput(
        params=engine.sampling_params({"max_new_tokens": 1, "temperature": 0}),
        input_ids=[0],
        rid=f"{HEALTH_RID}_{uuid.uuid4().hex}",
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            with await engine.submit(request) as handle:
                await handle.collect()
    except TimeoutError:
        raise RequestError(503, f"No token came within {DEADLINE_S:g} s.") from None
    except RequestError as error:
        raise RequestError(503, f"No token could be generated: {error.message}") from error
    await exchange.send(200, b"")
