"""Steps with LoRA adapters as a GPU runs them, but with products in PyTorch, against the models that the adapters merge into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.kernels.lora import products
from srt.layers import device_adapters
from srt.layers.adapters import AdaptedLayer
from srt.layers.attention import backend_choice
from srt.layers.attention.base import Reading
from srt.layers.device_adapters import DeviceAdapters, HostCopies
from srt.layers.linear import LinearLayer
from srt.lora import adapter_files
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_loader import model_adapters
from srt.utils.model_error import ModelError
from tests.support import lora_reference
from tests.support.adapter_cases import SPECS, cases_of, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import PlanDriver
from tests.support.recorder import PlansAtOnce, Recorder
from tests.support.runners import decodes_of, make_runner


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shrink", "expand", "adapted_gemv"):
        monkeypatch.setattr(device_adapters, name, getattr(lora_reference, f"{name}_reference"))
    monkeypatch.setattr(products, "MOST_SINGLE_TOKENS", 1 << 30)
    monkeypatch.setattr(
        model_adapters, "_step_adapters", lambda args, layers, *on: DeviceAdapters(layers, 2, 6, 24, *on)
    )
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)


def _noted(
    replay: Callable[[ForwardBatch], Tensor], kind: str, replayed: list[str]
) -> Callable[[ForwardBatch], Tensor]:
    def noted(batch: ForwardBatch) -> Tensor:
        replayed.append(kind)
        return replay(batch)

    return noted


def test_tokens_equal_those_of_the_merged_models(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """There is room for two of the three adapters: the third comes when another one has left. Decodes are captured."""
    folder = checkpoint("qwen3", tied=False)
    cases, capture = cases_of(folder, tmp_path, 2), Recorder()
    runner = make_runner(folder, 16, enable_lora=True, dtype="float32", capture=capture, cuda_graph_bs=(16,))
    assert runner.loaded.adapters is not None
    adapters, driver = runner.loaded.adapters.step, PlanDriver(runner, 16)
    runner.graphs.capture_all()
    num_replays, (first, second, third) = capture.num_replays, SPECS
    for names in ((first, second), (third, second)):
        for name in names:
            load(runner, tmp_path, name)
        jobs = [(case.job(), case.expected) for case in cases if case.adapter in ("", *names)]
        driver.run([job for job, _ in jobs])
        assert [job.outputs for job, _ in jobs] == [expected for _, expected in jobs]
        for name in names:
            adapters.release(name)
    for name in (first, second):
        load(runner, tmp_path, name)
    with pytest.raises(ModelError, match="Try again later"):
        load(runner, tmp_path, third)
    assert capture.num_replays > num_replays
    assert decodes_of(runner).graphs[Reading.ADAPTED].num_left == 0


def test_prompts_with_adapters_replay_graphs_of_their_own(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In chunks beside decodes, with cached prefixes; steps without adapters replay the other graphs.

    More requests may run than the smallest graph has tokens.
    """
    folder = checkpoint("qwen3", tied=False)
    cases, capture = cases_of(folder, tmp_path, 3), Recorder()
    options: dict[str, Any] = {"cuda_graph_bs": (16,), "piecewise_cuda_graph_max_tokens": 64}
    options |= {"max_running_requests": 40}
    monkeypatch.setattr(
        model_adapters, "_step_adapters", lambda args, layers, *on: DeviceAdapters(layers, 2, 6, 40, *on)
    )
    runner = make_runner(folder, 16, enable_lora=True, dtype="float32", capture=capture, **options)
    runner.graphs.capture_all()
    names, replayed = tuple(SPECS)[:2], list[str]()
    for name in names:
        load(runner, tmp_path, name)
    for kind, pieces in (("plain", runner.graphs.pieces), ("adapted", runner.graphs.adapted_pieces)):
        assert pieces is not None and pieces.num_left == 0 and "could not be captured" not in caplog.text
        monkeypatch.setattr(pieces, "replay", _noted(pieces.replay, kind, replayed))
    driver = PlanDriver(runner, 16, chunk=40, share=True)
    for adapters, kinds in (((names[0],), {"adapted"}), (("",), {"plain"}), (("", *names), {"adapted", "plain"})):
        jobs = [(case.job(), case.expected) for case in cases if case.adapter in adapters]
        driver.run([job for job, _ in jobs])
        assert [job.outputs for job, _ in jobs] == [expected for _, expected in jobs]
        assert replayed and set(replayed) <= kinds
        replayed.clear()
    assert any(extends and decodes for extends, decodes in driver.steps), "no step was mixed"


