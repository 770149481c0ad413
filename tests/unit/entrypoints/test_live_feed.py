"""What the live view is told: differences between observations, a history for whoever comes late, health in words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from srt.entrypoints.live_feed import HISTORY, difference
from srt.managers.process.heartbeats import ProcessStatus
from srt.managers.scheduler.counters import Counters
from tests.support.page_server import COUNTERS
from tests.unit.entrypoints.fake_engine import World


def observation(time: float, **changes: int) -> dict[str, Any]:
    return {"time": time, "engine": {**COUNTERS, **{name: COUNTERS[name] + more for name, more in changes.items()}}}


def make_world(**options: Any) -> World:
    world = World(**options)
    world.engine.counters |= COUNTERS
    return world


def test_a_point_is_what_happened_between_two_observations() -> None:
    point = difference(
        observation(10.0),
        observation(
            12.0,
            num_steps=4,
            num_rows=20,
            num_prompt_rows=8,
            num_generated_tokens=30,
            num_computed_prompt_tokens=100,
            num_prompt_tokens=400,
            num_cached_tokens=300,
            step_us=8000,
        ),
    )
    assert point == {
        "time": 12.0,
        "decode": 15.0,
        "prompt": 50.0,
        "step_ms": 2.0,
        "prompt_rows": 2.0,
        "decode_rows": 3.0,
        "hit_rate": 0.75,
        "running": 3,
        "waiting": 2,
        "kv_running": 0.3,
        "kv_cached": 0.2,
        "kv_free": 0.5,
    }


def test_a_model_with_experts_tells_how_many_a_step_takes_and_which_is_the_busiest() -> None:
    later = observation(2.0)
    told = Counters(distinct_experts=(4.0, 6.0), peak_loads=(1.5, 2.5)).values()
    later["engine"] |= {name: value for name, value in told.items() if "_of_layer_" in name}
    point = difference(observation(1.0), later)
    assert point is not None and (point["experts"], point["peak_load"]) == (5.0, 2.5)


def test_where_nothing_ran_there_is_no_step_time() -> None:
    point = difference(observation(1.0), observation(2.0))
    assert point is not None
    assert (point["decode"], point["step_ms"], point["decode_rows"], point["hit_rate"]) == (0.0, None, None, None)


def test_two_engines_are_not_compared() -> None:
    assert difference(observation(1.0), observation(2.0, num_steps=-50)) is None
    assert difference(observation(2.0), observation(2.0)) is None


def test_who_comes_late_gets_the_history_and_who_stays_gets_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.entrypoints.live_feed.PERIOD_S", 3600.0)

    async def go() -> None:
        feed = make_world().service.feed
        for _ in range(4):
            await feed.observe()
        watcher = feed.follow()
        first = await anext(watcher)
        assert len(first["points"]) == 3
        await feed.observe()
        await feed.observe()
        assert len((await anext(watcher))["points"]) in (2, 3)  # the feed's own task looks once, too
        late = await anext(feed.follow())
        assert len(late["points"]) >= 5

    asyncio.run(go())


def test_the_history_ends_somewhere() -> None:
    async def go() -> None:
        feed = make_world().service.feed
        for _ in range(HISTORY + 20):
            await feed.observe()
        assert len((await anext(feed.follow()))["points"]) == HISTORY

    asyncio.run(go())


def test_an_observation_that_fails_fails_its_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    async def go() -> None:
        feed = make_world().service.feed
        monkeypatch.setattr(feed, "_snapshot", broken)
        with pytest.raises(ZeroDivisionError):
            await anext(feed.follow())
        monkeypatch.undo()
        begun_anew = await anext(feed.follow())
        assert begun_anew["health"] == "connected"

    asyncio.run(go())


def test_each_process_is_told_with_its_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    process_statuses = [
        ProcessStatus("frontend 1", 11, 30.0, 0.0, False),
        ProcessStatus("scheduler 0", 12, 0.2, 0.0, False),
        ProcessStatus("worker 0", 13, 0.2, 0.1, False),
    ]
    monkeypatch.setattr(world.service, "process_statuses", lambda: process_statuses)

    async def go() -> dict[str, Any]:
        return await world.service.snapshot()

    told = asyncio.run(go())
    assert told["health"] == "connected", "another frontend's trouble is not this one's"
    assert [(one["name"], one["is_well"], one["words"]) for one in told["processes"]] == [
        ("frontend 1", False, "Frontend 1 has given no sign of life for 30 s."),
        ("scheduler 0", True, "well"),
        ("worker 0", True, "at work"),
    ]


def test_a_process_in_trouble_makes_the_server_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    monkeypatch.setattr(world.service, "trouble", lambda process_statuses: "Worker 0 hangs.")

    async def go() -> dict[str, Any]:
        return await world.service.snapshot()

    told = asyncio.run(go())
    assert (told["health"], told["trouble"]) == ("stuck", "Worker 0 hangs.")
