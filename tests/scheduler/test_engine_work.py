"""Weights are updated, memory is lent and adapters are loaded while requests run, and schedulers die between any two effects."""

from __future__ import annotations

from tests.scheduler.engine_work import tell_all


def test_no_death_breaks_what_updates_and_loans_promise() -> None:
    counts = tell_all(range(60))
    assert counts["steps"] > 3000 and counts["ends"] > 500
    for name in ("deaths in a change", "deaths with memory released", "cached prefixes", "calls refused"):
        assert counts[name] > 30, name
    works = ("LoadWeights", "ReceiveWeights", "ReleaseMemory", "ResumeMemory")
    for name in (f"{work} {how}" for work in works for how in ("done", "failed")):
        assert counts[name] > 5, name
    assert counts["rows with an adapter"] > 1000 and counts["adapters released"] > 100
    for name in ("adapters loaded in a change", "adapters loaded while memory is released"):
        assert counts[name] > 20, name
    for mode in ("abort", "retract", "in_place"):
        assert counts[f"pauses {mode}"] > 30, mode
