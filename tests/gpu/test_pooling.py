"""Embedding models on a GPU against the same models in float32 on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec
from srt.utils.pooling_config import Pooling
from tests.support.checkpoints import CheckpointFactory
from tests.support.encoder_checkpoint import write_encoder
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.pooling_checkpoint import write_embedder
from tests.support.runners import make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def vectors_of(runner: ModelRunner, chunk: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(3)
    prompts = [token_ids(rng, int(rng.integers(1, 90)), 512) for _ in range(12)]
    jobs = [Job(prompt, greedy(1), logprobs=LogprobSpec(output=True)) for prompt in prompts]
    PlanDriver(runner, 16, chunk).run(jobs)
    return np.stack([one.vector for job in jobs for one in job.output_logprobs])


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_float32_gives_the_vectors_of_a_cpu(
    checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling, chunk: int
) -> None:
    """Steps of last tokens are captured as graphs where they are worth it."""
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3"), pooling)
    runner = make_runner(folder, 16, device=CUDA, attention_backend="triton")
    runner.graphs.capture_all()
    assert runner.graphs.decodes is None
    np.testing.assert_allclose(vectors_of(runner, chunk), vectors_of(make_runner(folder, 16), chunk), atol=1e-4)


def test_an_encoder_gives_the_vectors_of_a_cpu(tmp_path: Path) -> None:
    write_encoder(tmp_path, "xlm-roberta")
    runner = make_runner(tmp_path, 16, device=CUDA)
    np.testing.assert_allclose(vectors_of(runner, 7), vectors_of(make_runner(tmp_path, 16), 64), atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_bfloat16_gives_nearly_the_same_directions(
    checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling
) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3", head_dim=64), pooling)
    runner = make_runner(folder, 16, device=CUDA, dtype="bfloat16")
    runner.graphs.capture_all()
    ours, theirs = vectors_of(runner, 64), vectors_of(make_runner(folder, 16), 64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert ((ours * theirs).sum(axis=1) / lengths).min() > 0.99
