"""Memory that a rank releases and takes back: afterwards everything is as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.memory.memory_loan import memory_loan
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.engine_work import LoadWeights, WeightsSource
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError, UpdateError
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import run_ranks
from tests.support.runners import make_runner

ALL = ["weights", "kv_cache", "cuda_graph"]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "float32"}),
    ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    ("qwen3", {"dtype": "bfloat16", "enable_lora": True, "max_lora_rank": 8}),
    ("qwen3_moe", {"dtype": "bfloat16", "quantization": "fp8"}),
    ("deepseek_v3", {"dtype": "bfloat16", "quantization": "fp8"}),
]


def source_of(folder: Path) -> WeightsSource:
    return WeightsSource(str(folder), version_of(folder))


def idle() -> None:
    """Report progress to nobody."""


def drawn(runner: ModelRunner) -> list[list[int]]:
    runner.reset()
    jobs = [Job([7, 8, 9, n], greedy(6)) for n in range(3)]
    PlanDriver(runner, 16).run(jobs)
    return [job.outputs for job in jobs]


@pytest.mark.parametrize(("family", "options"), WAYS)
def test_what_comes_back_is_what_was_released(
    checkpoint: CheckpointFactory, family: str, options: dict[str, Any]
) -> None:
    folder = checkpoint(family)
    runner = make_runner(folder, 16, **options)
    loan = memory_loan(runner, source_of(folder))
    before, tensors = drawn(runner), [one.detach().clone() for one in runner.loaded.model.parameters()]
    addresses = [one.data_ptr() for one in runner.loaded.model.parameters()]
    for _ in range(2):
        assert loan.release(ALL, None, idle) > 0
        assert not all(map(torch.equal, tensors, runner.loaded.model.parameters())), "nothing was given back"
        loan.resume(ALL, None, idle)
        for one, now in zip(tensors, runner.loaded.model.parameters(), strict=True):
            assert torch.equal(one.float(), now.float())
        assert drawn(runner) == before
    assert addresses == [one.data_ptr() for one in runner.loaded.model.parameters()]


def test_every_rank_takes_its_part_back(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")

    def work(tp: TensorParallel) -> bool:
        runner = make_runner(folder, 16, tp, dtype="float32")
        loan, before = memory_loan(runner, source_of(folder)), drawn(runner)
        loan.release(ALL, None, idle)
        loan.resume(ALL, None, idle)
        return drawn(runner) == before

    assert run_ranks(2, tmp_path, work) == [True, True]


def test_the_weights_of_an_update_come_back_from_its_folder(checkpoint: CheckpointFactory) -> None:
    old, new = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    runner = make_runner(old, 16, dtype="float32")
    loan = memory_loan(runner, source_of(old))
    runner.update_weights(LoadWeights(str(new)), idle)
    updated = drawn(runner)
    loan.release(ALL, source_of(new), idle)
    with pytest.raises(UpdateError, match="were changed"):
        loan.resume(ALL, WeightsSource(str(new), "another version"), idle)
    loan.resume(ALL, source_of(new), idle)
    assert drawn(runner) == updated
    with pytest.raises(UpdateError, match="no folder has them"):
        loan.release(ALL, WeightsSource("", ""), idle)
    assert drawn(runner) == updated


def test_new_weights_may_come_while_the_old_ones_are_released(checkpoint: CheckpointFactory) -> None:
    old, new = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    runner = make_runner(old, 16, dtype="float32")
    loan = memory_loan(runner, source_of(old))
    loan.release(["weights"], None, idle)
    with pytest.raises(UpdateError, match="put the old files back, or call /update_weights_from_disk"):
        loan.resume(["weights"], WeightsSource(str(old), "another version"), idle)
    loan.update_weights(LoadWeights(str(new)), idle)
    assert drawn(runner) == drawn(make_runner(new, 16, dtype="float32"))


def test_options_that_cannot_take_it_back_are_refused_at_the_start(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 16, dtype="float32", load_format="dummy")
    with pytest.raises(StartError, match="--load-format dummy"):
        memory_loan(runner, source_of(checkpoint("qwen3")))
