"""Look up where a decode step stores keys and values in a page group with a window, after `gather_decode` has found the positions."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

_BLOCK: Final = 32


@kernel(
    one_variant_for=(
        "row_slots_ptr",
        "page_words_ptr",
        "last_ptr",
        "page_table_ptr",
        "positions_ptr",
        "locations_ptr",
        "num_rows",
        "dummy_slot",
        "page_table_stride",
        "page_words_stride",
    )
)
def gather_window_kernel(
    row_slots_ptr: tl.tensor,
    page_words_ptr: tl.tensor,  # [RING, rows] int64 in host memory: the words of the group's PageMailbox
    last_ptr: tl.tensor,  # [1] int64: number of the last store; this step ends with the next one
    page_table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    num_rows: tl.tensor,
    dummy_slot: tl.tensor,
    page_table_stride: tl.tensor,
    page_words_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    NUMBER_BITS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Enter each row's new page, if it begins one, and find the location of its position."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    number = tl.load(last_ptr) + 1
    # Volatile, as the host has written over the bus since the step before.
    words = tl.load(page_words_ptr + number % RING * page_words_stride + rows, mask=inside, other=0, volatile=True)
    slots = tl.load(row_slots_ptr + rows, mask=inside, other=0)
    positions = tl.load(positions_ptr + rows, mask=inside, other=0)
    pages_ptr = page_table_ptr + slots * page_table_stride + positions // PAGE_SIZE
    pages = tl.load(pages_ptr, mask=inside, other=0).to(tl.int64)
    begins = inside & (slots != dummy_slot) & ((words >> PAGE_BITS) == number % (1 << NUMBER_BITS))
    pages = tl.where(begins, words & ((1 << PAGE_BITS) - 1), pages)
    tl.store(pages_ptr, pages.to(tl.int32), mask=begins)
    tl.store(locations_ptr + rows, pages * PAGE_SIZE + positions % PAGE_SIZE, mask=inside)


def gather_window(
    row_slots: torch.Tensor,
    page_words: torch.Tensor,
    last_store: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    dummy_slot: int,
    page_size: int,
    word_bits: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Write to `out` the flat location of each row's position in the memory of the group to which `page_table` and `page_words` belong.

    `positions` and the other arguments are those of `gather_decode`, which must have run before in this step.
    """
    num_rows = len(row_slots)
    gather_window_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        row_slots, page_words, last_store, page_table, positions, out,
        num_rows, dummy_slot, page_table.stride(0), page_words.stride(0),
        PAGE_SIZE=page_size, PAGE_BITS=word_bits[0], NUMBER_BITS=word_bits[1], RING=len(page_words), BLOCK=_BLOCK,
        num_warps=1,
    )  # fmt: skip
