"""The benchmark of two GPUs, on a CPU: it measures every layout and compares each figure with the right one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import limits, two_gpus


def test_figures_of_twice_as_many_requests_are_compared_with_those_of_one_gpu() -> None:
    one = {"256 requests, tokens/s": 100.0, "256 streams over HTTP, tokens/s": 80.0, "1 rows, ms": 6.0}
    assert two_gpus.quotient("512 requests, tokens/s", 190.0, one, 256) == " (1.900 ×)"
    assert two_gpus.quotient("256 requests, tokens/s", 150.0, one, 256) == " (1.500 ×)"
    assert two_gpus.quotient("512 streams over HTTP, tokens/s", 160.0, one, 256) == " (2.000 ×)"
    assert two_gpus.quotient("1 rows, ms", 3.0, one, 256) == " (0.500 ×)"
    assert two_gpus.quotient("long prompt, s", 3.0, one, 256) == ""


@pytest.mark.full
def test_each_layout_has_a_line_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = tmp_path / "lines"
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    words = "--model-path tiny --layouts one,pp-17-15,pp --requests 4 --tokens 16 --device cpu --jsonl"
    monkeypatch.setattr(sys, "argv", ["two_gpus", *words.split(), str(jsonl)])
    assert two_gpus.main() == 1
    one, failed, pp = (json.loads(line) for line in jsonl.read_text().splitlines())
    assert one["32 rows, ms"] > 0 and one["4 streams over HTTP, tokens/s"] > 0 and pp["8 requests, tokens/s"] > 0
    assert not [name for name in failed if name.endswith("tokens/s")]
    said = capsys.readouterr().out
    assert "pp-17-15: failed with " in said and " ×)" in said.splitlines()[-1]
