"""Steps with LoRA adapters as a GPU runs them, but with products in PyTorch, against the models that the adapters merge into."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.kernels.lora import products
from srt.layers import device_adapters
from srt.layers.attention import backend_choice
from srt.layers.attention.base import Reading
from srt.layers.device_adapters import DeviceAdapters
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
