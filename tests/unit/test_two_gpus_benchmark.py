"""The benchmark of two GPUs, on a CPU: it measures every layout and compares each figure with the right one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import limits, two_gpus


def test_ratios_are_larger_where_a_layout_is_better() -> None:
    one = {"256 requests, tokens/s": 100.0, "1 rows, ms": 6.0}
    assert two_gpus.ratio_of("512 requests, tokens/s", 190.0, one, 256) == 1.9
    assert two_gpus.ratio_of("256 requests, tokens/s", 150.0, one, 256) == 1.5
    assert two_gpus.ratio_of("1 rows, ms", 3.0, one, 256) == 2.0


def test_each_layout_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(runtime: object, prompts: list[list[int]], lengths: list[int]) -> float:
        del runtime
        return float(len(prompts) * max(lengths))

    jsonl = tmp_path / "lines"
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    monkeypatch.setattr(two_gpus, "generate", few)
    words = "--model-path tiny --layouts one,pp --device cpu --max-total-tokens 1024 --jsonl"
    monkeypatch.setattr(sys, "argv", ["two_gpus", *words.split(), str(jsonl)])
    assert two_gpus.main() == 0
    one, pp = (json.loads(line) for line in jsonl.read_text().splitlines())
    assert one["1 rows, ms"] == pp["1 rows, ms"] > 0 and "512 requests, tokens/s" in pp
    assert "pp: 256 requests" in capsys.readouterr().out
