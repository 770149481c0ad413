"""Drafts change no answer: tokens, logprobs, ends and usage are those of the same engine without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from srt.model_executor.step.step_output import VerifiedOnDevice
from srt.protocol.messages import GenerateRequest, LogprobSpec
from srt.sampling.sampling_params import SamplingParams
from srt.speculative.drafter import DraftRows, Ints
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import (
    MOST_DRAFTS,
    NOISE,
    VOCAB,
    Answers,
    ToldDrafter,
    answers_of,
    check_equal,
    engine_of,
    noisy,
    requests_of,
)
from tests.support.plan_driver import token_ids
from tests.support.recorder import Recorder


@pytest.fixture(scope="module")
def expected(checkpoint: CheckpointFactory) -> Answers:
    engine, _ = engine_of(checkpoint("qwen3"), 16)
    return answers_of(engine, requests_of(7, 24))


@pytest.mark.parametrize(
    ("page_size", "chunk", "num_tokens", "count", "graphs"),
    [(16, 64, 8192, 24, None), (1, 7, 110, 24, None), (16, 1, 8192, 8, None), (1, 7, 110, 24, Recorder())],
    ids=["all at once", "with preemption", "token by token", "as on a GPU"],
)
def test_drafts_right_and_wrong_at_each_place_change_no_answer(
    checkpoint: CheckpointFactory,
    expected: Answers,
    page_size: int,
    chunk: int,
    num_tokens: int,
    count: int,
    graphs: Recorder | None,
) -> None:
    aborted, requests = (3, 6), requests_of(7, 24)[:count]
    expected = {key: answer for key, answer in expected.items() if key[0] < count}
    engine, runner = engine_of(
        checkpoint("qwen3"),
        page_size,
        chunked_prefill_size=chunk,
        max_total_tokens=num_tokens,
        max_running_requests=6,
        schedule_conservativeness=0.01,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
        capture=graphs,
    )
    if graphs is not None:
        runner.graphs.capture_all()
    sequences = [requests[rid].prompt_ids.tolist() + answer.ids for (rid, _), answer in expected.items()]
    drafter = runner._drafter = ToldDrafter(runner, sequences)
    found = answers_of(engine, requests, aborted)
    check_equal(found, expected, aborted)
    assert min(drafter.num_right) >= (1 if count == 24 else 0), drafter.num_right
    counters = engine.core.counters
    assert (counters.num_preempted > 0) == (num_tokens < 1000)
    assert counters.num_cached_tokens > 0
    engine.core.memory.check([])


@pytest.mark.parametrize("graphs", [None, Recorder()], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.99, 1.0), (NOISE, 0.2, 0.8)])
def test_a_model_that_draws_alike_is_right_as_often(
    checkpoint: CheckpointFactory,
    expected: Answers,
    tmp_path: Path,
    noise: float,
    least: float,
    most: float,
    graphs: Recorder | None,
) -> None:
    """The model drafts for itself: each draft is right, whatever the parameters, behind cached prefixes too."""
    folder = checkpoint("qwen3")
    engine, runner = engine_of(
        folder,
        4,
        chunked_prefill_size=7,
        max_total_tokens=200,
        max_running_requests=6,
        schedule_conservativeness=0.01,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(noisy(folder, tmp_path / "noisy", noise)),
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
        capture=graphs,
    )
    if graphs is not None:
        runner.graphs.capture_all()
    rights: list[int] = []  # of each first draft, whether it was right
    note = runner._limits.note

    def noted(slots: Ints, num_drafts: Ints, num_right: Ints) -> None:
        rights.extend((num_right > 0).tolist())
        note(slots, num_drafts, num_right)

    runner._limits.note = noted
    check_equal(answers_of(engine, requests_of(7, 24)), expected)
    assert len(rights) > 40
    assert least <= np.mean(rights) <= most
    assert engine.core.counters.num_cached_tokens > 0


@pytest.mark.parametrize("noise", [0.0, NOISE])
@pytest.mark.parametrize(("page_size", "hears_late"), [(4, True), (1, False)], ids=["both late", "the rank alone"])
def test_steps_launched_before_lengths_are_known_change_no_answer(
    checkpoint: CheckpointFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noise: float,
    page_size: int,
    hears_late: bool,
) -> None:
    """As on a GPU whose draws are not there yet when the next step is planned.

    The scheduler may have heard of draws that this rank has not read yet, when it plans the last step of a row.
    """
    folder = checkpoint("qwen3")
    requests = [
        structs.replace(request, logprobs=LogprobSpec()) for request in requests_of(3, 12 if hears_late else 24)
    ]
    plain, _ = engine_of(folder, 4, max_running_requests=3 if hears_late else 6)
    expected = answers_of(plain, requests)
    engine, runner = engine_of(
        folder,
        page_size,
        hears_late,
        max_running_requests=3 if hears_late else 6,
        capture=Recorder(),
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(noisy(folder, tmp_path / "noisy", noise)),
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
    )
    engine.hears_all = not hears_late
    num_ahead = 0
    draft_ahead = runner._drafter.draft_ahead

    def counted(rows: DraftRows) -> Ints:
        nonlocal num_ahead
        num_ahead += len(runner._launched)
        drafts: Ints = draft_ahead(rows)
        return drafts

    monkeypatch.setattr(runner._drafter, "draft_ahead", counted)
    monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: False)
    check_equal(answers_of(engine, requests), expected)
    assert num_ahead >= 5
    engine.core.memory.check([])


def test_layers_with_windows_verify_drafts_too(checkpoint: CheckpointFactory) -> None:
    folder, prompts = checkpoint("gemma3_text", num_layers=4), [token_ids(np.random.default_rng(1), 60, VOCAB)]
    options: dict[str, Any] = {"max_total_tokens": 400, "max_running_requests": 4, "chunked_prefill_size": 16}
    plain, runner = engine_of(folder, 4, **options)
    assert runner.state.windows
    outputs = plain.run(prompts, 40)
    engine, runner = engine_of(folder, 4, speculative_algorithm="NGRAM", speculative_num_draft_tokens=5, **options)
    drafter = runner._drafter = ToldDrafter(runner, [prompts[0] + outputs[0]])
    assert engine.run(prompts, 40) == outputs
    assert sum(drafter.num_right) > 5


@pytest.mark.parametrize("graphs", [None, Recorder()], ids=["as on a CPU", "as on a GPU"])
def test_repetitions_are_drafted(checkpoint: CheckpointFactory, graphs: Recorder | None) -> None:
    """Where a bias leaves one token, the answer repeats itself, and each step brings as many tokens as it may."""
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
    engine, _ = engine_of(checkpoint("qwen3"), 16, capture=graphs, **options)
    (request,) = requests_of(1, 1)
    sampling = SamplingParams.from_dict({"logit_bias": {"9": 100.0}, "max_new_tokens": 41}).spec(41, ())
    repeating = GenerateRequest(
        0, "0", request.prompt_ids, request.choices, request.output_ids, sampling, LogprobSpec(), 5
    )
    assert answers_of(engine, [repeating])[0, 0].ids == [9] * 41
    assert engine.core.counters.num_steps <= 1 + 2 + 38 // 5 + 1
