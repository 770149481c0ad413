"""That attention of wide heads compiles and is chosen for what it supports, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.kernels.attention import wide_decode
from srt.kernels.attention.wide_decode import Division, WideVariant, is_wide, wide_splits
from srt.kernels.build.cuda_source import machine_code
from srt.kernels.build.hopper import ARCHITECTURE

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


SHAPES = ((128, 1, 1), (128, 2, 16), (128, 4, 16), (128, 8, 64), (256, 1, 16), (256, 2, 16), (256, 4, 16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_variant_compiles_for_hopper(
    shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    variants = [WideVariant.of(*shape), WideVariant.of(*shape, num_rows=8)]
    assert variants[0] is not None
    for variant in filter(None, variants):
        assert machine_code(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_groups_that_lanes_cannot_divide_are_not_compiled() -> None:
    variant = WideVariant(128, 3, 16, Division(heads=3, warps=4, positions=8))
    with pytest.raises(RuntimeError, match="a group is divided evenly"):
        machine_code(variant.source, variant.constants, ARCHITECTURE)


def test_what_it_does_not_support_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(wide_decode, "runs_on", lambda device, variant: True)
    assert all(is_wide(cuda, BF16, BF16, 256, group, 16) for group in (1, 2, 4))
    assert all(is_wide(cuda, BF16, BF16, 128, group, 16) for group in (1, 2, 4, 8))
    assert not is_wide(cuda, BF16, FP8, 128, 8, 16), "memory of fp8"
    assert not is_wide(cuda, torch.float16, torch.float16, 128, 8, 16)
    assert not is_wide(cuda, BF16, BF16, 64, 2, 16), "too few dimensions for the lanes of a warp"
    assert not is_wide(cuda, BF16, BF16, 128, 5, 16), "lanes cannot divide it"
    assert not is_wide(cuda, BF16, BF16, 256, 8, 16), "no GPU has run it"
    assert not is_wide(torch.device("cpu"), BF16, BF16, 128, 8, 16)
    monkeypatch.setattr(wide_decode, "runs_on", lambda device, variant: False)
    assert not is_wide(cuda, BF16, BF16, 128, 8, 16)
    capability[0] = (10, 0)
    assert not is_wide(cuda, BF16, BF16, 128, 8, 16)


def test_splits_fill_the_device_and_fit_in_the_scratch_memory() -> None:
    assert wide_splits(256, 2, 1, 1, 132) == wide_splits(256, 2, 1, 4, 132) == 64
    assert wide_splits(128, 4, 1, 8, 132) == 33, "16 programs share the positions"
    assert wide_splits(128, 8, 1, 4, 132) == 64, "8 do"
    assert wide_splits(256, 2, 1, 16, 132) * 16 <= 4 * 132
    assert wide_splits(128, 8, 1, 1000, 132) == 1
    assert wide_splits(128, 8, 8, 4, 132) == 8, "64 programs share the positions of 8 rows"


def test_more_rows_are_left_to_others_where_these_are_faster() -> None:
    assert all(wide_splits(128, 8, rows, 4, 132) > 0 for rows in range(1, 9))
    assert wide_splits(128, 8, 9, 4, 132) == 0
    assert wide_splits(128, 4, 2, 8, 132) == wide_splits(256, 2, 2, 4, 132) == 0
