"""The scheduler's benchmark: that it runs and reports. What it measures is not tested: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_part_of_the_scheduler_benchmark_runs_and_reports() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.scheduler", "--quick"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    kinds = {report["benchmark"] for report in reports}
    assert kinds == {"scheduler step", "scheduler ratio", "prefix cache", "eviction", "prefix reuse"}
    (reuse,) = [report for report in reports if report["benchmark"] == "prefix reuse"]
    assert 0 < reuse["of_infinite"] <= 1 and 0 < reuse["of_optimum"] <= 1  # the optimum is one
