"""Simulated worlds, each another mixture of sizes, delays, aborts and crowds. What they check is said in world.py and beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.scheduler.settings import Settings
from tests.scheduler.simulate import run_worlds
from tests.scheduler.world import World


def test_random_worlds_keep_every_promise() -> None:
    statistics = run_worlds(range(150))
    happened = {name for name, number in statistics.items() if number > 0}
    expected = (
        "num_mixed_steps num_finished num_cached_tokens num_evicted_pages num_dropped_rows num_catch_ups num_crossing_aborts"
        " num_aborted_waiting num_aborted_prefill num_aborted_decode num_failed num_asked_again num_held_back num_refused"
    )
    assert set(expected.split()) <= happened, "these worlds were too quiet to prove anything"


QUIET = Settings(num_slots=64, num_pages=4000, abort_share=0.0, resumed_share=0.0, is_disturbed=False)


def run(settings: Settings, seed: int = 1) -> Counter[str]:
    world = World(seed, settings)
    world.run()
    return world.statistics


def test_a_crowd_shares_steps() -> None:
    counts = run(replace(QUIET, num_requests=120, arrival_gap=0.0))
    assert counts["num_rows"] > 16 * counts["num_steps"]


def test_memory_for_one_request_at_a_time_is_enough() -> None:
    settings = Settings(page_size=1, num_pages=130, max_request_tokens=130, num_requests=40, arrival_gap=0.0)
    assert run(settings)["num_finished"] > 0


def test_running_ahead_costs_a_row_when_a_stop_is_found_late() -> None:
    """The price of planning a step before the last one is back: rows of requests that have just ended."""
    alone, ahead = run(replace(QUIET, window=1)), run(replace(QUIET, window=2))
    assert alone["num_dropped_rows"] == 0
    assert ahead["num_dropped_rows"] > 0


def test_a_world_can_be_replayed() -> None:
    first, second = World(5), World(5)
    first.run()
    second.run()
    assert first.statistics == second.statistics
    assert first.now == second.now
