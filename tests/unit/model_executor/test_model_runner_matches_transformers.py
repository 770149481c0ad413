"""The whole worker in process, driven by plans made by hand, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers import logits_processor
from srt.protocol.messages import LogprobSpec, RowLogprobs, SamplingSpec, int32_array
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.ranks import run_ranks, single_rank
from tests.support.runners import make_runner

VOCABULARY = 512


def prompts_with_shared_prefixes(seed: int, count: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prefixes = [token_ids(rng, 37, vocabulary), token_ids(rng, 18, vocabulary), []]
    return [prefixes[i % 3] + token_ids(rng, int(rng.integers(1, 40)), vocabulary) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 64), (16, 1 << 30), (5, 13)])
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: CheckpointFactory, family: str, page_size: int, chunk: int
) -> None:
    folder = checkpoint(family)
    oracle = Oracle(folder)
    expected = [(p, oracle.expect(p, greedy(10))) for p in prompts_with_shared_prefixes(1, 20)]
    safe = [(p, e) for p, e in expected if e.is_safe]
    assert len(safe) > 15
    driver = PlanDriver(make_runner(folder, page_size), page_size, chunk, share=True)
    jobs = [Job(prompt, greedy(10)) for prompt, _ in safe]
    driver.run(jobs[: len(jobs) // 2])
    driver.run(jobs[len(jobs) // 2 :])
    assert [job.outputs for job in jobs] == [list(e.ids) for _, e in safe]
    assert max(job.cached for job in jobs) >= 30
    if chunk < 1000:
        assert any(extends and decodes for extends, decodes in driver.steps), "no mixed step"


PLAIN_FAMILIES = ("phi3", "smollm3", "granite", "olmo2", "olmo3", "glm4", "cohere2", "gemma2", "gemma3_text")
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss")
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
SPECIAL_LAYERS: dict[str, dict[str, Any]] = {
    "phi3": {"config": {"sliding_window": 24}},
    "smollm3": {"config": {"use_sliding_window": True, "sliding_window": 24}},
}
"""Settings with which a family has layers that it does not have by default."""


@pytest.mark.parametrize("family", PLAIN_FAMILIES + EXPERT_FAMILIES + LATENT_FAMILIES)
def test_families_without_resident_layers_give_the_tokens_of_transformers(
    checkpoint: CheckpointFactory, family: str
) -> None:
    """In steps of chunks, decodes and both, behind shared prefixes, with windows that are shorter than the prompts.

    With a tied output layer, a scaled embedding would let every token repeat itself, whatever the layers do.
    """
    folder = checkpoint(family, num_layers=4, tied=False, **SPECIAL_LAYERS.get(family, {}))
    oracle = Oracle(folder)
    expected = [(p, oracle.expect(p, greedy(10))) for p in prompts_with_shared_prefixes(1, 9)]
    safe = [(p, e) for p, e in expected if e.is_safe]
    assert len(safe) > 6
    assert len({token for _, e in safe for token in e.ids}) > 20
    for page_size, chunk in ((1, 7), (16, 1 << 30)):
        driver = PlanDriver(make_runner(folder, page_size), page_size, chunk, share=True)
        jobs = [Job(prompt, greedy(10)) for prompt, _ in safe]
        driver.run(jobs[: len(jobs) // 2])
        driver.run(jobs[len(jobs) // 2 :])
        assert [job.outputs for job in jobs] == [list(e.ids) for _, e in safe]
        assert max(job.cached for job in jobs) >= 30


@pytest.mark.parametrize("family", PLAIN_FAMILIES + EXPERT_FAMILIES + LATENT_FAMILIES)
def test_two_ranks_of_a_family_without_resident_layers_give_the_tokens_of_one(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str
) -> None:
    """Also with fewer KV heads than ranks, and a vocabulary that the ranks share unevenly."""
    folder = checkpoint(family, num_layers=4, num_kv_heads=1, vocab_size=515, tied=False)
    prompts = prompts_with_shared_prefixes(6, 5, 515)

    def work(tp: TensorParallel) -> list[list[int]]:
        jobs = [Job(p, greedy(6)) for p in prompts]
        PlanDriver(make_runner(folder, 16, tp), 16, chunk=50).run(jobs)
        return [job.outputs for job in jobs]

    alone = work(single_rank())
    assert len({token for ids in alone for token in ids}) > 10
    assert run_ranks(2, tmp_path, work) == [alone, alone]


def sampled_specs() -> list[SamplingSpec]:
    bias: dict[str, Any] = {
        "bias_ids": int32_array([3, 200, 511]),
        "bias_values": np.array([4.0, -3.0, 5.0], np.float32),
    }
    return [
        SamplingSpec(16, temperature=1.0),
        SamplingSpec(16, temperature=0.7, top_k=20),
        SamplingSpec(16, temperature=1.3, top_p=0.8),
        SamplingSpec(16, temperature=0.9, min_p=0.05),
        SamplingSpec(16, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01),
        SamplingSpec(16, temperature=0.8, repetition_penalty=1.3),
        SamplingSpec(16, temperature=0.8, frequency_penalty=0.7, presence_penalty=0.5),
        SamplingSpec(16, temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3),
        SamplingSpec(16, temperature=1.0, **bias),
        SamplingSpec(16, temperature=0.0, **bias),
        SamplingSpec(16, temperature=1.0, min_new_tokens=16, stop_ids=int32_array(range(0, 512, 2))),
        SamplingSpec(16, temperature=0.0),
    ]


def test_every_draw_equals_the_slow_float64_one_whatever_shares_its_batch(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    oracle = Oracle(folder)
    specs = sampled_specs()
    prompts = prompts_with_shared_prefixes(2, 3 * len(specs))
    wanted, kinds = [], set()
    for index, prompt in enumerate(prompts):
        spec, seed = specs[index % len(specs)], (0x9E3779B97F4A7C15 * (index + 1)) % (1 << 64)
        expected = oracle.expect(prompt, spec, seed)
        if expected.is_safe:
            wanted.append((Job(prompt, spec, seed), list(expected.ids)))
            kinds.add(index % len(specs))
    assert len(kinds) == len(specs)
    driver = PlanDriver(make_runner(folder, 16), 16, chunk=50)
    driver.run(job for job, _ in wanted)
    assert [job.outputs for job, _ in wanted] == [ids for _, ids in wanted]
    assert max(decodes for _, decodes in driver.steps) >= 16


def test_two_ranks_give_the_tokens_and_logprobs_of_one(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("llama", vocab_size=515, tied=False)
    specs = sampled_specs()
    prompts = prompts_with_shared_prefixes(6, 2 * len(specs), 515)
    logprob_spec = LogprobSpec(output=True, prompt_start=0, top=3, ids=int32_array([514, 0]))

    def work(tp: TensorParallel) -> list[Job]:
        jobs = [
            Job(p, specs[i % len(specs)], 1000 + i, logprob_spec if i % 5 == 0 else None) for i, p in enumerate(prompts)
        ]
        PlanDriver(make_runner(folder, 16, tp), 16, chunk=50).run(jobs)
        return jobs

    alone = work(single_rank())
    for jobs in run_ranks(2, tmp_path, work):
        assert [job.outputs for job in jobs] == [job.outputs for job in alone]
        for ours, theirs in zip(jobs, alone, strict=True):
            for one, other in zip(
                ours.prompt_logprobs + ours.output_logprobs,
                theirs.prompt_logprobs + theirs.output_logprobs,
                strict=True,
            ):
                np.testing.assert_allclose(one.chosen, other.chosen, atol=1e-4)
                np.testing.assert_allclose(one.top, other.top, atol=1e-4)
                np.testing.assert_allclose(one.of_ids, other.of_ids, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch_native", "triton"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_on_a_gpu_every_draw_is_the_same(checkpoint: CheckpointFactory, backend: str, page_size: int) -> None:
    folder = checkpoint("qwen3")
    oracle = Oracle(folder)
    specs = sampled_specs()
    wanted = []
    logprob_spec = LogprobSpec(output=True, prompt_start=0, top=2, ids=int32_array([4]))
    for index, prompt in enumerate(prompts_with_shared_prefixes(2, 3 * len(specs))):
        spec = specs[index % len(specs)]
        expected = oracle.expect(prompt, spec, index)
        # Sums are taken in another order there.
        if expected.margin > 1e-3:
            wanted.append((Job(prompt, spec, index, logprob_spec), list(expected.ids)))
    assert len(wanted) >= 18
    runner = make_runner(folder, page_size, device=torch.device("cuda", 0), attention_backend=backend)
    driver = PlanDriver(runner, page_size, chunk=50, share=True)
    driver.run(job for job, _ in wanted)
    assert [job.outputs for job, _ in wanted] == [ids for _, ids in wanted]
    for job, _ in wanted:
        told = oracle.logprobs(job.known)[len(job.prompt) - 1 : -1]
        chosen = np.concatenate([row.chosen for row in job.output_logprobs])
        np.testing.assert_allclose(chosen, told[np.arange(len(told)), job.outputs], atol=1e-3)


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    spec = SamplingSpec(20, temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.5, min_new_tokens=12,
                        stop_ids=int32_array(range(100)))  # fmt: skip
    prompt = prompts_with_shared_prefixes(3, 1)[0]
    whole, resumed = Job(prompt, spec, seed=77), Job(prompt, spec, seed=77)
    PlanDriver(make_runner(folder, 16), 16).run([whole])
    resumed.outputs = whole.outputs[:9]
    PlanDriver(make_runner(folder, 16), 16, chunk=11).run([resumed])
    assert resumed.outputs == whole.outputs


def rows_of(parts: list[RowLogprobs], top: int, num_ids: int) -> tuple[list[int], Any, Any, Any, Any]:
    """All parts end to end: (first index of each, chosen, top ids, top, of ids)."""
    return (
        [part.first for part in parts],
        np.concatenate([part.chosen for part in parts]),
        np.concatenate([part.top_ids.reshape(-1, top) for part in parts]),
        np.concatenate([part.top.reshape(-1, top) for part in parts]),
        np.concatenate([part.of_ids.reshape(-1, num_ids) for part in parts]),
    )


@pytest.mark.parametrize("chunk", [7, 1 << 30])
@pytest.mark.parametrize("prompt_start", [0, 1, 20])
def test_logprobs_are_the_models_own_log_softmax(
    checkpoint: CheckpointFactory, chunk: int, prompt_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_processor, "BLOCK_ELEMENTS", 11 * VOCABULARY)  # several blocks, the last not full
    folder = checkpoint("llama")
    prompt = token_ids(np.random.default_rng(4), 45, VOCABULARY)
    asked = [5, 17, 300]
    logprob_spec = LogprobSpec(output=True, prompt_start=prompt_start, top=4, ids=int32_array(asked))
    spec = SamplingSpec(6, temperature=1.0, top_k=5, repetition_penalty=1.2)
    job = Job(prompt, spec, 5, logprob_spec)
    others = [Job(p, greedy(4)) for p in prompts_with_shared_prefixes(5, 4)]
    brief = Job(prompt[:9], greedy(3), 0, LogprobSpec(output=True, prompt_start=0))
    driver = PlanDriver(make_runner(folder, 16), 16, chunk, share=True)
    driver.run([Job(prompt[:33], greedy(1))])
    driver.run([*others, job, brief])
    expected = Oracle(folder).logprobs(job.known)

    first, chosen, top_ids, top, of_ids = rows_of(job.prompt_logprobs, 4, 3)
    assert first[0] == prompt_start
    assert len(chosen) == len(prompt) - prompt_start
    if prompt_start == 0:
        assert np.isnan(chosen[0])
        assert np.isnan(top[0]).all()
        assert np.isnan(of_ids[0]).all()
    skipped = int(prompt_start == 0)
    told_by = expected[prompt_start + skipped - 1 : len(prompt) - 1]
    targets = prompt[prompt_start + skipped :]
    np.testing.assert_allclose(chosen[skipped:], told_by[np.arange(len(targets)), targets], atol=1e-4)
    np.testing.assert_allclose(top[skipped:], np.sort(told_by)[:, ::-1][:, :4], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(told_by, top_ids[skipped:], 1), top[skipped:], atol=1e-4)
    np.testing.assert_allclose(of_ids[skipped:], told_by[:, asked], atol=1e-4)

    first, chosen, top_ids, top, of_ids = rows_of(job.output_logprobs, 4, 3)
    told_by = expected[len(prompt) - 1 : -1]
    assert first == list(range(6))
    np.testing.assert_allclose(chosen, told_by[np.arange(6), job.outputs], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(told_by, top_ids, 1), top, atol=1e-4)
    np.testing.assert_allclose(of_ids, told_by[:, asked], atol=1e-4)

    assert len(np.concatenate([part.chosen for part in brief.prompt_logprobs])) == 9
    assert [len(part.top) for part in brief.output_logprobs] == [0, 0, 0]
    assert not any(other.prompt_logprobs or other.output_logprobs for other in others)
