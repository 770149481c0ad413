"""Copy the keys and values of a step's rows out of their pages, for kernels that read them in one piece."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV
from srt.kernels.build.jit import kernel

_BLOCK_T: Final = 16  # tokens
_MOST_WIDTH: Final = 1024  # elements of a token that a program copies


@kernel(one_variant_for=("slots_ptr", "indptr_ptr", "page_table_stride"))
def gather_kv_kernel(
    k_ptr: tl.tensor,  # of the first head that is copied
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    indptr_ptr: tl.tensor,  # [rows + 1] int32
    k_out_ptr: tl.tensor,  # [tokens, WIDTH]
    v_out_ptr: tl.tensor,
    k_scale: float,
    v_scale: float,
    page_table_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    HAS_SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Program (block of tokens, row, block of elements)."""
    row = tl.program_id(1)
    begin = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - begin
    positions = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = positions < count
    slot = tl.load(slots_ptr + row).to(tl.int64)
    pages = tl.load(page_table_ptr + slot * page_table_stride + positions // PAGE_SIZE, mask=live, other=0)
    locations = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    columns = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = live[:, None] & (columns < WIDTH)[None, :]
    k = tl.load(k_ptr + locations[:, None] * k_location_stride + columns[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + locations[:, None] * v_location_stride + columns[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        k = k.to(tl.float32) * k_scale
        v = v.to(tl.float32) * v_scale
    offsets = (begin + positions).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(k_out_ptr + offsets, k.to(k_out_ptr.dtype.element_ty), mask=mask)
    tl.store(v_out_ptr + offsets, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def gather_kv(
    kv: PagedKV, first_head: int, slots: torch.Tensor, indptr: torch.Tensor, most: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Copy the first positions of slot `slots[r]` to tokens ``indptr[r]`` to ``indptr[r + 1]`` of k and v, at most `most` per row.

    k and v are [tokens, heads, head_dim] without gaps, for heads from `first_head` on. Stored numbers of another type are converted, and
    multiplied by their scales.
    """
    num_heads, head_dim = k.shape[1:]
    heads = slice(first_head, first_head + num_heads)
    assert k.is_contiguous() and v.is_contiguous() and k.shape == v.shape, (k.stride(), v.stride())
    assert head_dim == kv.head_dim and heads.stop <= kv.num_kv_heads, (k.shape, kv.k_buffer.shape)
    if not len(slots):
        return
    width = num_heads * head_dim
    block = min(triton.next_power_of_2(width), _MOST_WIDTH)
    gather_kv_kernel[(triton.cdiv(most, _BLOCK_T), len(slots), triton.cdiv(width, block))](
        kv.k_buffer[:, heads], kv.v_buffer[:, heads], kv.page_table, slots, indptr, k, v, kv.k_scale, kv.v_scale,
        kv.page_table.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0),
        HAS_SCALES=kv.k_buffer.dtype != k.dtype, WIDTH=width, PAGE_SIZE=kv.page_size, BLOCK_T=_BLOCK_T, BLOCK_W=block,
        num_warps=8,
    )  # fmt: skip
