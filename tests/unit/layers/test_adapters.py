"""Rows with LoRA adapters get the tokens of the models that the adapters merge into, and rows without one those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.model_runner import ModelRunner
from tests.support.adapter_cases import SPECS, cases_of, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import PlanDriver
from tests.support.ranks import run_ranks
from tests.support.runners import make_runner


def adapted_runner(folder: Path, root: Path, page_size: int = 16, tp: TensorParallel | None = None) -> ModelRunner:
    runner = make_runner(folder, page_size, tp, enable_lora=True, dtype="float32")
    for name in SPECS:
        load(runner, root, name)
    return runner


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("phi3", "gemma2", "qwen3_moe"))]
)
def test_tokens_equal_those_of_the_merged_models(checkpoint: CheckpointFactory, tmp_path: Path, family: str) -> None:
    folder = checkpoint(family, tied=False)
    cases = cases_of(folder, tmp_path, 4)
    for page_size, chunk in ((1, 7), (16, 1 << 30)):
        driver = PlanDriver(adapted_runner(folder, tmp_path, page_size), page_size, chunk, share=True)
        jobs = [case.job() for case in cases]
        driver.run(jobs[::2])
        driver.run(jobs[1::2])
        assert [job.outputs for job in jobs] == [case.expected for case in cases]
        assert len({job.adapter for job in jobs if job.cached >= 30}) > 1


@pytest.mark.parametrize(
    ("family", "size"),
    [("phi3", 2), pytest.param("qwen3", 2, marks=pytest.mark.full), pytest.param("llama", 4, marks=pytest.mark.full)],
)
def test_ranks_give_the_same_tokens(checkpoint: CheckpointFactory, tmp_path: Path, family: str, size: int) -> None:
    """With 4 ranks, pairs of them hold the same key and value heads."""
    folder = checkpoint(family, tied=False)
    cases = cases_of(folder, tmp_path, 3)

    def work(tp: TensorParallel) -> list[list[int]]:
        driver = PlanDriver(adapted_runner(folder, tmp_path, 16, tp), 16, 24)
        jobs = [case.job() for case in cases]
        driver.run(jobs)
        return [job.outputs for job in jobs]

    assert run_ranks(size, tmp_path, work) == [[case.expected for case in cases]] * size
