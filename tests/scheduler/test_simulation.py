"""Simulated worlds, each another mixture of sizes, delays, deaths, aborts and crowds. What they check is said in world.py and beside it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scheduler.rules import LEAST_PER_MILLION
from tests.scheduler.settings import Settings
from tests.scheduler.simulate import Tally, run_worlds, soak
from tests.scheduler.world import World

MUST_HAPPEN = (
    *"num_mixed_steps num_cached_tokens num_evicted_pages num_dropped_rows num_aborted_waiting num_aborted_prefill".split(),
    *"num_aborted_decode num_failed num_held_back preemptions finished refused deaths".split(),
    *("lost ranges", "frontend deaths", "crossing aborts", "prefix hits", "captures while busy", "captures while idle"),
)


def test_random_worlds_keep_every_promise() -> None:
    tally = run_worlds(range(16))
    quiet = [name for name in MUST_HAPPEN if not tally.statistics[name]]
    assert not quiet, "these worlds were too quiet to prove anything"
    assert not tally.unknown_rules(), "rules.py does not say what these are"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_200_000_steps_of_busy_worlds_keep_every_promise() -> None:
    tally = Tally(first=10_000, next_seed=10_000)
    soak(tally, 200_000, jobs=os.cpu_count() or 1)
    print(tally.report())
    assert tally.rows_quantile(0.5) >= 8
    assert tally.share_with_rows(64) >= 0.08
    for name in ("preemptions", "num_evicted_pages", "deaths", "crossing aborts", "prefix hits"):
        assert tally.per_million(name) >= 1000, f"only {tally.per_million(name):.0f} {name} per million steps"
    assert not tally.unknown_rules(), "rules.py does not say what these are"
    # All are above LEAST_PER_MILLION in three million steps. In this sample a rule of few worlds can have a third less.
    rare = {name: count for name, count in tally.rare_rules().items() if count < LEAST_PER_MILLION * 2 / 3}
    assert not rare, "these rules had something to judge too seldom, per million steps"


QUIET = Settings(num_slots=64, num_pages=4000, abort_share=0.0, num_questions=0, read_share=0.0)


def run(settings: Settings, seed: int = 1) -> Counter[str]:
    world = World(seed, settings)
    world.run()
    return world.statistics


def test_a_crowd_shares_steps() -> None:
    counts = run(replace(QUIET, num_requests=120, arrival_gap=0.0))
    assert counts["num_rows"] > 16 * counts["steps"]


def test_memory_for_one_request_at_a_time_is_enough() -> None:
    settings = Settings(page_size=1, num_pages=132, max_request_tokens=130, num_requests=40, arrival_gap=0.0)
    assert run(settings)["finished"] > 0


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


@pytest.mark.full
def test_a_soak_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, first = Tally(), Tally()
    soak(whole, 6000)
    soak(first, 300, tmp_path / "soak.json")
    second = Tally.load(tmp_path / "soak.json")
    soak(second, 6000, jobs=2)
    assert first.next_seed < second.next_seed == whole.next_seed
    assert second.statistics == whole.statistics
