"""What the benchmark of deaths counts, and that a server of its own gives it something to count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.recovery import Answer, Figures, Load

NUM_REQUESTS, LENGTH = 6, 1200


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["recovery", *words])
    return recovery.main()


def words_for(checkpoint: Path, victims: str) -> list[str]:
    words = ["--model-path", str(checkpoint), "--victims", victims, "--num-requests", str(NUM_REQUESTS)]
    words += ["--output-len", str(LENGTH), "--input-len", "20"]
    return [*words, "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192"]


@pytest.mark.e2e
@pytest.mark.full
def test_who_loses_its_engine_gets_the_same_tokens_and_who_loses_its_frontend_is_counted(
    qwen3_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = words_for(qwen3_checkpoint, "nobody,worker,scheduler,frontend")
    assert run(monkeypatch, *words, "--jsonl", str(file)) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [
        {**record, "run": one["run"], "commit": one["commit"]} for record, one in zip(printed, written, strict=True)
    ] == written
    assert [record["victim"] for record in printed] == ["nobody", "worker", "scheduler", "frontend"]
    *engine, frontend = printed
    for record in engine:
        counts = {name: record[name] for name in ("streams", "finished", "broke", "held", "wrong", "same_ids")}
        everything = {"streams": NUM_REQUESTS, "finished": NUM_REQUESTS, "same_ids": NUM_REQUESTS}
        assert counts == {**everything, "broke": 0, "held": 0, "wrong": 0}
    assert frontend["finished"] + frontend["broke"] == NUM_REQUESTS
    assert 0 < frontend["broke"] == frontend["held"]
    assert (frontend["wrong"], frontend["same_ids"]) == (0, frontend["finished"])
    for record in printed:
        expected = 0 if record["victim"] == "nobody" else recovery.NUM_NEW
        assert record["new"] == record["new_answered"] == expected
        assert record["dtype"] == "float32"
        assert set(Figures.__dataclass_fields__) <= set(record)


@pytest.mark.e2e
def test_a_server_that_replaces_nobody_ends_the_benchmark_with_the_reason(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words_for(qwen3_checkpoint, "worker"), "--max-replacements", "0") == 1
    assert "Worker 0 was killed by SIGKILL" in capsys.readouterr().err


def test_a_server_that_does_not_start_ends_the_benchmark_with_the_reason(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--model-path", str(qwen3_checkpoint), "--page-size", "0") == 1
    assert "--page-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        *(
            (words, "--num-requests and --input-len")
            for words in ("--num-requests 0", "--input-len 0", "--output-len 1")
        ),
        *((f"--victims {names}", "argument --victims") for names in ("supervisor", "worker,", "worker;scheduler")),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_is_started(
    words: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model-path", "no-such-model", *words.split())
    assert reason in capsys.readouterr().err


def answer_of(*chunks: tuple[float, list[int], int], trouble: str | None = None) -> Answer:
    """Of chunks: when each came, its ids, and how many the server had counted."""
    answer = Answer(sent_s=0.0, trouble=trouble)
    for when_s, ids, count in chunks:
        answer.take({"output_ids": ids, "meta_info": {"completion_tokens": count}})
        answer.chunks_s[-1] = when_s
    return answer


def figures_of(*answers: Answer, held: int = 0) -> Figures:
    """Beside streams that each gave 5, 6 and 7, a second apart."""
    good = answer_of((1.0, [5], 1), (2.0, [6], 2), (3.0, [7], 3))
    return Figures.of("worker", Load(list(answers), held=held), 0.0, Load([good] * len(answers)), 2.0)


def test_the_pause_is_the_longest_of_each_stream_that_finished() -> None:
    slow = answer_of((1.0, [5], 1), (5.0, [6], 2), (6.0, [7], 3))
    slower = answer_of((1.0, [5], 1), (3.0, [6], 2), (11.0, [7], 3))
    broken = answer_of((1.0, [5], 1), (90.0, [6], 2), trouble="the connection ended")
    figures = figures_of(slow, slower, broken, held=1)
    assert (figures.finished, figures.broke, figures.same_ids, figures.wrong) == (2, 1, 2, 0)
    assert (figures.pause_p50_s, figures.pause_max_s, figures.undisturbed_pause_max_s) == (6.0, 8.0, 1.0)
    assert (figures.pause_ratio, figures.later_s) == (4.0, 8.0)
    assert figures.keeps_its_promise


def test_a_stream_that_nobody_held_may_not_break() -> None:
    broken = answer_of((1.0, [5], 1), trouble="the connection ended")
    assert not figures_of(broken).keeps_its_promise
    assert figures_of(broken).finished == 0


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([(1.0, [5], 1), (2.0, [7], 3)], id="lost"),
        pytest.param([(1.0, [5], 1), (2.0, [5, 6], 2), (3.0, [7], 3)], id="repeated"),
        pytest.param([(1.0, [5, 6], 2)], id="too short"),
    ],
)
def test_lost_and_repeated_tokens_are_wrong(chunks: list[tuple[float, list[int], int]]) -> None:
    figures = figures_of(answer_of(*chunks))
    assert (figures.wrong, figures.same_ids) == (1, 0)
    assert not figures.keeps_its_promise


def test_another_draw_is_not_the_same_and_not_wrong() -> None:
    figures = figures_of(answer_of((1.0, [5, 6, 8], 3)))
    assert (figures.wrong, figures.same_ids) == (0, 0)
    assert figures.keeps_its_promise
