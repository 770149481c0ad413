"""The scheduler's benchmark: that it runs and reports. What it measures is not tested: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scheduler import form_of
from srt.utils.compiled import MODULES


def test_every_part_of_the_scheduler_benchmark_runs_and_reports() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.scheduler", "--quick"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    kinds = {report["benchmark"] for report in reports}
    assert kinds == {"scheduler step", "scheduler ratio", "scheduler forms", "prefix cache", "eviction", "prefix reuse"}
    reuses = [report for report in reports if report["benchmark"] == "prefix reuse"]
    assert len(reuses) == 4 and all(0 < reuse["hits"] <= reuse["optimum"] for reuse in reuses)  # the optimum is one


def test_the_scheduler_benchmark_refuses_a_partly_compiled_scheduler() -> None:
    assert form_of([]) == "compiled"
    assert form_of(list(MODULES)) == "plain"
    with pytest.raises(SystemExit, match=r"Plain: srt\.managers\.scheduler\.outbox$"):
        form_of(["srt.managers.scheduler.outbox"])
