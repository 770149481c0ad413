"""The MTP layer of DeepSeek V3 drafts on a GPU what a plain implementation drafts, and its drafts change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_speculation import SMALL, TIGHT
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import Answers, answers_of, check_equal, engine_of, requests_of
from tests.support.drafted_server import most_tokens_a_step
from tests.support.eagle3_heads import WatchedDrafts
from tests.support.mtp_checkpoint import ReferenceMtp, add_mtp_layer

pytestmark = pytest.mark.gpu

NEXTN: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp_layer(checkpoint("deepseek_v3", num_layers=3, tied=False), tmp_path_factory.mktemp("mtp") / "model")


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
    folder: Path, expected: Answers, page_size: int, options: dict[str, Any], captures: bool
) -> None:
    engine, runner = engine_of(folder, page_size, **options, **NEXTN, speculative_draft_model_path=str(folder))
    if captures:
        runner.graphs.capture_all()
    watched, aborted = WatchedDrafts(runner, ReferenceMtp(folder)), (3, 6)
    check_equal(answers_of(engine, requests_of(7, 24), aborted), expected, aborted)
    print(f"{watched.num_compared} chains compared, {watched.num_different} differ")
    assert watched.num_compared > 5
    assert watched.num_different == 0
    engine.core.memory.check([])


def test_a_server_that_drafts_by_its_own_layer_answers_as_one_without(folder: Path) -> None:
    """Most drafts are wrong, because the weights are random."""
    most = most_tokens_a_step(folder, "cuda", {}, NEXTN)
    print(f"up to {most:.2f} tokens a step")
    assert most >= 1
