"""The vectors and scores of the whole worker in process, driven by plans made by hand, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from srt.distributed.parallel_state import TensorParallel
from srt.layers import pooler
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.step_output import SampledRows
from srt.models.causal_lm import CausalLM
from srt.protocol.messages import LogprobSpec
from srt.utils.pooling_config import Pooling
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.pooling_checkpoint import reference_scores, reference_vectors, write_classifier, write_embedder
from tests.support.ranks import run_ranks
from tests.support.recorder import Recorder
from tests.support.runners import make_runner

POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")


def prompts_of(count: int = 12) -> list[list[int]]:
    """Prompts of 1 to 90 tokens, some of which begin alike."""
    rng = np.random.default_rng(3)
    prefix = token_ids(rng, 40, 512)
    return [prefix[: 20 * (i % 3)] + token_ids(rng, int(rng.integers(1, 50)), 512) for i in range(count)]


def vectors_of(
    folder: Path, prompts: list[list[int]], chunk: int, tp: TensorParallel | None = None, *, share: bool = False
) -> NDArray[np.float32]:
    return vectors_by(make_runner(folder, 16, tp), prompts, chunk, share=share)


def vectors_by(
    runner: ModelRunner, prompts: list[list[int]], chunk: int, *, share: bool = False
) -> NDArray[np.float32]:
    driver = PlanDriver(runner, 16, chunk, share=share)
    jobs = [Job(prompt, greedy(1), logprobs=LogprobSpec(output=True)) for prompt in prompts]
    driver.run(jobs[: len(jobs) // 2])
    driver.run(jobs[len(jobs) // 2 :])
    assert max(job.cached for job in jobs) >= 16 or not share
    return np.stack([one.vector for job in jobs for one in job.output_logprobs])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vectors_equal_those_of_transformers(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str, pooling: Pooling, chunk: int
) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint(family), pooling, bare=family == "llama")
    prompts = prompts_of(6 if chunk == 1 else 12)
    expected = reference_vectors(folder, prompts, pooling)
    np.testing.assert_allclose(vectors_of(folder, prompts, chunk), expected, atol=1e-4)


def test_vectors_of_a_family_without_fast_paths(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("olmo2"), "mean")
    prompts = prompts_of(4)
    np.testing.assert_allclose(vectors_of(folder, prompts, 7), reference_vectors(folder, prompts, "mean"), atol=1e-4)


def test_vectors_of_last_tokens_behind_cached_prefixes(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3"), "last")
    prompts = prompts_of()
    expected = reference_vectors(folder, prompts, "last")
    np.testing.assert_allclose(vectors_of(folder, prompts, 64, share=True), expected, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_from_graphs_of_prompts(checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling) -> None:
    """They hold the states of last tokens only, so the other poolings capture none."""
    folder, recorder = write_embedder(tmp_path / "model", checkpoint("qwen3"), pooling), Recorder()
    runner = make_runner(folder, 16, capture=recorder, piecewise_cuda_graph_max_tokens=64)
    runner.graphs.capture_all()
    prompts = prompts_of(6)
    np.testing.assert_allclose(vectors_by(runner, prompts, 40), reference_vectors(folder, prompts, pooling), atol=1e-4)
    assert (recorder.num_replays > 0) == (recorder.num_captures > 0) == (pooling == "last")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_rank_of_two_has_the_same_vectors(
    checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling
) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3"), pooling)
    prompts = prompts_of(5)
    one, other = run_ranks(2, tmp_path, lambda tp: vectors_of(folder, prompts, 7, tp))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(one, reference_vectors(folder, prompts, pooling), atol=1e-4)


@pytest.mark.parametrize("labels", [["relevant"], ["bad", "good", "none"]])
def test_scores_equal_those_of_transformers(checkpoint: CheckpointFactory, tmp_path: Path, labels: list[str]) -> None:
    folder = write_classifier(tmp_path / "model", checkpoint("qwen3"), labels)
    prompts = prompts_of()
    scores = vectors_of(folder, prompts, 13)
    assert scores.shape == (len(prompts), len(labels))
    np.testing.assert_allclose(scores, reference_scores(folder, prompts), atol=1e-4)


@pytest.mark.parametrize(("pooling", "wrong"), [("mean", "cls"), ("cls", "last"), ("last", "mean")])
def test_a_wrong_pooling_is_found(
    checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling, wrong: Pooling
) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3"), pooling)
    planted = write_embedder(tmp_path / "planted", checkpoint("qwen3"), wrong)
    expected = reference_vectors(folder, prompts_of(3), pooling)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(vectors_of(planted, prompts_of(3), 7), expected, atol=1e-4)


def test_a_sum_that_forgets_the_chunks_before_is_found(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3"), "mean")
    expected = reference_vectors(folder, prompts_of(3), "mean")
    monkeypatch.setattr(pooler, "_begins", lambda batch, counts: torch.ones((len(counts), 1), dtype=torch.bool))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(vectors_of(folder, prompts_of(3), 7), expected, atol=1e-4)


class _Counting(PlanDriver):
    """Keeps how many tokens each row got, and ends there."""

    def _take(self, sampling: list[Job], rows: list[Job], result: SampledRows) -> None:
        self.counts = dict(zip((tuple(job.prompt) for job in sampling), result.counts.tolist(), strict=True))
        for job in sampling:
            job.outputs.append(0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_without_finite_states_fails_alone(
    checkpoint: CheckpointFactory, tmp_path: Path, pooling: Pooling
) -> None:
    """The slots serve the next texts well."""
    folder = write_embedder(tmp_path / "model", checkpoint("qwen3", tied=False), pooling)
    runner, prompts = make_runner(folder, 16), [[1, 2, 3], [511, 5], [7, 8, 9, 10]]
    with torch.inference_mode():
        model = runner.loaded.model
        assert isinstance(model, CausalLM)
        model.model.embed_tokens.weight[511] = float("nan")
    driver = _Counting(runner, 16, 64)
    driver.run([Job(prompt, greedy(1), logprobs=LogprobSpec(output=True)) for prompt in prompts])
    assert driver.counts == {(1, 2, 3): 1, (511, 5): -1, (7, 8, 9, 10): 1}
    runner.reset()
    jobs = [Job(prompt, greedy(1), logprobs=LogprobSpec(output=True)) for prompt in (prompts[2], prompts[0], [4])]
    PlanDriver(runner, 16, 64).run(jobs)
    vectors = np.stack([one.vector for job in jobs for one in job.output_logprobs])
    np.testing.assert_allclose(vectors, reference_vectors(folder, [job.prompt for job in jobs], pooling), atol=1e-4)
