"""Random mixes of all parameters, with any number of drafts in each step, on all sizes of pages and chunks."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.step.step_output import VerifiedOnDevice
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import (
    MOST_DRAFTS,
    NOISE,
    Answers,
    answers_of,
    check_equal,
    engine_of,
    noisy,
    requests_of,
)
from tests.support.ranks import run_ranks
from tests.support.recorder import Recorder
from tests.support.runners import make_runner
from tests.support.whole_engine import WholeEngine

NUM_REQUESTS = 14
SEED = 23
OPTIONS: dict[str, Any] = {"max_total_tokens": 160, "max_running_requests": 5, "schedule_conservativeness": 0.01}


@pytest.fixture(scope="module")
def expected(checkpoint: CheckpointFactory) -> Answers:
    engine, _ = engine_of(checkpoint("qwen3"), 16)
    return answers_of(engine, requests_of(SEED, NUM_REQUESTS))


@pytest.fixture(scope="module")
def small(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that draws like the other in about half of the cases."""
    return noisy(checkpoint("qwen3"), tmp_path_factory.mktemp("small") / "noisy", NOISE)


def vary_drafts(engine: WholeEngine, seed: int) -> None:
    """Choose for each step anew whether its rows bring all drafts, half of them, or none."""
    rng, step = random.Random(seed), engine.step

    def stepped() -> None:
        for band in engine.core.planner._draft_length._bands.values():
            band.level, band.tried = rng.randrange(3), -1
        step()

    engine.step = stepped  # type: ignore[method-assign]


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "graphs"),
    [
        *itertools.product((1, 16), (1, 7, 64), [None]),
        *[(1, 7, Recorder()), (16, 64, Recorder())],  # as on a GPU
    ],
)
def test_any_number_of_drafts_in_each_step_changes_no_answer(
    checkpoint: CheckpointFactory,
    expected: Answers,
    small: Path,
    page_size: int,
    chunk: int,
    algorithm: str,
    graphs: Recorder | None,
) -> None:
    draft: dict[str, Any] = {"speculative_draft_model_path": str(small)} if algorithm == "STANDALONE" else {}
    engine, runner = engine_of(
        checkpoint("qwen3"),
        page_size,
        hears_late=graphs is not None,
        capture=graphs,
        chunked_prefill_size=chunk,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
        **draft,
        **OPTIONS,
    )
    if graphs is not None:
        runner.graphs.capture_all()
    vary_drafts(engine, page_size + chunk)
    aborted = (2, 9)
    check_equal(answers_of(engine, requests_of(SEED, NUM_REQUESTS), aborted), expected, aborted)
    assert engine.core.counters.num_verified_rows > 10
    engine.core.memory.check([])


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
@pytest.mark.parametrize("captures", [False, True], ids=["as on a CPU", "as on GPUs"])
def test_drafts_of_two_ranks_change_no_answer(
    checkpoint: CheckpointFactory,
    monkeypatch: pytest.MonkeyPatch,
    expected: Answers,
    small: Path,
    tmp_path: Path,
    algorithm: str,
    captures: bool,
) -> None:
    """Each rank is given the plans of a scheduler of its own, which plans alike as long as the ranks draw alike.

    The first rank's outputs are there at once, and the second one's late.
    """
    draft: dict[str, Any] = {"speculative_draft_model_path": str(small)} if algorithm == "STANDALONE" else {}
    first_threads: set[int] = set()
    monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: threading.get_ident() in first_threads)

    def answers_of_rank(tp: TensorParallel) -> Answers:
        if tp.rank == 0:
            first_threads.add(threading.get_ident())
        runner = make_runner(
            checkpoint("qwen3"),
            16,
            tp,
            capture=Recorder() if captures else None,
            tp_size=2,
            chunked_prefill_size=7,
            speculative_algorithm=algorithm,
            speculative_num_draft_tokens=1 + MOST_DRAFTS,
            **draft,
            **OPTIONS,
        )
        if captures:
            runner.graphs.capture_all()
        engine = WholeEngine(replace(runner.loaded.args, tp_size=1), runner, hears_late=captures)
        vary_drafts(engine, 5)
        return answers_of(engine, requests_of(SEED, NUM_REQUESTS))

    for found in run_ranks(2, tmp_path, answers_of_rank):
        check_equal(found, expected)
