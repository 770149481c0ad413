"""A whole worker on the Triton backend, in Triton's interpreter, against `transformers`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.model_runner import ModelRunner
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids

VOCABULARY = 512


@pytest.mark.parametrize(("family", "page_size", "chunk"), [("llama", 1, 9), ("qwen2", 16, 32), ("qwen3", 16, 1 << 30)])
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: CheckpointFactory, family: str, page_size: int, chunk: int
) -> None:
    folder = checkpoint(family)
    oracle = Oracle(folder)
    rng = np.random.default_rng(2)
    prefix = token_ids(rng, 18, VOCABULARY)
    prompts = [prefix * (i % 2) + token_ids(rng, 3 + 5 * i, VOCABULARY) for i in range(5)]
    expected = [(prompt, oracle.expect(prompt, greedy(5))) for prompt in prompts]
    safe = [(prompt, e) for prompt, e in expected if e.is_safe]
    assert len(safe) >= 3
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        page_size=page_size,
        max_total_tokens=1024,
        max_running_requests=8,
        attention_backend="triton",
    )
    cpu = torch.device("cpu")
    config = ModelConfig.from_folder(folder)
    runner = ModelRunner(args, config, str(folder), TensorParallel(0, 1, None, cpu), cpu)
    driver = PlanDriver(runner, page_size, chunk, share=True)
    jobs = [Job(prompt, greedy(5)) for prompt, _ in safe]
    driver.run(jobs[:2])
    driver.run(jobs[2:])
    assert [job.outputs for job in jobs] == [list(e.ids) for _, e in safe]
