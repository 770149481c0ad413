"""The page at `/`: a chat, and a live view of the engine. Its files are in `page/`; the counters come as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import event
from srt.managers.io_struct import RequestError

FOLDER = Path(__file__).parent / "page"
# By path, and nothing else from the folder: its file and what it is.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PERIOD_S = 1.0
ANSWER_S = 3.0  # the scheduler takes messages between steps: longer means that one hangs

_POLICY = b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_FILE_HEADERS = [
    (b"cache-control", b"no-cache"),  # the files belong together: an update must not meet half of the last version
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


async def file(exchange: Exchange, service: Service) -> None:
    """One of FILES. They hold no secret, so that a browser can load them before it has the API key."""
    name, kind = FILES[exchange.path]
    await exchange.send(200, (FOLDER / name).read_bytes(), [(b"content-type", kind.encode()), *_FILE_HEADERS])


async def stats(exchange: Exchange, service: Service) -> None:
    """An event a second until the client leaves or the server drains. Nothing is counted while nobody watches."""
    await exchange.read_body()
    if exchange.method == "HEAD":
        await exchange.send(200, b"", [(b"content-type", b"text/event-stream; charset=utf-8")])
        return
    exchange.is_stream = True
    await exchange.run_while_connected(_stream(exchange, service))


async def _stream(exchange: Exchange, service: Service) -> None:
    draining = asyncio.create_task(service.wait_draining())
    try:
        while not draining.done():
            await exchange.write(event(await snapshot(service)))
            await asyncio.wait((draining,), timeout=PERIOD_S)
        await exchange.write(event(await snapshot(service)))
        await exchange.end()
    finally:
        draining.cancel()


async def snapshot(service: Service) -> dict[str, Any]:
    """How the server is; `engine` has the scheduler's counters, or is None while it does not tell them."""
    values: dict[str, Any] = {
        "time": time.monotonic(),
        "model": service.args.model_names()[0],
        "health": service.status,
        "is_paused": False,
        "num_running": None,
        "num_waiting": None,
        "engine": None,
        "frontend": {"index": service.index, "live_requests": 0},
    }
    if service.has_lost_engine:
        return values | {"health": "lost"}
    try:
        engine = service.engine()
    except RequestError:
        return values
    values["frontend"] |= engine.stats()
    if engine.load is not None:
        values |= {"num_running": engine.load.num_running, "num_waiting": engine.load.num_waiting}
    counters = None
    with contextlib.suppress(TimeoutError, RequestError):
        async with asyncio.timeout(ANSWER_S):
            _, _, counters = await engine.get_state()
    if not engine.is_ready:
        return values | {"health": "lost"}
    if counters is None:
        return values | {"health": "not answering"}
    return values | {
        "health": "connected",
        "is_paused": counters.get("is_paused", False),
        "num_running": counters["num_running"],
        "num_waiting": counters["num_waiting"],
        "engine": counters,
    }
