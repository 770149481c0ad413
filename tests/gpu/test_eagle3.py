"""A head that drafts from hidden states on a GPU: its drafts are those of a plain implementation, and they change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import srt
from srt.model_executor.step.step_output import VerifiedOnDevice
from srt.utils.checkpoint import resolve_model_path
from tests.gpu.test_speculation import PROMPTS, SMALL, TIGHT, count_ahead, story_requests
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import Answers, answers_of, check_equal, engine_of, requests_of
from tests.support.eagle3_heads import ReferenceHead, WatchedDrafts, make_head

pytestmark = pytest.mark.gpu

TAPS = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3", num_layers=4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    engine, _ = engine_of(folder, 16, **SMALL)
    return answers_of(engine, requests_of(7, 24))


@pytest.mark.parametrize(
    ("page_size", "options", "captures"),
    [(16, SMALL, True), (1, TIGHT, True), (16, {**SMALL, "chunked_prefill_size": 7}, False)],
    ids=["all at once", "with preemption", "no graphs"],
)
def test_drafts_are_those_of_a_plain_implementation_and_change_no_answer(
    folder: Path, expected: Answers, tmp_path: Path, page_size: int, options: dict[str, Any], captures: bool
) -> None:
    head = make_head(folder, tmp_path / "head", draft_vocab=300, taps=TAPS)
    engine, runner = engine_of(folder, page_size, **options, **eagle3(head))
    if captures:
        runner.graphs.capture_all()
    watched = WatchedDrafts(runner, ReferenceHead(folder, head, TAPS))
    aborted = (3, 6)
    check_equal(answers_of(engine, requests_of(7, 24), aborted), expected, aborted)
    print(f"{watched.num_compared} chains compared, {watched.num_different} differ")
    assert watched.num_compared > 5
    assert watched.num_different == 0
    engine.core.memory.check([])


def eagle3(head: Path, num_steps: int = 3) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": num_steps,
    }


@pytest.mark.parametrize("is_late", [True, False], ids=["ahead of results", "behind results"])
def test_the_shipped_head_drafts_what_the_model_draws(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    if is_late:
        monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: False)
    folder, options = resolve_model_path("tiny"), {**SMALL, "dtype": "float32"}
    plain, _ = engine_of(folder, 16, **options)
    expected = answers_of(plain, story_requests())
    engine, runner = engine_of(folder, 16, is_late, **options, **eagle3(resolve_model_path("tiny-eagle3")))
    runner.graphs.capture_all()
    num_ahead = count_ahead(runner)
    found = answers_of(engine, story_requests())
    check_equal(found, expected)
    ends = [answer.done for answer in found.values() if answer.done is not None]
    rates = [done.num_verified_ids / max(done.num_verified, 1) for done in ends]
    print(f"ids a verification: {[round(rate, 2) for rate in rates]}; {len(num_ahead)} steps launched ahead")
    assert bool(num_ahead) or not is_late
    assert max(rates) > 2


def test_a_server_with_a_head_answers_as_one_without() -> None:
    """Through all processes: graphs are captured between requests. How many steps bring drafts depends on their times."""
    options: dict[str, Any] = {"model_path": "tiny", "dtype": "float32", "max_total_tokens": 8192}
    drafts: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "tiny-eagle3"}
    answers, rates = [], []
    for given in ({}, drafts):
        with srt.Runtime(**options, **given) as runtime:
            for parameters in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}):
                asked = {"max_new_tokens": 60, "sampling_seed": 5, **parameters}
                found = [runtime.generate(PROMPTS, asked) for _ in range(3)]
                answers.append([answer["output_ids"] for batch in found for answer in batch])
                rates += [answer["meta_info"].get("spec_accept_length", 0.0) for batch in found for answer in batch]
    print(f"EAGLE3: {max(rates):.2f} tokens a step at most")
    assert answers[:2] == answers[2:]


def test_a_cached_prefix_brings_its_entries(folder: Path, tmp_path: Path) -> None:
    """Entries in shared pages are read, not computed anew: the second request computes those of its last tokens alone."""
    head = make_head(folder, tmp_path / "head", taps=TAPS)
    engine, runner = engine_of(folder, 4, **SMALL, **eagle3(head))
    lengths: list[int] = []
    extend = runner._drafter._steps.extend

    def counted(slots: Any, starts: Any, ends: Any, has_outputs: bool) -> torch.Tensor:
        lengths.extend((ends - starts).tolist())
        hidden: torch.Tensor = extend(slots, starts, ends, has_outputs)
        return hidden

    runner._drafter._steps.extend = counted
    prompt = list(range(3, 83))
    engine.run([prompt], 1)
    engine.run([[*prompt[:60], 7, 8, 9]], 1)
    assert lengths == [79, 3]
