"""Even attention as a kernel in CUDA's C++, for Hopper and bfloat16: programs that fill each processor, as those of products do.

Programs of Triton's kernel share a processor by four, and so start when the product before them has ended, on an empty device, and are
merged from as many parts. Here two programs take the place of one of the product before, and send for keys and values of earlier steps
before that product has ended; the product behind it does the same with its weights.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from srt.kernels.even_attention import BLOCK_N as SHARE_UNIT
from srt.kernels.even_attention import MOST_ROWS, MOST_SHARES, EvenShares
from srt.kernels.hopper import CAPABILITY, launch, pointer, runs_on, source_of, tensor_map, with_alignment
from srt.kernels.paged_kv import PagedKV, check_queries

LEAST_ROWS: Final = 4
_BLOCK: Final = 16  # positions that a load brings
_MOST_GROUP: Final = 8
_WARPS: Final = 4  # that multiply
_SLOTS: Final = 8
_PROGRAMS: Final = 2  # on a processor, neither less nor more: others would be placed where there is room, not evenly
_LEAST_BYTES: Final = 77 * 1024  # of shared memory, so that there is no room for one more
_HEAD_DIMS: Final = (64, 128)


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The kernel for heads of this size, so many of which share keys and values."""

    group: int
    head_dim: int
    page_size: int

    @property
    def name(self) -> str:
        return "stream_attention"

    @property
    def source(self) -> str:
        return source_of(self.name)

    @property
    def num_threads(self) -> int:
        return 32 * (_WARPS + 2)

    @property
    def cluster(self) -> int:
        return 1

    @property
    def slot_bytes(self) -> int:
        return 2 * 2 * _BLOCK * self.head_dim

    @property
    def _found_bytes(self) -> int:
        """What warps found in two parts of rows."""
        return 2 * 4 * _WARPS * (2 * 8 + self.group * (self.head_dim + 4))

    @property
    def shared_bytes(self) -> int:
        return max(with_alignment(_SLOTS * self.slot_bytes + self._found_bytes), _LEAST_BYTES)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "SHARE_UNIT": SHARE_UNIT,
            "SLOTS": _SLOTS,
            "WARPS": _WARPS,
            "PROGRAMS": _PROGRAMS,
        }


class _Shares(ctypes.Structure):
    """As the kernel has them."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("begins", "first_rows", "row_begins", "row_shares", "lengths")
    )


def is_streamed(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, kv_heads: int, page_size: int
) -> bool:
    """Whether there is a variant for heads and a memory of this type on such a device."""
    is_served = dtype is torch.bfloat16 and head_dim in _HEAD_DIMS and group <= _MOST_GROUP and page_size % _BLOCK == 0
    if not is_served or device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return kv_heads <= torch.cuda.get_device_properties(device).multi_processor_count


def can_stream(device: torch.device, head_dim: int, group: int, page_size: int) -> bool:
    """Whether the variant runs there. If not, that is told."""
    return runs_on(device, AttentionVariant(group, head_dim, page_size))


def shares_of(kv_heads: int, num_processors: int) -> int:
    """As many of each KV head as run at once."""
    return min(_PROGRAMS * num_processors // kv_heads, MOST_SHARES)


def stream_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    shares: EvenShares,
) -> None:
    """As `even_attention`, where it is streamed. Keys and values of all but the rows' last positions must be there before the kernel
    before this one has ended."""
    num_rows, _, head_dim = q.shape
    variant = AttentionVariant(check_queries(q, out, kv), head_dim, kv.page_size)
    assert num_rows < min(len(shares.row_begins), MOST_ROWS + 1), num_rows
    assert seq_lens.dtype is torch.int64 and req_pool_indices.dtype is torch.int64 and kv.k_scale == 1.0 == kv.v_scale
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
        scale * math.log2(math.e),
        q.stride(0),
        kv.page_table.stride(0),
        out.stride(0),
    )
    maps = _map_of(kv.k_buffer), _map_of(kv.v_buffer)
    with torch.cuda.device(q.device):
        launch(variant, (kv.num_kv_heads, len(shares.first_rows), 1), maps, arguments, is_dependent=True)


def _map_of(buffer: torch.Tensor) -> object:
    """Of [locations, heads, head_dim]: a load brings 64 columns of some locations of one head, then the next 64."""
    locations, heads, head_dim = buffer.shape
    shape, strides = (64, locations, head_dim // 64, heads), (2 * buffer.stride(0), 128, 2 * head_dim)
    return tensor_map(buffer.data_ptr(), shape, strides, (64, _BLOCK, head_dim // 64, 1))
