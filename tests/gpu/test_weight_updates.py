"""Weights that are updated in place under captured graphs: afterwards every path draws what a fresh runner draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from srt.model_executor.model_runner import ModelRunner
from srt.protocol.engine_work import LoadWeights
from tests.support.adapter_cases import SPECS, cases_of, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.quantised_checkpoint import WEIGHT_ONLY, write_quantised
from tests.support.runners import decodes_of, make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
REAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
}
"""Layers of Qwen3-0.6B, which single rows decode in one kernel."""


def captured(folder: Path, **options: Any) -> ModelRunner:
    runner = make_runner(folder, 16, device=CUDA, cuda_graph_bs=(1, 2, 4), **options)
    runner.graphs.capture_all()
    return runner


def drawn(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of rows alone, of a few and of many."""
    found = []
    for num_rows in (1, 3, 12):
        runner.reset()
        jobs = [Job([7, 8, 9, n], greedy(8)) for n in range(num_rows)]
        PlanDriver(runner, 16).run(jobs)
        found += [job.outputs for job in jobs]
    return found


def check_update(old: Path, new: Path, **options: Any) -> ModelRunner:
    runner = captured(old, **options)
    before = drawn(runner)
    num_bytes = torch.cuda.memory_allocated(CUDA)
    runner.update_weights(LoadWeights(str(new)), lambda: None)
    assert torch.cuda.memory_allocated(CUDA) == num_bytes
    after = drawn(runner)
    assert after == drawn(captured(new, **options)) != before
    runner.update_weights(LoadWeights(str(old)), lambda: None)
    assert drawn(runner) == before
    return runner


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3", REAL, {}),
        ("qwen3", REAL, {"quantization": "fp8"}),
        ("qwen3_moe", {}, {"quantization": "fp8"}),
        ("deepseek_v3", {}, {}),
    ],
)
def test_an_updated_runner_draws_what_a_fresh_one_draws(
    checkpoint: CheckpointFactory, family: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    folders = [checkpoint(family, seed=seed, **sizes) for seed in (0, 1)]
    runner = check_update(*folders, dtype="bfloat16", **options)
    if family == "qwen3":
        assert decodes_of(runner)._parts.resident


@pytest.mark.parametrize("how", ["gptq", "packed int4 with zeros"])
def test_packed_integers_are_updated_too(checkpoint: CheckpointFactory, tmp_path: Path, how: str) -> None:
    plain = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    folders = [write_quantised(one, tmp_path / one.name, WEIGHT_ONLY[how])[0] for one in plain]
    check_update(*folders, dtype="bfloat16")


def test_the_bits_of_the_deterministic_mode_are_those_of_a_fresh_runner(checkpoint: CheckpointFactory) -> None:
    folders = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    check_update(*folders, dtype="bfloat16", enable_deterministic_inference=True)


def test_adapters_stay_and_change_the_new_weights(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    old, new = (checkpoint("qwen3", tied=False, seed=seed) for seed in (0, 1))
    cases = cases_of(new, tmp_path, 4)
    runner = captured(old, dtype="float32", enable_lora=True, max_lora_rank=8, max_loras_per_batch=4)
    for name in SPECS:
        load(runner, tmp_path, name)
    drawn(runner)
    runner.update_weights(LoadWeights(str(new)), lambda: None)
    runner.reset()
    jobs = [case.job() for case in cases]
    PlanDriver(runner, 16).run(jobs)
    assert [job.outputs for job in jobs] == [case.expected for case in cases]
