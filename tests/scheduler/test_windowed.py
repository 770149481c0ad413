"""Simulated worlds whose model has layers with a window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduler.mutations import Mutation
from tests.scheduler.plant import find
from tests.scheduler.rules import PREFIX, RULES
from tests.scheduler.simulate import run_worlds
from tests.scheduler.window_mutations import WINDOW_MUTATIONS
from tests.scheduler.windowed import FIRST_WINDOWED

WINDOW_RULES = tuple(PREFIX + name for name in RULES if "window" in name)
FEW_WORLDS = range(FIRST_WINDOWED, FIRST_WINDOWED + 6)
MORE_WORLDS = range(FIRST_WINDOWED, FIRST_WINDOWED + 40)


def test_worlds_with_windows_keep_every_promise() -> None:
    statistics = run_worlds(FEW_WORLDS).statistics
    for name in (*WINDOW_RULES, f"{PREFIX}cached pages hold the request's tokens"):
        assert statistics[name] >= 20, f"{name}: had too little to judge"
    assert statistics["preemptions"], "these worlds have too much room"


@pytest.mark.full
@pytest.mark.parametrize("mutation", WINDOW_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_found_in_worlds_with_windows(mutation: Mutation, tmp_path: Path) -> None:
    world, output = find(mutation, tmp_path, MORE_WORLDS)
    assert world is not None, f"nothing was found in {len(MORE_WORLDS)} worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: found by world {world}")