def test_a_shortened_model_finds_the_adapters_of_its_last_tokens(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """Kernels are compiled ahead by one."""
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 2)
    runner = make_runner(folder, 16, enable_lora=True, dtype="float32")
    load(runner, tmp_path, "all")
    driver, job = PlanDriver(runner, 16), next(case for case in cases if case.adapter == "all").job()
    with runner.loaded.our_model.shortened(1):
        driver.run([job])
    assert job.outputs


def test_rows_of_another_number_than_the_step_has_are_not_multiplied(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Their adapters are not known: those of other rows would be taken."""
    runner = make_runner(checkpoint("qwen3", tied=False), 16, enable_lora=True, dtype="float32")
    assert runner.loaded.adapters is not None
    step, layers = runner.loaded.adapters.step, dict(runner.loaded.our_model.named_modules())
    projection = [layer for name, layer in layers.items() if name.endswith("self_attn.o_proj")][-1]
    assert isinstance(step, DeviceAdapters) and isinstance(projection, LinearLayer)
    weight, numbers = projection.weight, torch.zeros(6, dtype=torch.int32)
    x = torch.ones(6, weight.shape[1])
    with step.applied_to_tokens(numbers, torch.tensor([1, 4])):
        assert len(weight.multiply(x[:2], None)) == 2
        for rows in (x, x[:3]):
            with pytest.raises(AssertionError, match="rows in a step of 6"):
                weight.multiply(rows, None)


def test_adapters_come_back_from_their_copies(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two of the three copies, so the adapter that was loaded first is read again."""
    reads: list[str] = []

    def with_copies(
        args: object, layers: dict[str, AdaptedLayer], dtype: torch.dtype, device: torch.device
    ) -> DeviceAdapters:
        one = DeviceAdapters(layers, 2, 6, 24, dtype, device)
        size = sum(stack.down[0].nbytes + stack.up[0].nbytes for stack in map(one.stacked, layers))
        return DeviceAdapters(layers, 2, 6, 24, dtype, device, 2 * size + 1)

    def read(folder: str, limits: adapter_files.AdapterLimits) -> list[adapter_files.AdaptedLayer]:
        reads.append(Path(folder).name)
        return adapter_files.read_adapter(folder, limits)

    monkeypatch.setattr(model_adapters, "_step_adapters", with_copies)
    monkeypatch.setattr(model_adapters, "read_adapter", read)
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 2)
    runner = make_runner(folder, 16, enable_lora=True, dtype="float32")
    assert runner.loaded.adapters is not None
    adapters, driver, (first, second, third) = runner.loaded.adapters.step, PlanDriver(runner, 16), SPECS
    for names in ((first, second), (third, second), (second, third), (third, first)):
        for name in names:
            load(runner, tmp_path, name)
        jobs = [(case.job(), case.expected) for case in cases if case.adapter in ("", *names)]
        driver.run([job for job, _ in jobs])
        assert [job.outputs for job, _ in jobs] == [expected for _, expected in jobs]
        for name in names:
            adapters.release(name)
    assert reads == [first, second, third, first]


def test_copies_used_longest_ago_make_room() -> None:
    copies = HostCopies(8, 20, torch.device("cpu"))
    for key in ("red", "blue"):
        copies.keep(key, copies.new())
    red = copies.pop("red")
    assert red is not None and copies.pop("red") is None
    copies.keep("red", red)
    green = copies.new()
    assert copies.pop("blue") is None
    copies.keep("green", green)
    assert copies.pop("red") is red and copies.pop("green") is green
    copies.give_back(green)
    assert copies.new() is green


def test_without_room_no_copy_is_kept() -> None:
    copies = HostCopies(8, 7, torch.device("cpu"))
    one = copies.new()
    copies.keep("red", one)
    assert copies.pop("red") is None and copies.new() is one
