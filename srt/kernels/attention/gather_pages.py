"""Concatenate the pages of a step's rows, for kernels that read a flat list of pages."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

_BLOCK: Final = 256


@kernel(one_variant_for=("slots_ptr", "indptr_ptr", "firsts_ptr", "page_table_stride"))
def gather_pages_kernel(
    page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    indptr_ptr: tl.tensor,
    firsts_ptr: tl.tensor,  # [rows] int32, if HAS_FIRSTS
    out_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    HAS_FIRSTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, block) copies a block of that row's pages; the first of `firsts_ptr` stands in for those before it."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - begin
    slot = tl.load(slots_ptr + row).to(tl.int64)
    sources = columns
    if HAS_FIRSTS:
        sources = tl.maximum(columns, tl.load(firsts_ptr + row))
    pages = tl.load(page_table_ptr + slot * page_table_stride + sources, mask=columns < count, other=0)
    tl.store(out_ptr + begin + columns, pages, mask=columns < count)


def gather_pages(
    page_table: torch.Tensor,
    slots: torch.Tensor,
    indptr: torch.Tensor,
    most: int,
    out: torch.Tensor,
    firsts: torch.Tensor | None = None,
) -> None:
    """Copy the first pages of slot `slots[r]` to ``out[indptr[r] : indptr[r + 1]]``, at most `most` per row. All int32 but the slots.

    With `firsts`, page number `firsts[r]` of the row is copied in place of those before it.
    """
    if not len(slots):
        return
    gather_pages_kernel[(len(slots), triton.cdiv(most, _BLOCK))](
        page_table, slots, indptr, indptr if firsts is None else firsts, out, page_table.stride(0),
        HAS_FIRSTS=firsts is not None, BLOCK=_BLOCK,
    )  # fmt: skip
