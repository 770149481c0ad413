"""A history of the engine's last minutes for the web page: one observation a second, shared by all viewers.

It is recorded even without viewers, so that a newly opened page shows how the present state came about.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

PERIOD_S = 1.0
HISTORY = 300  # points

Snapshot = dict[str, Any]
Point = dict[str, float | None]


class LiveFeed:
    """Owner of the history. It observes from `start` on, or from the first call of `follow`."""

    def __init__(
        self, snapshot: Callable[[], Awaitable[Snapshot]], wait_draining: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Create a feed of what `snapshot` returns. It ends after `wait_draining` has returned."""
        self._snapshot = snapshot
        self._wait_draining = wait_draining
        self._points: deque[Point] = deque(maxlen=HISTORY)
        self._num_points = 0  # ever recorded
        self._last: Snapshot | None = None  # the latest one with counters
        self._now: Snapshot | None = None
        self._news = asyncio.Event()  # set and replaced at each observation
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Observe from now on. A second call does nothing."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(lambda _: self._notify_followers())

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the latest observation with the whole history, then each later one with its new points, until the server drains.

        A slow reader skips observations, but gets every point of the history.
        """
        self.start()
        assert self._task is not None
        seen, told = 0, None
        while True:
            news = self._news
            if self._now is not None and self._now is not told:
                told = self._now
                fresh = min(self._num_points - seen, len(self._points))
                seen = self._num_points
                yield {**told, "points": list(self._points)[len(self._points) - fresh :]}
                continue
            if self._task.done():
                self._task.result()  # raise the observer's error here too
                return
            await news.wait()

    async def observe(self) -> None:
        """Make an observation and wake all followers."""
        self._now = now = await self._snapshot()
        if now["engine"] is not None:
            if self._last is not None and (point := difference(self._last, now)) is not None:
                self._points.append(point)
                self._num_points += 1
            self._last = now
        self._notify_followers()

    def _notify_followers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _run(self) -> None:
        draining = asyncio.create_task(self._wait_draining())
        try:
            while not draining.done():
                await self.observe()
                await asyncio.wait((draining,), timeout=PERIOD_S)
            await self.observe()
        finally:
            draining.cancel()


def difference(before: Snapshot, now: Snapshot) -> Point | None:
    """Return the rates between two observations of the same engines; None if they are of others or no time has passed."""
    seconds = now["time"] - before["time"]
    old, new = before["engine"], now["engine"]
    if seconds <= 0 or new["num_steps"] < old["num_steps"] or before.get("replicas") != now.get("replicas"):
        return None

    def added(name: str) -> float:
        return float(new[name] - old[name])

    steps, prompt = added("num_steps"), added("num_prompt_tokens")
    prompt_rows = added("num_prompt_rows")
    return {
        "time": now["time"],
        "decode": added("num_generated_tokens") / seconds,
        "prompt": added("num_computed_prompt_tokens") / seconds,
        "step_ms": added("step_us") / steps / 1000 if steps else None,
        "prompt_rows": prompt_rows / steps if steps else None,
        "decode_rows": (added("num_rows") - prompt_rows) / steps if steps else None,
        "hit_rate": added("num_cached_tokens") / prompt if prompt else None,
        "running": new["num_running"],
        "waiting": new["num_waiting"],
        **memory_shares(new),
        **expert_values(new),
    }


def expert_values(engine: Mapping[str, Any]) -> dict[str, float]:
    """Return, for models with experts, how many of them a step took, the mean over layers, and the load of the busiest of all layers."""
    distinct = [value for name, value in engine.items() if name.startswith("distinct_experts_of_layer_")]
    peaks = [value for name, value in engine.items() if name.startswith("peak_load_of_layer_")]
    return {"experts": sum(distinct) / len(distinct), "peak_load": max(peaks)} if distinct else {}


def memory_shares(engine: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of KV memory that are running, cached and free. Cached pages in use by requests count as running."""
    total, free = engine["num_total_pages"], engine["num_free_pages"]
    cached = engine["num_cached_pages"] - engine["num_pinned"]
    return {
        "kv_running": (total - free - cached) / total,
        "kv_cached": cached / total,
        "kv_free": free / total,
    }
