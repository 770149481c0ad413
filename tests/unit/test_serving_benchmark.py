"""What the benchmark over HTTP sends, and which of its runs counts."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from benchmarks import limits, serving
from benchmarks.serving import Call, Timing, make_calls
from srt.server_args import ServerArgs


def prompts(calls: list[Call]) -> list[list[int]]:
    return [json.loads(call.body)["input_ids"] for call in calls]


def test_a_seed_repeats_lengths_and_arrivals_and_no_prompt() -> None:
    first, again, other = (make_calls(20, 5.0, 100, 200, 0.6, seed) for seed in (0, 0, 1))
    assert [(call.at_s, call.new_tokens) for call in first] == [(call.at_s, call.new_tokens) for call in again]
    assert [len(prompt) for prompt in prompts(first)] == [len(prompt) for prompt in prompts(again)]
    assert [len(prompt) for prompt in prompts(first)] != [len(prompt) for prompt in prompts(other)]
    assert all(a[:16] != b[:16] for a, b in zip(prompts(first), prompts(again), strict=True)), "no page of 16 is cached"


def test_of_several_runs_the_best_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of 10 streams, in the seconds that each load takes; the first is the warm-up."""
    took_s = iter([1.0, 4.0, 2.0, 3.0])
    timings = [Timing(0.0, [0.5, 1.0], 2)] * 10
    monkeypatch.setattr(serving, "load", lambda *_: (timings, next(took_s)))
    states = iter({"worker_step_us_p50": us} for us in (0, 0, 4000, 2000, 3000))
    monkeypatch.setattr(serving, "state_of", lambda _: next(states))
    options = argparse.Namespace(requests=4, rate=0.0, least=2, most=3, temperature=0.6, seed=0, clients=1, runs=3)
    figures = serving.measure("", options)
    assert (figures["output_tokens_s"], figures["step_p50_ms"]) == (10.0, 2.0)
    assert next(took_s, None) is None


def test_the_limit_is_that_of_the_lengths_that_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does nothing but read: a weight of the output layer for each of the longest answer's steps, and KV."""
    monkeypatch.setattr(limits, "measured", lambda: limits.Device("reader", 1e3, 1e12))
    monkeypatch.setattr(limits.Shape, "of", lambda *_: limits.Shape(0, 500, 0, 0))
    options = argparse.Namespace(requests=7, least=3, most=9, seed=4)
    calls = make_calls(7, 0.0, 3, 9, 0.6, 4)
    tokens = [call.new_tokens for call in calls]
    assert len({len(prompt) for prompt in prompts(calls)} | set(tokens)) > 2
    assert serving.limit_of(ServerArgs(model_path="x"), options) == pytest.approx(sum(tokens) / max(tokens))


NO_LOAD = "--least and --clients are at least 1"
NO_BEST = "--runs is at least 1, and 1 at a --rate"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        *((words, NO_BEST) for words in ("--runs 0", "--runs 2 --rate 5")),
        *((words, NO_LOAD) for words in ("--requests 0", "--least 9 --most 8", "--rate -1", "--clients 0")),
    ],
)
def test_what_makes_no_load_or_has_no_best_is_refused_before_a_server_is_started(
    words: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", "--model-path", "no-such-model", *words.split()])
    with pytest.raises(SystemExit):
        serving.main()
    assert reason in capsys.readouterr().err
