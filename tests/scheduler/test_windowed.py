"""Simulated worlds whose model has layers with a window."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scheduler.mutations import Mutation
from tests.scheduler.plant import run_with
from tests.scheduler.window_mutations import WINDOW_MUTATIONS
from tests.scheduler.windowed import WINDOW_RULES, run_windowed

FIRST_WORLDS = (0, 1, 2, 3, 4, 5, 6, 7)  # those that find all planted bugs


def test_worlds_with_windows_keep_every_promise() -> None:
    statistics = run_windowed(FIRST_WORLDS)
    for name in (*WINDOW_RULES, "rule: cached pages hold the request's tokens"):
        assert statistics[name] >= 20, f"{name}: had too little to judge"
    assert statistics["preemptions"], "these worlds have too much room"


@pytest.mark.full
def test_more_worlds_with_windows_keep_every_promise() -> None:
    run_windowed(range(100, 200))


@pytest.mark.full
@pytest.mark.parametrize("mutation", WINDOW_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_found_in_worlds_with_windows(mutation: Mutation, tmp_path: Path) -> None:
    mutation.plant(tmp_path)
    output = run_with(tmp_path, "from tests.scheduler.windowed import run_windowed", "run_windowed(range(40))")
    found = re.search(r"World (\d+) with a window broke.*", output)
    assert found, f"nothing was found in 40 worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")
