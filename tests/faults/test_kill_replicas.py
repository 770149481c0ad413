"""Under load, processes of two replicas are killed again and again: no request is lost but those that a killed frontend held."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.kill_replicas import TARGETS, kill_all

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("num_kills", "seconds"),
    [(4, 60.0), pytest.param(24, 600.0, marks=[pytest.mark.full, pytest.mark.timeout(1200)])],
)
def test_no_request_is_lost(num_kills: int, seconds: float, qwen3_checkpoint: Path, tmp_path: Path) -> None:
    tally, code = kill_all(str(qwen3_checkpoint), tmp_path, num_kills, seconds)
    assert tally.losses == [] and code == 0
    assert tally.ends["answered"] > 0
    hit = Counter(what for _, what, _ in tally.kills)
    assert hit if num_kills < 24 else set(hit) == set(TARGETS)
