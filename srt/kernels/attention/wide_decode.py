"""Decode attention from the packed projection for heads of 128 and 256, as a CUDA C++ kernel for Hopper and bfloat16.

It does the same as `fused_decode.py`. There the warps of a program exchange intermediate results through shared memory dozens of times,
which takes longer than reading keys and values. Here each warp attends over positions of its own, and results are exchanged once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from srt.kernels.attention.decode_attention import NO_WINDOW, PROGRAMS_PER_PROCESSOR, DecodeScratch
from srt.kernels.attention.paged_kv import PagedKV, check_heads
from srt.kernels.build.hopper import CAPABILITY, launch, runs_on, source_of

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_MOST_SPLITS: Final = 64


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a group's query heads and of a split's positions."""

    heads: int  # of a program
    warps: int  # of a program
    positions: int  # of a warp at a time


# By head size and query heads per KV head.
_DIVISIONS: Final[Mapping[tuple[int, int], Division]] = {
    (256, 1): Division(1, 4, 8),
    (256, 2): Division(2, 4, 8),
    (256, 4): Division(2, 4, 8),
    (128, 1): Division(1, 8, 8),
    (128, 2): Division(2, 4, 8),
    (128, 4): Division(2, 8, 8),
    (128, 8): Division(4, 4, 8),
}
# By the same sizes, the most rows for which this kernel is faster than others. Sizes without an entry: one row.
_MOST_ROWS: Final[Mapping[tuple[int, int], int]] = {(128, 8): 8}


@dataclass(frozen=True, slots=True)
class WideVariant:
    """The kernel for `group` query heads per KV head."""

    head_dim: int
    group: int
    page_size: int
    division: Division

    @classmethod
    def of(cls, head_dim: int, group: int, page_size: int, num_rows: int = 1) -> WideVariant | None:
        """Return the variant for these heads; None if the kernel does not support them, or another is faster with this number of rows."""
        heads = head_dim, group
        division = _DIVISIONS.get(heads)
        if division is None or num_rows > _MOST_ROWS.get(heads, 1):
            return None
        return cls(head_dim, group, page_size, division)

    @property
    def programs_per_kv_head(self) -> int:
        """Number of programs that share a KV head's positions, each with heads of its own."""
        return self.group // self.division.heads

    @property
    def name(self) -> str:
        return "wide_decode"

    @property
    def source(self) -> str:
        return source_of(_SOURCE)

    @property
    def num_threads(self) -> int:
        return 32 * self.division.warps

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "GROUP": self.group,
            "HEADS": self.division.heads,
            "HEAD_DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "WARPS": self.division.warps,
            "POSITIONS": self.division.positions,
            "MOST_SPLITS": _MOST_SPLITS,
        }


def is_wide(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, page_size: int
) -> bool:
    """Return whether the kernel supports such heads and runs on this device; log a warning if only the latter fails."""
    variant = WideVariant.of(head_dim, group, page_size)
    if variant is None or dtype is not torch.bfloat16 or kv_dtype is not torch.bfloat16:
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return runs_on(device, variant)


def wide_splits(head_dim: int, group: int, num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the number of splits of each row; 0 if another kernel is faster with this number of rows."""
    variant = WideVariant.of(head_dim, group, 1, num_rows)
    if variant is None:
        return 0
    num_programs = num_rows * num_kv_heads * variant.programs_per_kv_head
    return max(1, min(PROGRAMS_PER_PROCESSOR * num_processors // num_programs, _MOST_SPLITS))


def wide_decode(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    locations: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    num_splits: int,
    scratch: DecodeScratch,
    window: int | None = None,
    pdl: bool = False,
    is_plus_one: bool = False,
) -> torch.Tensor:
    """Return what `fused_decode` returns, and store the new keys and values as it does."""
    num_rows, width = qkv.shape
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    num_heads = width // head_dim - 2 * num_kv_heads
    variant = WideVariant.of(head_dim, num_heads // num_kv_heads, kv.page_size, num_rows)
    assert variant is not None, (head_dim, num_heads, num_kv_heads, num_rows)
    num_programs = num_kv_heads * variant.programs_per_kv_head
    assert width == (variant.group + 2) * num_kv_heads * head_dim and qkv.is_contiguous(), (qkv.shape, qkv.stride())
    assert qkv.dtype is kv.k_buffer.dtype is torch.bfloat16, (qkv.dtype, kv.k_buffer.dtype)
    assert locations.dtype is req_pool_indices.dtype is seq_lens.dtype is torch.int64
    assert kv.page_table.dtype is torch.int32, kv.page_table.dtype
    assert 1 <= num_splits <= _MOST_SPLITS, num_splits
    assert scratch.partial.numel() >= num_rows * num_heads * num_splits * head_dim, scratch.partial.numel()
    assert scratch.arrived.numel() >= num_rows * num_programs, scratch.arrived.numel()
    check_heads(kv.k_buffer, num_kv_heads, head_dim)
    check_heads(kv.v_buffer, num_kv_heads, head_dim)
    out = torch.empty((num_rows, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    q_weight, k_weight = norm_weights or (qkv, qkv)
    arguments = (
        qkv, q_weight, k_weight, cos, sin, locations, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, seq_lens,
        scratch.partial, scratch.lse, scratch.arrived, out, float(eps), scale * math.log2(math.e),
        int(norm_weights is not None), float(is_plus_one), NO_WINDOW if window is None else window,
        kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
    )  # fmt: skip
    with torch.cuda.device(qkv.device):
        launch(variant, (num_splits, num_programs, num_rows), (), arguments, is_dependent=bool(pdl))
    return out
