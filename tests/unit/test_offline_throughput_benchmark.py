"""The benchmark of throughput: which run is its figure, and what it refuses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import limits, offline_throughput
from benchmarks.graphs import wait_for_graphs
from srt.runtime import Runtime


def test_the_first_run_is_by_itself_and_the_best_of_the_others_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = tmp_path / "lines"
    done: list[str] = []
    generate = Runtime.generate

    def noted(*args: Any, **kw: Any) -> Any:
        done.append("run")
        return generate(*args, **kw)

    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    monkeypatch.setattr(offline_throughput, "wait_for_graphs", lambda _: done.append("wait"))
    monkeypatch.setattr(Runtime, "generate", noted)
    words = "--model-path tiny --requests 4 --least 2 --most 6 --runs 2 --device cpu --max-total-tokens 1024 --jsonl"
    monkeypatch.setattr(sys, "argv", ["offline_throughput", *words.split(), str(jsonl)])
    assert offline_throughput.main() == 0
    record = json.loads(jsonl.read_text())
    assert done == ["run", "run", "wait", "run", "run"], "the first run of all is short"
    assert len(record["seconds"]) == 2 and record["first_s"] > 0
    said = capsys.readouterr().out
    assert f"; the first after the start {record['first_s']:.2f})" in said
    tokens = int(said.split(" out:")[0].split()[-1].replace(",", ""))
    assert record["output_tokens_s"] == pytest.approx(tokens / min(record["seconds"]))


def test_adapters_that_take_turns_in_memory_are_compared_with_groups_of_the_same_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = tmp_path / "lines"
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("a device", 1e9, 1e9))
    monkeypatch.setattr(offline_throughput, "wait_for_graphs", lambda _: None)
    words = "--model-path tiny --requests 6 --least 2 --most 6 --runs 1 --device cpu --max-total-tokens 1024"
    words += " --adapters 3 --resident 1 --rank 2 --jsonl"
    monkeypatch.setattr(sys, "argv", ["offline_throughput", *words.split(), str(jsonl)])
    assert offline_throughput.main() == 0
    record = json.loads(jsonl.read_text())
    share = record["grouped_seconds"] / min(record["adapted_seconds"])
    assert f"1 of them resident: {share:.3f} of that without in the same groups" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--runs 0", "--requests 0", "--least 0", "--least 9 --most 8"])
def test_what_makes_no_run_is_refused_before_a_model_is_loaded(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline_throughput", "--model-path", "no-such-model", *words.split()])
    with pytest.raises(SystemExit):
        offline_throughput.main()
    assert "--least and --runs are at least 1" in capsys.readouterr().err


def test_graphs_are_waited_for_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capturing:
        left = 3

        def get_server_info(self) -> dict[str, Any]:
            return {"internal_states": [{"num_graphs_left": self.left}]}

    runtime: Any = Capturing()
    monkeypatch.setattr(time, "sleep", lambda _: setattr(runtime, "left", runtime.left - 1))
    wait_for_graphs(runtime)
    assert runtime.left == 0
