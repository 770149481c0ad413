"""Rows with LoRA adapters get the tokens of the models that the adapters merge into, and rows without one those of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from srt.distributed.parallel_state import TensorParallel
from srt.lora.adapter_files import content_hash
from srt.lora.resource import AdapterContent
from srt.model_executor.model_runner import ModelRunner
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.random_adapter import AdapterSpec, merge, write_adapter
from tests.support.ranks import run_ranks
from tests.support.runners import make_runner

SPECS = {
    "all": AdapterSpec(seed=1),
    "some": AdapterSpec(seed=2, rank=3, modules=("q_proj", "v_proj", "qkv_proj", "down_proj"), by_root=True),
    "patterns": AdapterSpec(
        seed=3, ranks={"k_proj": 6, "o_proj": 1}, alphas={"k_proj": 3.0, "up_proj": 20.0}, layers=[1]
    ),
}
NUM_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    adapter: str
    expected: list[int]

    def job(self) -> Job:
        return Job(self.prompt, greedy(NUM_TOKENS), adapter=self.adapter)


def cases_of(folder: Path, root: Path, count: int) -> list[Case]:
    """Prompts with shared prefixes, in turns of no adapter and of each adapter, and what `transformers` makes of them."""
    rng = np.random.default_rng(1)
    prefix, cases = token_ids(rng, 37, 512), []
    for name in ("", *SPECS):
        merged = (
            folder
            if not name
            else merge(root / f"merged-{name}", folder, write_adapter(root / name, folder, SPECS[name]))
        )
        oracle = Oracle(merged)
        for number in range(count):
            prompt = (prefix if number % 2 else []) + token_ids(rng, int(rng.integers(1, 30)), 512)
            expected = oracle.expect(prompt, greedy(NUM_TOKENS))
            if expected.is_safe:
                cases.append(Case(prompt, name, list(expected.ids)))
    rng.shuffle(cases)
    assert len(cases) >= 3 * count
    return cases


def adapted_runner(folder: Path, root: Path, page_size: int = 16, tp: TensorParallel | None = None) -> ModelRunner:
    runner = make_runner(folder, page_size, tp, enable_lora=True, dtype="float32")
    for name in SPECS:
        load(runner, root, name)
    return runner


def load(runner: ModelRunner, root: Path, name: str) -> None:
    assert runner.loaded.adapters is not None
    runner.loaded.adapters.load(name, AdapterContent(str(root / name), content_hash(root / name)))


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("phi3", "gemma2"))]
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
