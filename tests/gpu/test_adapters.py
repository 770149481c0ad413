"""LoRA adapters on a GPU: tokens of the models that they merge into, with and without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.layers.adapters import AdaptedWeight
from srt.layers.attention.base import Reading
from srt.layers.device_adapters import DeviceAdapters
from srt.layers.linear import LinearLayer
from srt.layers.ops import Affine
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs import piecewise_cuda_graph_runner
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import Admission, LogprobSpec, int32_array
from tests.support.adapter_cases import SPECS, Case, cases_of, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.lora_reference import adapted_reference
from tests.support.plan_driver import PlanDriver, greedy
from tests.support.random_adapter import write_adapter
from tests.support.runners import decodes_of, make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def adapted_runner(folder: Path, captures: bool, max_loras: int = 4, quantization: str | None = None) -> ModelRunner:
    runner = make_runner(
        folder,
        16,
        device=CUDA,
        enable_lora=True,
        dtype="float32",
        disable_cuda_graph=not captures,
        cuda_graph_bs=(1, 4, 24),
        max_running_requests=40,  # more than the smallest graph of prompts has tokens
        piecewise_cuda_graph_max_tokens=192,
        max_lora_rank=8,
        max_loras_per_batch=max_loras,
        quantization=quantization,
    )
    runner.graphs.capture_all()
    return runner


def run_cases(driver: PlanDriver, cases: list[Case]) -> None:
    jobs = [case.job() for case in cases]
    driver.run(jobs)
    assert [job.outputs for job in jobs] == [case.expected for case in cases]


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "qwen3_moe"])
def test_tokens_equal_those_of_the_merged_models(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str, captures: bool
) -> None:
    """All adapters and the model itself in the same steps, in chunks and with cached prefixes; then each case alone."""
    folder = checkpoint(family, tied=family == "gemma2")  # which some versions of transformers tie in any case
    cases = cases_of(folder, tmp_path, 5)
    runner = adapted_runner(folder, captures)
    for name in SPECS:
        load(runner, tmp_path, name)
    for chunk in (24, 1 << 30):
        driver = PlanDriver(runner, 16, chunk, share=True)
        run_cases(driver, cases)
        runner.reset()
    driver = PlanDriver(runner, 16)
    for case in cases[:6]:
        run_cases(driver, [case])
    assert Reading.ADAPTED in decodes_of(runner).graphs or not captures
    assert (runner.graphs.adapted_pieces is not None) == captures


@pytest.mark.parametrize("is_whole", [True, False])
def test_prompts_with_adapters_replay_graphs(
    checkpoint: CheckpointFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_whole: bool,
) -> None:
    """Graphs with attention, where the backend has such, and graphs of the pieces between attentions."""
    if not is_whole:
        monkeypatch.setattr(piecewise_cuda_graph_runner, "MOST_WHOLE_TOKENS", 0)
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 4)
    runner = adapted_runner(folder, True)
    for name in SPECS:
        load(runner, tmp_path, name)
    pieces, sizes = runner.graphs.adapted_pieces, list[int]()
    assert pieces is not None and "could not be captured" not in caplog.text
    prepare = pieces.replay_prepare

    def noted(batch: ForwardBatch, size: int) -> None:
        sizes.append(size)
        prepare(batch, size)

    monkeypatch.setattr(pieces, "replay_prepare", noted)
    for chunk in (24, 150):  # up to 32 tokens are taken one by one
        run_cases(PlanDriver(runner, 16, chunk, share=True), cases)
        runner.reset()
    assert min(sizes) <= 64 < max(sizes)


def test_an_adapter_that_made_room_comes_back_as_it_was(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """One place for three adapters of different ranks and layers, and steps in flight when one is replaced."""
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 4)
    runner = adapted_runner(folder, True, max_loras=1)
    assert runner.loaded.adapters is not None
    driver = PlanDriver(runner, 16)
    for name in [*SPECS, *reversed(SPECS)]:
        load(runner, tmp_path, name)
        run_cases(driver, [case for case in cases if case.adapter in ("", name)])
        runner.loaded.adapters.step.release(name)


def test_rows_without_an_adapter_have_the_ids_that_they_have_alone(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3", tied=False)
    cases = cases_of(folder, tmp_path, 4)
    bases = [case for case in cases if not case.adapter]
    plain = make_runner(folder, 16, device=CUDA, dtype="float32", cuda_graph_bs=(1, 4, 24))
    plain.graphs.capture_all()
    alone = [case.job() for case in bases]
    PlanDriver(plain, 16).run(alone)
    runner = adapted_runner(folder, True)
    for name in SPECS:
        load(runner, tmp_path, name)
    mixed = [case.job() for case in cases]
    PlanDriver(runner, 16).run(mixed)
    assert [job.outputs for job in mixed if not job.adapter] == [job.outputs for job in alone]


def test_quantised_weights_keep_their_products_below_adapters(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """Each token's product is that of the weights as they are stored, and on top of it that of its adapter."""
    folder = checkpoint("qwen3", tied=False)
    write_adapter(tmp_path / "all", folder, SPECS["all"])
    runner = adapted_runner(folder, False, quantization="fp8")
    load(runner, tmp_path, "all")
    assert runner.loaded.adapters is not None
    step, path = runner.loaded.adapters.step, "model.layers.0.mlp.gate_up_proj"
    assert isinstance(step, DeviceAdapters)
    layer = runner.loaded.our_model.get_submodule(path)
    assert isinstance(layer, LinearLayer)
    assert isinstance(layer.weight, AdaptedWeight)
    ids, spec = int32_array([1]), greedy(1)
    step.admit([Admission(slot, ids, 1, 0, 0, spec, LogprobSpec(), adapter=key) for slot, key in ((0, "all"), (1, ""))])
    for num_rows in (1, 5, 40):
        x = torch.randn(num_rows, layer.weight.shape[1], device=CUDA)
        slots = torch.arange(num_rows, device=CUDA) % 2
        with torch.inference_mode():
            plain = layer.ops.linear(x, Affine(layer.weight.inner, None))
            with step.applied_to_slots(slots):
                adapted = layer(x)
        expected = adapted_reference(x, step.stacked(path), step.numbers_of(slots), plain)
        torch.testing.assert_close(adapted.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(adapted[slots == 1], plain[slots == 1])
        assert not torch.equal(adapted[0], plain[0])
