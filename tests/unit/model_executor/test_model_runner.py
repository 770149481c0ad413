"""What a runner promises beyond the right tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.kernels.cpu.decode_step import CpuDecodeStep
from srt.mem_cache.tables_hash import tables_hash
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, idle_section, run_section
from tests.support.recorder import Recorder
from tests.support.runners import logits_in, make_runner

EMPTY = int32_array()


def poisoned(folder: Path, target: Path, token: int) -> Path:
    """The checkpoint with an embedding that is not finite for one token."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def two_prompts(first: list[int], second: list[int], logprobs: LogprobSpec) -> PlanSection:
    admissions = [
        Admission(slot, int32_array(ids), len(ids), 0, 1, greedy(4), logprobs)
        for slot, ids in enumerate((first, second))
    ]
    both, counts = int32_array([0, 1]), int32_array([len(first), len(second)])
    pages = PageDelta(both, int32_array([2, 2]), int32_array([5, 6, 7, 8]))
    return PlanSection(admissions, [pages], both, int32_array([0, 0]), counts, int32_array([1, 1]), EMPTY)


def test_float32_is_multiplied_as_float32_whatever_was_asked_for_before(checkpoint: CheckpointFactory) -> None:
    torch.set_float32_matmul_precision("high")
    make_runner(checkpoint("qwen3"), 16)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_request_without_finite_logits_gets_no_token_and_the_other_its_own(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3", tied=False)
    alone = Job([3, 4, 5], greedy(3))
    PlanDriver(make_runner(folder, 16), 16).run([alone])
    runner = make_runner(poisoned(folder, tmp_path / "poisoned", 99), 16)
    first = run_section(runner, two_prompts([1, 99, 2], alone.prompt, LogprobSpec(output=True)))
    assert first.counts.tolist() == [-1, 1]
    assert first.ids.tolist() == alone.outputs[:1]
    assert [row.slot for row in first.logprobs] == [1]
    # The next step was planned before this was known.
    decode = PlanSection([], [PageDelta(EMPTY, EMPTY, EMPTY)], EMPTY, EMPTY, EMPTY, EMPTY, int32_array([0, 1]))
    second = run_section(runner, decode)
    assert (second.counts.tolist(), second.ids.tolist()) == ([-1, 1], alone.outputs[1:2])
    # Pages that held its keys serve others as if nothing had been there.
    again = Job(alone.prompt, greedy(3))
    runner.reset()
    PlanDriver(runner, 16).run([again])
    assert again.outputs == alone.outputs


def test_the_draw_does_not_depend_on_slot_pages_or_what_was_there_before(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 4)
    driver = PlanDriver(runner, 4, chunk=9)
    spec = SamplingSpec(12, temperature=1.2, top_p=0.9, repetition_penalty=1.1)
    jobs = [Job(list(range(30, 52)), spec, seed=1 << 63) for _ in range(4)]
    for job in jobs:
        driver.run([Job([7] * 50, greedy(5)), job, Job([9] * 3, greedy(2))])
    assert len({tuple(job.outputs) for job in jobs}) == 1
    assert len({job.slot for job in jobs}) > 1


def test_behind_its_attention_the_last_layer_goes_on_with_those_who_are_asked_for(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.model_executor.graphs.decode_runner.cpu_step_of", lambda *parts: None)  # it has no modules
    folder, sizes = checkpoint("qwen3"), []
    runner = make_runner(folder, 4)
    runner.loaded.our_model.model.layers[-1].get_submodule("mlp").register_forward_pre_hook(
        lambda mlp, args: sizes.append(len(args[0].hidden))
    )
    with_all = Job(prompt := list(range(20, 42)), greedy(3), logprobs=LogprobSpec(prompt_start=0))
    PlanDriver(runner, 4, chunk=9).run([with_all])
    assert sizes == [9, 9, 4, 1, 1]
    sizes.clear()
    jobs = [Job([5, 6], greedy(4)), Job(prompt, greedy(3))]
    PlanDriver(runner, 4, chunk=9).run(jobs)
    # Of the long one's chunks but the last nobody is asked for; the short one goes on beside them.
    assert sizes == [1, 1, 2, 2, 1]
    assert jobs[1].outputs == with_all.outputs


@pytest.mark.parametrize("in_pieces", [False, True])
def test_hidden_states_are_those_of_the_tokens_that_are_wanted(
    checkpoint: CheckpointFactory, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDecodeStep, "few_tokens", 0)  # the compiled code returns no hidden states
    recorder = Recorder()
    pieces: dict[str, Any] = {"capture": recorder, "piecewise_cuda_graph_max_tokens": 32} if in_pieces else {}
    runner = make_runner(checkpoint("qwen3"), 4, **pieces)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    found: list[torch.Tensor] = []
    forward = runner.forward

    def forward_of(batch: ForwardBatch) -> torch.Tensor:
        as_planned = batch.output_tokens
        for wanted in (None, [4, 0, 4], []):
            batch.output_tokens = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
            found.append(forward(batch).clone())
        batch.output_tokens = as_planned
        return forward(batch)

    monkeypatch.setattr(runner, "forward", forward_of)
    PlanDriver(runner, 4).run([Job([3, 1, 4, 1, 5], greedy(1))])
    assert [len(hidden) for hidden in found] == [5, 3, 0]
    torch.testing.assert_close(found[1], found[0][[4, 0, 4]])
    assert bool(recorder.num_replays) == in_pieces


def test_tables_are_reported_as_the_device_has_them_and_emptied_by_a_reset(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 4)
    assert run_section(runner, idle_section()).counts.tolist() == []
    run_section(runner, two_prompts([1, 2, 3, 4, 5], [6], LogprobSpec()))
    assert runner.inspect() == {"tables_hash": tables_hash({0: [5, 6], 1: [7, 8]}), "num_slots_seen": 2}
    with torch.inference_mode():
        runner.state.req_to_token_pool.page_table[1, 1] = 9
    assert runner.inspect()["tables_hash"] == tables_hash({0: [5, 6], 1: [7, 9]})
    runner.reset()
    assert runner.inspect() == {"tables_hash": tables_hash({}), "num_slots_seen": 0}
    assert int(runner.state.req_to_token_pool.seq_lens.sum()) == 0


def test_bfloat16_runs_and_its_logits_are_float32(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("llama"), 16, dtype="bfloat16")
    step = runner.execute(two_prompts([1, 2], [3], LogprobSpec()))
    assert logits_in(step).dtype == torch.float32
    assert runner.sample(step).result().counts.tolist() == [1, 1]


def test_a_request_is_bounded_by_the_context_and_by_the_memory(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    assert make_runner(folder, 16, max_total_tokens=200).state.max_request_tokens == 192
    assert make_runner(folder, 16, max_total_tokens=8192).state.max_request_tokens == 4096
