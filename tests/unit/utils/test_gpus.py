"""Asking the driver for a GPU's memory."""

from __future__ import annotations

import pytest

from srt.utils import gpus
from srt.utils.gpus import gpu_memory


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML", "libno-such-driver.so.1")
    assert gpu_memory(0) is None


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [(None, 2, "2"), ("3,1", 0, "3"), ("3, 1", 1, "1"), ("GPU-8f0e", 0, "GPU-8f0e"), ("3", 1, None), ("", 0, None)],
)
def test_gpus_are_counted_as_cuda_counts_them(visible: str | None, index: int, name: str | None) -> None:
    assert gpus._visible_name(index, visible) == name


@pytest.mark.gpu
def test_the_driver_tells_what_cuda_tells() -> None:
    import torch

    memory = gpu_memory(0)
    assert memory is not None
    assert memory.total >= torch.cuda.get_device_properties(0).total_memory
