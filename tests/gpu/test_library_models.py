"""Models that the library transformers runs, on a GPU: the tokens of a CPU, in captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.model_executor.model_runner import ModelRunner
from tests.support.library_models import write_library_checkpoint
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.ranks import CPU
from tests.support.runners import decodes_of, make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
WIDE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


def jobs_of(seed: int, count: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    common = token_ids(rng, 40, 512)
    return [Job(common[: 8 * (i % 5)] + token_ids(rng, 3 + 11 * i, 512), greedy(24)) for i in range(count)]


def run(folder: Path, device: torch.device, captures: bool = False, **options: Any) -> tuple[list[Job], ModelRunner]:
    jobs = jobs_of(3, 9)
    runner = make_runner(folder, 16, device=device, model_impl="transformers", cuda_graph_bs=(2, 4, 8), **options)
    if captures:
        runner.graphs.capture_all()
    PlanDriver(runner, 16, chunk=50, share=True).run(jobs)
    return jobs, runner


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "stablelm", "cohere", "llama"])
def test_float32_gives_the_tokens_of_a_cpu(tmp_path: Path, model_type: str, backend: str) -> None:
    write_library_checkpoint(tmp_path, model_type)
    ours, runner = run(tmp_path, CUDA, captures=True, attention_backend=backend)
    theirs, _ = run(tmp_path, CPU)
    assert [job.outputs for job in ours] == [job.outputs for job in theirs]
    if backend == "triton":
        assert all(graphs.can_run(8) for graphs in decodes_of(runner).graphs.values()), "a graph was not captured"


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "mixtral"])
def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, model_type: str) -> None:
    """In bfloat16, experts included: their grouped products find the groups on the device."""
    write_library_checkpoint(tmp_path, model_type, WIDE)
    options: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "triton"}
    captured, runner = run(tmp_path, CUDA, captures=True, **options)
    assert all(graphs.can_run(8) for graphs in decodes_of(runner).graphs.values()), "a graph was not captured"
    eager, _ = run(tmp_path, CUDA, disable_cuda_graph=True, **options)
    agree = sum(a.outputs == b.outputs for a, b in zip(eager, captured, strict=True))
    assert agree >= len(eager) - 2  # padding may change a rounding, and with it a tie
