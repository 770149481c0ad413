"""How much KV memory a worker takes, and the sentence when it cannot have it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory import memory_profile
from srt.model_executor.memory.device_memory import DeviceMemory
from srt.model_executor.memory.memory_profile import (
    CPU_SHARE,
    FIRST_USE_BYTES,
    admission_bytes,
    check_pages,
    check_tables,
    check_weights,
    graph_bytes,
    kv_bytes,
    mlp_bytes,
    profile_max_num_token,
)
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup import profile_pages
from srt.model_executor.startup.peak_step import peak_section
from srt.model_executor.startup.profile_pages import measure_largest_step
from srt.model_executor.startup.trial_runner import trial_runner
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.layer_spec import Experts, FeedForward, Routing, SharedExpert
from srt.utils.model_config import ModelConfig
from srt.utils.page_groups import MemoryShares
from tests.support.checkpoints import CheckpointFactory
from tests.support.runners import make_runner
from tests.unit.model_executor.test_page_groups import MISTRAL
from tests.unit.model_executor.test_windows_and_fp8 import changed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("available_gb", "max_total_tokens", "expected"),
    [
        (20, None, (2 << 30) // 1000),  # a tenth
        (100, None, (4 << 30) // 1000),  # and at most 4 GiB
        (20, 10_000_000, 10_000_000),  # unless told
        (20, 1, 1),
        (0, None, 0),
    ],
)
def test_a_cpu_worker_takes_a_tenth_of_the_memory_and_at_most_four_gib(
    monkeypatch: pytest.MonkeyPatch, available_gb: int, max_total_tokens: int | None, expected: int
) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: available_gb << 30)
    args = ServerArgs(model_path="x", max_total_tokens=max_total_tokens)
    assert profile_max_num_token(args, CPU, MemoryShares((1000,))) == expected


def test_more_tokens_than_memory_holds_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1 << 30)
    args = ServerArgs(model_path="x", max_total_tokens=5_000_000)
    with pytest.raises(
        StartError, match=r"--max-total-tokens 5000000 needs 5.0 GB of KV memory, but only 1073741 tokens fit"
    ):
        profile_max_num_token(args, CPU, MemoryShares((1000,)))


def test_ranks_share_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1_000_000_000)
    args = ServerArgs(model_path="x", max_total_tokens=600_000, tp_size=2)
    with pytest.raises(StartError, match=r"only 500000 tokens fit"):
        profile_max_num_token(args, CPU, MemoryShares((1000,)))


def test_a_worker_that_is_replaced_has_as_much_as_the_one_before_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = ServerArgs(model_path="x", tp_size=2)
    for available in (40 << 30, 2_000_000_000):  # of which a tenth would be more, or less
        monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda available=available: available)
        assert profile_max_num_token(args, CPU, MemoryShares((1000,)), num_tokens=1_000_000) == 1_000_000
    with pytest.raises(StartError, match=r"had KV memory for 1000001 tokens, but only 1000000 fit"):
        profile_max_num_token(args, CPU, MemoryShares((1000,)), num_tokens=1_000_001)


def test_tables_that_do_not_fit_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1_000_000_000)
    check_tables(256, 100_000, 1, CPU)
    with pytest.raises(StartError, match=r"^The tables of --max-running-requests 5000 take 2\.2 GB, but only 1\.0 GB"):
        check_tables(5000, 100_000, 16, CPU)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            r"5\.0 GB for tables, graphs and the largest step no memory is left .* one KV page of 16 tokens, 1\.6 MB: .* --tp",
        ),
        ({"mem_fraction_static": 0.1}, r"a larger --mem-fraction-static than 0\.1, or a larger --tp"),
        ({"max_total_tokens": 3}, r"^--max-total-tokens 3 is less than one KV page of 16 tokens"),
    ],
)
def test_no_room_for_a_page_is_refused_with_what_would_help(options: dict[str, Any], said: str) -> None:
    args = ServerArgs(model_path="x", page_size=16, **options)
    check_pages(1, args, 100_000, 5 * GB)
    with pytest.raises(StartError, match=said):
        check_pages(0, args, 100_000, 5 * GB)
    if "mem_fraction_static" not in options:
        with pytest.raises(StartError, match=r"^(?!.*--mem-fraction-static)"):
            check_pages(0, args, 100_000, 5 * GB)


GB = 10**9


def test_a_first_worker_for_whose_kv_memory_nothing_is_left_is_not_called_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GB, 140 * GB))
    args = ServerArgs(model_path="x", mem_fraction_static=0.4)
    assert profile_max_num_token(args, torch.device("cuda", 0), MemoryShares((1000,))) == 0


def test_a_gpus_kv_memory_leaves_room_for_everything_else_and_some_slack() -> None:
    assert kv_bytes(ServerArgs(model_path="x"), 100 * GB, 140 * GB, 5 * GB) == 95 * GB - int(140 * GB * 0.02)


def test_larger_models_keep_more_free_for_graphs(checkpoint: CheckpointFactory) -> None:
    small, large = (ModelConfig.from_folder(checkpoint(num_layers=layers)) for layers in (2, 4))
    args = ServerArgs(model_path="x")
    assert graph_bytes(args, large) - graph_bytes(args, small) == 2 * 64 * 3_000
    assert graph_bytes(ServerArgs(model_path="x", disable_cuda_graph=True), large) == 0


def test_an_mlp_counts_with_its_gates_and_ups_apart_from_their_product(checkpoint: CheckpointFactory) -> None:
    config = ModelConfig.from_folder(checkpoint("qwen3"))
    layer = config.layers[0]
    small = replace(layer, attention=replace(layer.self_attention, head_dim=4), feed_forward=FeedForward(20))
    large = replace(small, feed_forward=FeedForward(24))
    config = replace(config, hidden_size=8, layers=(small, large, small))
    assert mlp_bytes(config, 2, 10, 2) == 10 * (2 * (8 + 8 + 12 + 12 + 12) + 4 * (2 + 2))


def test_experts_count_with_the_activations_and_results_of_all_that_a_token_takes(
    checkpoint: CheckpointFactory,
) -> None:
    config = ModelConfig.from_folder(checkpoint("qwen3"))
    layer = config.layers[0]
    experts = Experts(Routing(num_experts=9, top_k=3), size=4, shared=SharedExpert("shared", size=6))
    mixed = replace(layer, attention=replace(layer.self_attention, head_dim=4), feed_forward=experts)
    config = replace(config, hidden_size=8, layers=(mixed, replace(mixed, feed_forward=FeedForward(4))))
    assert mlp_bytes(config, 2, 10, 2) == 10 * (2 * (8 + 8 + 3 * (2 + 8) + 8 + 3 * 3) + 4 * (2 + 2))


def test_admissions_count_as_far_as_one_plan_can_have_them() -> None:
    assert admission_bytes(10, 1000) == 240_000
    assert admission_bytes(10_000, 1_000_000) == 24 << 24


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 30 * GB), (0.1, -26 * GB)])
def test_a_fraction_of_a_gpu_bounds_weights_and_kv_together(fraction: float, expected: int) -> None:
    args = ServerArgs(model_path="x", mem_fraction_static=fraction)
    assert kv_bytes(args, 100 * GB, 140 * GB, 2 * GB) == expected


def test_weights_that_do_not_fit_a_gpu_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GB, 24 * GB))
    check_weights(16 * GB, torch.device("cuda", 0))
    check_weights(60 * GB, CPU)
    with pytest.raises(StartError, match=r"weights take 28\.0 GB, but only 20\.0 of 24\.0 GB are free .*larger --tp"):
        check_weights(28 * GB, torch.device("cuda", 0))


@pytest.mark.parametrize(("num_slots", "prompt_tokens", "longest"), [(1, 20, 59), (2, 7, 59), (6, 60, 59), (3, 9, 1)])
def test_the_worst_step_is_a_step_that_a_runner_can_run(
    qwen3_checkpoint: Path, num_slots: int, prompt_tokens: int, longest: int
) -> None:
    """A chunk and a token from everybody else, every row sampling, on a memory of one page."""
    runner = make_runner(qwen3_checkpoint, 16, max_running_requests=num_slots)
    section = peak_section(num_slots, prompt_tokens, longest, 16, runner.loaded.config.vocab_size)
    chunk = min(prompt_tokens, longest)
    assert len(section.extend_slots) == num_slots
    assert int(section.extend_counts.sum()) == chunk + num_slots - 1
    assert int((section.extend_starts + section.extend_counts).max()) == (longest if num_slots > 1 else chunk)
    with torch.inference_mode():
        trial = trial_runner(runner.loaded)
        rows = trial.sample(trial.execute(section)).result()
    assert len(rows.counts) == num_slots
    assert {(row.slot, row.is_prompt) for row in rows.logprobs} >= {(slot, False) for slot in range(num_slots)}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo3", "mistral"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_worker_allocates_the_pages_of_each_group_that_fit_into_the_memory(
    family: str, page_size: int, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that fit: one more would exceed it. Besides, each group has one page for padding. All of Mistral's layers have a window."""
    if family == "mistral":
        folder = changed(checkpoint("llama", num_layers=4), tmp_path / "mistral", MISTRAL)
    else:
        folder = checkpoint(family, num_layers=4)
    room = 3_000_000
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: CPU_SHARE * room)
    runner = make_runner(folder, page_size, max_total_tokens=None, chunked_prefill_size=16, max_running_requests=2)
    state, layers = runner.state, runner.loaded.config.layers
    windows = [layer.attention.window for layer in layers]
    pages: dict[int | None, int] = dict(zip(state.windows, state.window_pages, strict=True))
    pages[None] = state.num_pages
    of_layer = [state.token_to_kv_pool.get_kv(number) for number in range(len(layers))]
    assert [len(keys) for keys, _ in of_layer] == [(pages[window] + 1) * page_size for window in windows]
    padding = page_size * sum(keys[0].nbytes + values[0].nbytes for keys, values in of_layer)
    assert state.kv_bytes == sum(keys.nbytes + values.nbytes for keys, values in of_layer)
    shares = runner.loaded.memory_shares
    counted = shares.bytes_of(state.max_total_num_tokens)
    assert state.kv_bytes - padding == counted <= room < shares.bytes_of(state.max_total_num_tokens + page_size)
    assert all(pages[window] < pages[None] for window in state.windows)


def test_the_largest_step_is_measured_on_memory_that_is_gone_afterwards(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when garbage is collected: the KV memory is taken next. A CPU counts no bytes, so the step alone runs here."""
    loaded = make_runner(qwen3_checkpoint, 16, chunked_prefill_size=32).loaded
    tables, num_runs = list[weakref.ref[torch.Tensor]](), list[int]()

    def noted(loaded: LoadedModel) -> ModelRunner:
        runner = trial_runner(loaded)
        tables.append(weakref.ref(runner.state.req_to_token_pool.page_table))
        return runner

    def run(memory: DeviceMemory, work: Callable[[], None]) -> int:
        work()
        num_runs.append(1)
        return 1_000_000

    monkeypatch.setattr(profile_pages, "trial_runner", noted)
    monkeypatch.setattr(DeviceMemory, "peak_of", run)
    gc.disable()
    try:
        with torch.inference_mode():
            measured = measure_largest_step(loaded)
        assert [table() for table in tables] == [None]
    finally:
        gc.enable()
    assert num_runs == [1]
    assert measured == loaded.memory.num_bytes["activations"] == 1_000_000 + FIRST_USE_BYTES
