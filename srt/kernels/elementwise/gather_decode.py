"""Gather a decode step's inputs from the tables on the device, and store its draws in the tables and on the host."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

_BLOCK: Final = 32
_STORE_BLOCK: Final = 256


@kernel(
    one_variant_for=(
        "row_slots_ptr",
        "page_words_ptr",
        "last_ptr",
        "input_ids_ptr",
        "positions_ptr",
        "locations_ptr",
        "row_lens_ptr",
        "row_temperatures_ptr",
        "row_seeds_ptr",
        "row_top_ks_ptr",
        "row_top_ps_ptr",
        "row_min_ps_ptr",
        "num_rows",
        "dummy_slot",
        "page_table_stride",
        "token_table_stride",
        "page_words_stride",
    )
)
def gather_decode_kernel(
    row_slots_ptr: tl.tensor,
    page_words_ptr: tl.tensor,  # [RING, rows] int64 in host memory: the words of a PageMailbox
    last_ptr: tl.tensor,  # [1] int64: number of the last store; this step ends with the next one
    page_table_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    row_lens_ptr: tl.tensor,
    row_temperatures_ptr: tl.tensor,
    row_seeds_ptr: tl.tensor,
    row_top_ks_ptr: tl.tensor,
    row_top_ps_ptr: tl.tensor,
    row_min_ps_ptr: tl.tensor,
    num_rows: tl.tensor,
    dummy_slot: tl.tensor,
    page_table_stride: tl.tensor,
    token_table_stride: tl.tensor,
    page_words_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    NUMBER_BITS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gather each row's token, position, location and length, enter its page and grow its slot by one; the dummy slot never grows."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    number = tl.load(last_ptr) + 1
    # Over the bus, and volatile, as the host has written since the step before. All loads come before the stores, or they would wait for
    # it one after the other.
    words = tl.load(page_words_ptr + number % RING * page_words_stride + rows, mask=inside, other=0, volatile=True)
    slots = tl.load(row_slots_ptr + rows, mask=inside, other=0)
    is_real = inside & (slots != dummy_slot)
    temperatures = tl.load(temperatures_ptr + slots, mask=inside, other=0.0)
    seeds = tl.load(seeds_ptr + slots, mask=inside, other=0)
    top_ks = tl.load(top_ks_ptr + slots, mask=inside, other=0)
    top_ps = tl.load(top_ps_ptr + slots, mask=inside, other=0.0)
    min_ps = tl.load(min_ps_ptr + slots, mask=inside, other=0.0)
    positions = tl.load(seq_lens_ptr + slots, mask=is_real, other=0)
    tokens = tl.load(token_table_ptr + slots * token_table_stride + positions, mask=inside, other=0).to(tl.int64)
    pages_ptr = page_table_ptr + slots * page_table_stride + positions // PAGE_SIZE
    pages = tl.load(pages_ptr, mask=inside, other=0).to(tl.int64)
    tl.store(row_temperatures_ptr + rows, temperatures, mask=inside)
    tl.store(row_seeds_ptr + rows, seeds, mask=inside)
    tl.store(row_top_ks_ptr + rows, top_ks, mask=inside)
    tl.store(row_top_ps_ptr + rows, top_ps, mask=inside)
    tl.store(row_min_ps_ptr + rows, min_ps, mask=inside)
    tl.store(seq_lens_ptr + slots, positions + 1, mask=is_real)
    tl.store(input_ids_ptr + rows, tokens, mask=inside)
    tl.store(positions_ptr + rows, positions, mask=inside)
    tl.store(row_lens_ptr + rows, positions + 1, mask=inside)
    begins = is_real & ((words >> PAGE_BITS) == number % (1 << NUMBER_BITS))
    pages = tl.where(begins, words & ((1 << PAGE_BITS) - 1), pages)
    tl.store(pages_ptr, pages.to(tl.int32), mask=begins)
    tl.store(locations_ptr + rows, pages * PAGE_SIZE + positions % PAGE_SIZE, mask=inside)


@kernel(
    one_variant_for=(
        "ids_ptr",
        "values_ptr",
        "row_slots_ptr",
        "positions_ptr",
        "words_ptr",
        "last_ptr",
        "num_rows",
        "token_table_stride",
        "words_stride",
    )
)
def store_draws_kernel(
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,  # [rows] float32: the winning values; the draw is void if one is not finite
    row_slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    words_ptr: tl.tensor,  # [RING, rows] int64 in host memory: number << 32 | id, with id -1 if the draw is void
    last_ptr: tl.tensor,  # [1] int64: the number of the last store
    num_rows: tl.tensor,
    token_table_stride: tl.tensor,
    words_stride: tl.tensor,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store each row's id in the token table and on the host. One program handles all rows, because it numbers the store."""
    number = tl.load(last_ptr) + 1
    words_ptr += number % RING * words_stride
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < num_rows
        ids = tl.load(ids_ptr + rows, mask=inside, other=0).to(tl.int32)
        is_finite = tl.abs(tl.load(values_ptr + rows, mask=inside, other=0.0)) < float("inf")
        slots = tl.load(row_slots_ptr + rows, mask=inside, other=0)
        positions = tl.load(positions_ptr + rows, mask=inside, other=0)
        tl.store(token_table_ptr + slots * token_table_stride + positions, ids, mask=inside)
        told = tl.where(is_finite, ids, -1).to(tl.int64) & 0xFFFFFFFF
        # Each word is written through as a whole (STG.E.64.STRONG.SYS), because the host polls while the kernel runs.
        tl.store(words_ptr + rows, (number << 32) | told, mask=inside, cache_modifier=".wt")
    tl.debug_barrier()  # all threads have read the number
    tl.store(last_ptr, number)


def gather_decode(
    row_slots: torch.Tensor,
    page_words: torch.Tensor,
    last_store: torch.Tensor,
    page_table: torch.Tensor,
    token_table: torch.Tensor,
    seq_lens: torch.Tensor,
    draws: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dummy_slot: int,
    page_size: int,
    word_bits: tuple[int, int],
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    row_draws: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Gather the inputs of a decode step: `out` gets input ids, positions, locations and new lengths, `row_draws` the sampling parameters.

    Slots must be distinct, except for the dummy slot. A new page begins at its row's next position. `page_words`, in pinned host memory,
    with `word_bits` for a page and a number, belong to a PageMailbox, and `last_store` to its DrawStore.
    """
    num_rows = len(row_slots)
    gather_decode_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        row_slots, page_words, last_store, page_table, token_table, seq_lens, *draws, *out, *row_draws,
        num_rows, dummy_slot, page_table.stride(0), token_table.stride(0), page_words.stride(0),
        PAGE_SIZE=page_size, PAGE_BITS=word_bits[0], NUMBER_BITS=word_bits[1], RING=len(page_words), BLOCK=_BLOCK,
        num_warps=1,
    )  # fmt: skip


def store_draws(
    ids: torch.Tensor,
    values: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    words: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Store `ids[i]`, which row i drew for position `positions[i]` of its slot; on the host it becomes -1 if `values[i]` is not finite.

    `words`, in pinned host memory, and `last` belong to a DrawStore.
    """
    store_draws_kernel[(1,)](
        ids, values, row_slots, positions, token_table, words, last,
        len(row_slots), token_table.stride(0), words.stride(0),
        RING=len(words), BLOCK=_STORE_BLOCK,
    )  # fmt: skip
