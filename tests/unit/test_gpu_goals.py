"""The run of all goals of the GPU engine: what it makes of the benchmarks' reports, and what it does when they fail. Not the goals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_goals
from benchmarks.gpu_goals import PARTS, Command, commands, figures_of, goals, read, run, table


def one_batch(model: str, sampling: dict[str, Any], **values: float) -> dict[str, Any]:
    names = {
        "decode_1": "decode, 1 × 128 in, 512 out",
        "decode_64": "decode, 64 × 1024 in, 256 out",
        "decode_256": "decode, 256 × 1024 in, 256 out",
        "host": "host, 256 rows, launch_us_p50",
        "answer": "host, 256 rows, answer_us_p50",
        "loop": "host, 1 rows, loop_us_p99",
        "prefill": "prefill, 8 × 8192",
        "cold": "shared prefix, 64 × (4096 + 32), cold",
        "again": "shared prefix, 64 × (4096 + 32), again",
    }
    lines = [{"what": names[key], "unit": "?", "value": value, "limit": None} for key, value in values.items()]
    return {"benchmark": "one_batch", "model": model, "sampling": sampling, "lines": lines}


def everything() -> list[dict[str, Any]]:
    """A report of each kind for each model. The goals of 8B are met, but for a decode step; the others miss theirs."""
    steps = {"decode_1": 3.9, "decode_64": 7.5, "decode_256": 17.0, "host": 150, "answer": 40, "loop": 400}
    steps |= {"prefill": 41_000, "cold": 0.7, "again": 0.6}
    records: list[dict[str, Any]] = []
    for model, slower in (("qwen3-8b", 1.0), ("qwen3-0.6b", 30.0), ("qwen3-14b", 30.0)):
        scaled = {name: value / slower if name == "prefill" else value * slower for name, value in steps.items()}
        records += [
            {"benchmark": "offline_throughput", "model": model, "output_tokens_s": 11_000 / slower},
            one_batch(model, {}, **scaled),
            one_batch(model, {"frequency_penalty": 1}, decode_64=8.0),
            {"benchmark": "serving", "model": model, "rate": 0.0, "output_tokens_s": 10_900 / slower**2},
            {"benchmark": "serving", "model": model, "rate": 9.0, "tpot_p99_ms": 12 * slower, "step_p50_ms": 10},
            {"benchmark": "startup", "model": model, "no_caches": False, "first_token_s": [9.0 * slower, 5.0 * slower]},
            {"benchmark": "startup", "model": model, "no_caches": True, "first_token_s": [20.0 * slower]},
        ]
    return records


def test_every_goal_finds_its_figure_and_is_judged() -> None:
    lines = table(figures_of(everything()), goals()).splitlines()[1:]
    judged = lines[: len(goals())]
    assert not any("not measured" in line for line in judged)
    of_8b = [line for line in judged if line.startswith("qwen3-8b")]
    assert [line for line in of_8b if not line.endswith("OK")] == [line for line in of_8b if "decode 64, ms" in line]
    assert all(line.endswith("missed") for line in judged if not line.startswith("qwen3-8b"))
    rest = "\n".join(lines[len(goals()) :])
    assert "decode 64, ms (all wishes)" in rest and "result to launch, 1 row, p99, µs" in rest


def test_what_was_not_measured_is_said_and_later_figures_win() -> None:
    assert table({}, goals()).count("not measured") == len(goals())
    assert {goal.part for goal in goals()} < set(PARTS)
    records = [{"benchmark": "offline_throughput", "model": "m", "output_tokens_s": n} for n in (1.0, 2.0)]
    assert figures_of(records) == {("m", "output tokens/s"): 2.0}


def test_half_the_rate_is_judged_by_the_devices_step_and_by_nothing_that_a_late_frontend_stretches() -> None:
    served = {"benchmark": "serving", "model": "m", "rate": 9.0, "tpot_p99_ms": 30.0, "itl_p50_ms": 25.0}
    assert figures_of([served]) == {}
    assert figures_of([{**served, "step_p50_ms": 10.0}]) == {("m", "TPOT p99 / step at half rate"): 3.0}


def test_work_of_the_host_is_that_of_launch_and_answer() -> None:
    found = figures_of([one_batch("m", {}, host=150, answer=60)])
    assert found == {("m", "host work of a step of 256, µs"): 210}
    assert figures_of([one_batch("m", {}, host=150)]).keys().isdisjoint(found)


def test_lines_that_were_cut_short_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read(file) == []
    file.write_text('{"benchmark": "startup"}\n{"benchma')
    assert read(file) == [{"benchmark": "startup"}]


def test_all_parts_have_commands_in_their_order_and_half_the_rate_waits_for_the_throughput(tmp_path: Path) -> None:
    figures: dict[tuple[str, str], float] = {}
    made = commands(["qwen3-8b", "qwen3-14b"], tmp_path / "r", figures)
    seen = [next(made)]
    figures["qwen3-8b", "output tokens/s"] = 11_240.0
    seen += made
    assert list(dict.fromkeys(command.part for command in seen)) == list(PARTS)
    (rate,) = (command.words for command in seen if command.part == "rate")
    assert rate[rate.index("--rate") + 1] == "10.00"
    assert "rate" not in {command.part for command in commands(["qwen3-8b"], tmp_path / "r", {})}


def test_a_command_that_fails_or_takes_too_long_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"

    def outcome(code: str) -> tuple[bool, str]:
        succeeded, said = run(Command("part", "name", (sys.executable, "-c", code)), log, "r")
        return succeeded, said.partition(" (")[0]

    assert outcome("print('fine')") == (True, "done")
    assert outcome("raise SystemExit(3)") == (False, "failed with 3")
    monkeypatch.setattr(gpu_goals, "MOST_S", 0.5)
    assert outcome("import signal; signal.pause()") == (False, "stopped after 0 s")
    assert "fine" in log.read_text()


def test_a_run_that_is_stopped_leaves_no_command_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    words = (sys.executable, "-c", "import signal; signal.pause()")
    with pytest.raises(KeyboardInterrupt):
        run(Command("steps", "sleeps", words), tmp_path / "log", "r")
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_the_table_alone_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / gpu_goals.JSONL
    results.write_text("".join(json.dumps(record) + "\n" for record in everything()))
    monkeypatch.setattr(sys, "argv", ["gpu_goals", "--table", "--folder", str(tmp_path)])
    assert gpu_goals.main() == 1, "goals are missed"
    assert "missed" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == [gpu_goals.JSONL]


def write_of(results: Path, records: list[dict[str, Any]]) -> str:
    """A program that leaves these lines as a benchmark does."""
    return f"from benchmarks.limits import write_jsonl\nfor one in {records!r}: write_jsonl({str(results)!r}, one)"


@pytest.mark.parametrize(
    ("parts", "model", "failing", "code"),
    [
        (["throughput"], "qwen3-8b", "", 0),
        (["serving"], "qwen3-8b", "", 0),
        (["throughput"], "qwen3-14b", "", 1),  # missed
        (["throughput", "starts"], "qwen3-8b", "starts", 1),
        (["tests"], "qwen3-8b", "tests", 1),
        (["cold-starts"], "qwen3-8b", "cold-starts", 1),
    ],
)
def test_the_exit_says_whether_all_that_was_asked_for_was_measured_and_met_in_this_run(
    parts: list[str], model: str, failing: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / gpu_goals.JSONL
    results.write_text("".join(json.dumps({**record, "run": "old"}) + "\n" for record in everything()))
    kinds = {"throughput": "offline_throughput", "serving": "serving", "starts": "startup", "cold-starts": "startup"}
    made = [
        Command(
            part, part, (sys.executable, "-c", write_of(results, lines) if part != failing else "raise SystemExit(1)")
        )
        for part in PARTS
        if (lines := [one for one in everything() if one["benchmark"] == kinds.get(part) and not one.get("rate")])
        or part == "tests"
    ]
    monkeypatch.setattr(gpu_goals, "commands", lambda names, results, figures: iter(made))
    monkeypatch.setattr("benchmarks.models.folder_of", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["gpu_goals", *parts, "--models", model, "--folder", str(tmp_path)])
    assert gpu_goals.main() == code
    written = [record for record in read(results) if record["run"] != "old"]
    assert len({record["run"] for record in written}) == (1 if written else 0)
    assert all("commit" in record for record in written)
