"""Even attention as a CUDA C++ kernel, for Hopper, bfloat16 and a KV memory in bfloat16 or fp8.

Four programs of the Triton kernel share a multiprocessor, so they start on an empty device, after the previous product has ended, and
many parts must be merged. Here two programs take the place of one program of the previous product. They load keys and values of earlier
steps before that product has ended, and the next product does the same with its weights.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from srt.kernels.attention.decode_attention import NO_WINDOW
from srt.kernels.attention.even_attention import BLOCK_N as SHARE_UNIT
from srt.kernels.attention.even_attention import MOST_ROWS, MOST_SHARES, WINDOW_UNIT, EvenShares
from srt.kernels.attention.paged_kv import PagedKV, check_queries
from srt.kernels.build.hopper import (
    BLOCK_K,
    CAPABILITY,
    launch,
    pointer,
    runs_on,
    source_of,
    tensor_map,
    with_alignment,
)

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_OPERANDS: Final = Path(__file__).with_name("row_operands.cuh")
LEAST_ROWS: Final = 4
_LINE: Final = 2 * BLOCK_K  # bytes
_BLOCK: Final = WINDOW_UNIT  # positions per load
_MOST_GROUP: Final = 8
_RINGS: Final = {64: ((4, 8),), 128: ((4, 8),), 256: ((3, 6), (4, 4))}
"""Warps that multiply, and slots of the ring, by head size, the fastest first; the slots are those for a memory in bfloat16."""

_PROGRAMS: Final = 2  # per multiprocessor, exactly: with room for more they would not be placed evenly
_LEAST_BYTES: Final = 77 * 1024  # of shared memory per program, so that a third does not fit
_MOST_BYTES: Final = 112 * 1024  # of shared memory per program, so that two fit
_HEAD_DIMS: Final = {torch.bfloat16: (64, 128, 256), torch.float8_e4m3fn: (128, 256)}
"""Supported head sizes by the type of the KV memory. They fill lines of 128 bytes."""


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The kernel for heads of this size, `group` of which share a KV head."""

    group: int
    head_dim: int
    page_size: int
    is_fp8: bool = False  # whether the KV memory is fp8

    @property
    def name(self) -> str:
        return "stream_attention"

    @property
    def source(self) -> str:
        return source_of(_SOURCE, 0, _OPERANDS)

    @property
    def num_threads(self) -> int:
        return 32 * (self._ring[0] + 2)

    @property
    def cluster(self) -> int:
        return 1

    @property
    def slot_bytes(self) -> int:
        return 2 * (1 if self.is_fp8 else 2) * _BLOCK * self.head_dim

    @property
    def slots(self) -> int:
        """Slots of the ring: twice as many for fp8, so that the same number of bytes is in flight."""
        return self._ring[1] * (2 if self.is_fp8 else 1)

    @property
    def _ring(self) -> tuple[int, int]:
        """The first ring with which two programs find room."""
        rings = _RINGS[self.head_dim]
        return next((ring for ring in rings if self._bytes_with(*ring) <= _MOST_BYTES), rings[-1])

    def _bytes_with(self, warps: int, slots: int) -> int:
        """Return the shared memory of a ring, and of the warps' results in two parts of rows."""
        found = 2 * 4 * warps * (2 * 8 + self.group * (self.head_dim + 4))
        return with_alignment(slots * (2 if self.is_fp8 else 1) * self.slot_bytes + found)

    @property
    def shared_bytes(self) -> int:
        return max(self._bytes_with(*self._ring), _LEAST_BYTES)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "SHARE_UNIT": SHARE_UNIT,
            "SLOTS": self.slots,
            "FP8": int(self.is_fp8),
            "WARPS": self._ring[0],
            "PROGRAMS": _PROGRAMS,
        }


class _Shares(ctypes.Structure):
    """Mirror of the kernel's argument in stream_attention.cu."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("begins", "first_rows", "row_begins", "row_shares", "lengths")
    )


def is_streamed(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    kv_heads: int,
    page_size: int,
) -> bool:
    """Return whether there is a variant for heads of this type and such a memory on such a device."""
    has_heads = head_dim in _HEAD_DIMS.get(kv_dtype, ()) and group <= _MOST_GROUP
    is_served = dtype is torch.bfloat16 and has_heads and page_size % _BLOCK == 0
    is_served = is_served and AttentionVariant(group, head_dim, page_size).shared_bytes <= _MOST_BYTES
    if not is_served or device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return kv_heads <= torch.cuda.get_device_properties(device).multi_processor_count


def can_stream(device: torch.device, kv_dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> bool:
    """Return whether the variant runs on this device, and log a warning if not."""
    return runs_on(device, AttentionVariant(group, head_dim, page_size, kv_dtype is torch.float8_e4m3fn))


def shares_of(kv_heads: int, num_processors: int) -> int:
    """Return the number of programs of each KV head that run at once."""
    return min(_PROGRAMS * num_processors // kv_heads, MOST_SHARES)


def stream_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    shares: EvenShares,
    window: int | None = None,
) -> None:
    """Compute `even_attention` with the streaming kernel. The keys and values of all but the rows' last positions must be stored before
    the previous kernel ends. With a window, for which the shares were found, rows see their last positions only."""
    num_rows, _, head_dim = q.shape
    is_fp8 = kv.k_buffer.dtype is torch.float8_e4m3fn
    variant = AttentionVariant(check_queries(q, out, kv), head_dim, kv.page_size, is_fp8)
    assert num_rows < min(len(shares.row_begins), MOST_ROWS + 1), num_rows
    assert seq_lens.dtype is torch.int64 and req_pool_indices.dtype is torch.int64
    assert kv.page_table.dtype is torch.int32, kv.page_table.dtype
    tables = (shares.begins, shares.first_rows, shares.row_begins, shares.row_shares, seq_lens)
    arguments = (
        _Shares(*map(pointer, tables)),
        q,
        kv.page_table,
        req_pool_indices,
        shares.partial,
        shares.lse,
        shares.arrived,
        out,
        scale * kv.k_scale * math.log2(math.e),
        kv.v_scale,
        NO_WINDOW if window is None else window,
        q.stride(0),
        kv.page_table.stride(0),
        out.stride(0),
    )
    maps = _map_of(kv.k_buffer), _map_of(kv.v_buffer)
    with torch.cuda.device(q.device):
        launch(variant, (kv.num_kv_heads, len(shares.first_rows), 1), maps, arguments, is_dependent=True)


def _map_of(buffer: torch.Tensor) -> object:
    """Return the tensor map of [locations, heads, head_dim].

    A load brings a line of some locations of one head, then the next line, if there is one. The map treats two fp8 numbers as one of
    bfloat16.
    """
    locations, heads, head_dim = buffer.shape
    head_bytes = head_dim * buffer.itemsize
    lines = head_bytes // _LINE
    shape, strides = (_LINE // 2, locations, lines, heads), (buffer.stride(0) * buffer.itemsize, _LINE, head_bytes)
    return tensor_map(buffer.data_ptr(), shape, strides, (_LINE // 2, _BLOCK, lines, 1))
