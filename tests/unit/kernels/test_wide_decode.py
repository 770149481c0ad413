"""That attention of wide heads compiles and is chosen for what it supports, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.kernels.attention import wide_decode
from srt.kernels.attention.wide_decode import WideVariant, is_wide, wide_splits
from srt.kernels.build.cuda_source import machine_code
from srt.kernels.build.hopper import ARCHITECTURE

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("variant", [WideVariant(group, page_size) for group, page_size in ((1, 1), (2, 16), (4, 64))])
def test_every_variant_compiles_for_hopper(
    variant: WideVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    assert machine_code(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_groups_whose_heads_warps_cannot_share_are_not_compiled() -> None:
    variant = WideVariant(2, 16)
    with pytest.raises(RuntimeError, match="a warp merges dimensions of one head"):
        machine_code(variant.source, {**variant.constants, "GROUP": 3}, ARCHITECTURE)


def test_what_it_does_not_support_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(wide_decode, "runs_on", lambda device, variant: True)
    assert is_wide(cuda, BF16, BF16, 256, 2, 16)
    assert not is_wide(cuda, BF16, FP8, 256, 2, 16), "memory of fp8"
    assert not is_wide(cuda, torch.float16, torch.float16, 256, 2, 16)
    assert not is_wide(cuda, BF16, BF16, 128, 2, 16), "Triton's kernel was measured for these heads"
    assert not is_wide(cuda, BF16, BF16, 256, 4, 16), "no GPU has run it"
    assert not is_wide(cuda, BF16, BF16, 256, 8, 16), "more heads than registers hold"
    assert not is_wide(torch.device("cpu"), BF16, BF16, 256, 2, 16)
    monkeypatch.setattr(wide_decode, "runs_on", lambda device, variant: False)
    assert not is_wide(cuda, BF16, BF16, 256, 2, 16)
    capability[0] = (10, 0)
    assert not is_wide(cuda, BF16, BF16, 256, 2, 16)


def test_splits_fill_the_device_and_fit_in_the_scratch_memory() -> None:
    assert wide_splits(1, 132) == wide_splits(8, 132) == 64
    assert wide_splits(16, 132) * 16 <= 4 * 132
    assert wide_splits(1000, 132) == 1
