"""The benchmark of sums over ranks: that its ranks meet, that sums are checked, and what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import rank_sums


def test_ranks_on_a_cpu_time_their_sums_by_the_group(tmp_path: Path) -> None:
    jsonl = tmp_path / "lines"
    words = ["--ranks", "2", "--rows", "1,3", "--width", "64", "--jsonl", str(jsonl)]
    command = [sys.executable, "-m", "benchmarks.rank_sums", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = json.loads(jsonl.read_text())["lines"]
    assert [(line["rows"], line["way"]) for line in lines] == [(1, "gloo"), (3, "gloo")]
    assert all(line["us"] > 0 for line in lines)
    assert done.stdout.count(" µs") == 2


def test_the_sum_that_is_expected_is_that_of_all_parts_and_no_other() -> None:
    cpu = torch.device("cpu")
    parts = [rank_sums.part_of(rank, 3, 64, cpu) for rank in range(3)]
    assert not torch.equal(parts[0], parts[1])
    assert torch.equal(rank_sums.sum_of(3, 3, 64, cpu), (parts[0].float() + parts[1] + parts[2]).bfloat16())


@pytest.mark.parametrize(
    "words", [["--ranks", "1"], ["--rows", "0"], ["--rows", "4,-1"], ["--rows", "few"], ["--width", "0"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rank_sums", *words])
    with pytest.raises(SystemExit) as refusal:
        rank_sums.main()
    assert refusal.value.code == 2
