"""Steps with prompts in pieces between attentions: the same tokens, whatever is padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention import backend_choice
from srt.layers.attention.torch_native import TorchNativeBackend
from srt.model_executor.graphs.piecewise_cuda_graph_runner import most_whole_tokens, piece_sizes, worthwhile_tokens
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec, SamplingSpec
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import run_ranks
from tests.support.recorder import NamesPromptGraphs, Recorder
from tests.support.runners import make_runner


def jobs() -> list[Job]:
    specs = [greedy(6), SamplingSpec(9, temperature=0.8), SamplingSpec(7, temperature=1.1, top_p=0.9)]
    lengths = [70, 3, 40, 1, 33, 64]
    made = [Job([(7 * i + j) % 90 for j in range(n)], specs[i % 3], seed=i) for i, n in enumerate(lengths)]
    made[2].logprobs = LogprobSpec(output=True, prompt_start=0)
    return made


@pytest.mark.parametrize(("name", "page_size"), [("qwen3", 4), ("llama", 16), ("qwen2", 16)])
def test_tokens_are_those_of_steps_that_are_launched_whole(
    checkpoint: CheckpointFactory, name: str, page_size: int
) -> None:
    expected, found = jobs(), jobs()
    PlanDriver(make_runner(checkpoint(name), page_size), page_size, chunk=48).run(expected)
    recorder = Recorder()
    runner = make_runner(checkpoint(name), page_size, capture=recorder, piecewise_cuda_graph_max_tokens=64)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    driver = PlanDriver(runner, page_size, chunk=48, share=True)
    driver.run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    assert any(extends and decodes for extends, decodes in driver.steps), "no step was mixed"
    num_layers = runner.loaded.config.num_layers
    assert recorder.num_replays >= 3 * (num_layers + 1)  # those that report logprobs of a prompt are launched whole


def test_a_capture_and_its_padding_change_nothing_but_the_dummy_page(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 4, capture=Recorder(), piecewise_cuda_graph_max_tokens=32)
    job = Job([5, 6, 7, 8, 9], greedy(2))
    PlanDriver(runner, 4).run([job])
    memory = runner.state.token_to_kv_pool.k_buffer[0]
    before = memory.clone()
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    changed = (memory != before).flatten(1).any(dim=1).nonzero().flatten()
    assert (changed >= runner.state.num_pages * 4).all()
    PlanDriver(runner, 4).run([again := Job(job.prompt, greedy(2))])
    assert again.outputs == job.outputs
    assert torch.isfinite(memory).all()


def test_larger_steps_than_the_largest_size_are_launched_whole(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen3"), 4, capture=(recorder := Recorder()), piecewise_cuda_graph_max_tokens=32)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    PlanDriver(runner, 4).run([Job(list(range(40)), greedy(1))])
    assert recorder.num_replays == 0


def run_prompt(runner: ModelRunner, num_tokens: int) -> None:
    PlanDriver(runner, 4).run([Job(list(range(num_tokens)), greedy(1))])


def test_a_prompt_takes_a_larger_size_that_is_near_and_misses_its_own_where_none_is(
    checkpoint: CheckpointFactory,
) -> None:
    runner = make_runner(checkpoint("qwen3"), 4, capture=(recorder := Recorder()), piecewise_cuda_graph_max_tokens=128)
    run_prompt(runner, 130)
    assert not runner.graphs.is_missing_one, "there is no size for so many tokens"
    run_prompt(runner, 70)
    assert runner.graphs.is_missing_one
    assert runner.graphs.capture_next() == 128
    assert not runner.graphs.is_missing_one, "128 is near to 96"
    run_prompt(runner, 70)
    assert recorder.num_replays == runner.loaded.config.num_layers + 1
    run_prompt(runner, 10)
    assert recorder.num_replays == runner.loaded.config.num_layers + 1, (
        "launched whole: to pad it to 128 would take its time"
    )
    run_prompt(runner, 70)
    assert runner.graphs.is_missing_one, "and is remembered"
    assert runner.graphs.capture_next() == 32
    run_prompt(runner, 10)
    assert recorder.num_replays == 3 * (runner.loaded.config.num_layers + 1)
    assert not runner.graphs.is_missing_one
    assert [runner.graphs.capture_next() for _ in range(runner.graphs.num_left)] == [96, 64]


def test_a_whole_chunk_fits_with_the_decodes_beside_it(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.model_executor.graphs.piecewise_cuda_graph_runner.MOST_PIECE_TOKENS", 128)
    for chunk, most in ((100, 108), (4096, 136), (-1, 136)):
        options: dict[str, Any] = {"chunked_prefill_size": chunk, "max_running_requests": 8}
        runner = make_runner(checkpoint("qwen3"), 4, capture=Recorder(), **options)
        assert runner.graphs.pieces is not None and runner.graphs.pieces.next_size == most


def test_ranks_agree_on_what_is_captured_whole_where_kernels_of_one_do_not_run(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here, folder = iter((True, False)), checkpoint("qwen3")

    monkeypatch.setattr(
        backend_choice, "TorchNativeBackend", lambda *_: NamesPromptGraphs() if next(run_here) else TorchNativeBackend()
    )

    def work(tp: TensorParallel) -> int:
        runner = make_runner(folder, 4, tp=tp, capture=Recorder(), tp_size=2)
        assert runner.graphs.pieces is not None
        return runner.graphs.pieces._most_whole

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_small_models_have_larger_pieces() -> None:
    small, large = worthwhile_tokens(28, 440_000_000), worthwhile_tokens(36, 7_000_000_000)
    assert small > 8192
    assert 512 < large < 2048
    assert most_whole_tokens(28, 440_000_000) == 1024
    assert 128 < most_whole_tokens(36, 7_000_000_000) < 512


def test_sizes_end_at_the_most_tokens() -> None:
    assert piece_sizes(0) == ()
    assert piece_sizes(100) == (32, 64, 96, 100)
    assert piece_sizes(3000)[-3:] == (2048, 2560, 3000)
