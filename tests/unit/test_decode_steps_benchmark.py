"""The benchmark of decode steps by themselves: that its rows decode, and what it reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import decode_steps, limits
from benchmarks.decode_steps import Steps
from tests.support.checkpoints import CheckpointFactory
from tests.support.runners import make_runner


def test_every_step_adds_a_token_to_the_rows_that_decode(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, max_running_requests=3)
    steps = Steps(runner, [5, 40, 17], most_steps=12)
    steps.run(3, 4)
    steps.run(2, 5)
    assert steps.lengths.tolist() == [14, 49, 21]
    table = runner.state.req_to_token_pool.token_table
    fresh = [table[slot, length].item() for slot, length in enumerate((14, 49, 21))]
    assert all(0 <= token < runner.loaded.config.vocab_size for token in fresh), (
        "the newest token of each row was drawn"
    )
    with pytest.raises(AssertionError, match="tokens in pages for"):
        steps.run(1, 20)


def test_it_reports_each_round_beside_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = tmp_path / "lines"
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    words = (
        "--model-path tiny --rows 1,3 --context 20 --steps 2 --rounds 2 --device cpu --max-total-tokens 1024 --jsonl"
    )
    monkeypatch.setattr(sys, "argv", ["decode_steps", *words.split(), str(jsonl)])
    assert decode_steps.main() == 0
    record = json.loads(jsonl.read_text())
    assert [line["rows"] for line in record["steps"]] == [3, 3, 1, 1]
    contexts = [line["context"] for line in record["steps"]]
    assert np.diff(contexts).tolist() == [6, 6, 6], "four steps to warm up, and two"
    assert all(line["step_ms"] > 0 and line["limit_ms"] > 0 for line in record["steps"])
    assert capsys.readouterr().out.count(" ratio ") == 4


@pytest.mark.parametrize(("more", "rows"), [("--ep-size 2", [2, 1]), ("--dp-size 2 --enable-dp-attention", [2])])
def test_ranks_step_together(
    more: str, rows: list[int], checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl = tmp_path / "lines"
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    words = f"--model-path {checkpoint('qwen3_moe')} --rows 1,2 --context 20 --steps 2 --rounds 1 --device cpu --tp 2"
    words += f" --max-total-tokens 1024 {more} --jsonl"
    monkeypatch.setattr(sys, "argv", ["decode_steps", *words.split(), str(jsonl)])
    assert decode_steps.main() == 0
    record = json.loads(jsonl.read_text())
    assert [line["rows"] for line in record["steps"]] == rows
    assert all(line["distinct_experts"] >= 2 for line in record["steps"])


def test_rows_that_are_no_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_steps", "--model-path", "no-such-model", "--rows", "4,x"])
    with pytest.raises(SystemExit):
        decode_steps.main()
    assert "argument --rows" in capsys.readouterr().err
