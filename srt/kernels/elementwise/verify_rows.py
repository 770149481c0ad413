"""Gather the inputs of a step that verifies drafts from the tables on the device, and keep its draws that count."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

_BLOCK: Final = 32
_SLOTS: Final = tl.constexpr(0)  # rows of the staged numbers: those of tokens, then those of the step's rows
_OFFSETS: Final = tl.constexpr(1)
_ROW_SLOTS: Final = tl.constexpr(4)
_ROW_LENS: Final = tl.constexpr(5)
_ROW_FIRSTS: Final = tl.constexpr(6)


@kernel(
    one_variant_for=(
        "staged_ptr", "page_tables_ptr", "token_table_ptr", "seq_lens_ptr", "temperatures_ptr", "seeds_ptr", "top_ks_ptr",
        "top_ps_ptr", "min_ps_ptr", "ids_ptr", "positions_ptr", "token_lens_ptr", "locations_ptr", "prefix_lens_ptr",
        "token_temperatures_ptr", "token_seeds_ptr", "token_top_ks_ptr", "token_top_ps_ptr", "token_min_ps_ptr",
        "num_tokens", "staged_stride", "group_stride", "page_table_stride", "token_table_stride", "locations_stride",
    )
)  # fmt: skip
def gather_tokens_kernel(
    staged_ptr: tl.tensor,  # [7, tokens] int64
    page_tables_ptr: tl.tensor,  # [GROUPS, slots, pages] int32
    token_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_lens_ptr: tl.tensor,
    locations_ptr: tl.tensor,  # [GROUPS, tokens] int64
    prefix_lens_ptr: tl.tensor,
    token_temperatures_ptr: tl.tensor,
    token_seeds_ptr: tl.tensor,
    token_top_ks_ptr: tl.tensor,
    token_top_ps_ptr: tl.tensor,
    token_min_ps_ptr: tl.tensor,
    num_tokens: tl.tensor,
    staged_stride: tl.tensor,
    group_stride: tl.tensor,
    page_table_stride: tl.tensor,
    token_table_stride: tl.tensor,
    locations_stride: tl.tensor,
    GROUPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program b gathers what a block of tokens needs, and how long as many rows are before the step."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    slots = tl.load(staged_ptr + _SLOTS * staged_stride + tokens, mask=inside, other=0)
    offsets = tl.load(staged_ptr + _OFFSETS * staged_stride + tokens, mask=inside, other=0)
    row_slots = tl.load(staged_ptr + _ROW_SLOTS * staged_stride + tokens, mask=inside, other=0)
    positions = tl.load(seq_lens_ptr + slots, mask=inside, other=0) + offsets
    prefix_lens = tl.load(seq_lens_ptr + row_slots, mask=inside, other=0)
    temperatures = tl.load(temperatures_ptr + slots, mask=inside, other=0.0)
    seeds = tl.load(seeds_ptr + slots, mask=inside, other=0)
    top_ks = tl.load(top_ks_ptr + slots, mask=inside, other=0)
    top_ps = tl.load(top_ps_ptr + slots, mask=inside, other=0.0)
    min_ps = tl.load(min_ps_ptr + slots, mask=inside, other=0.0)
    ids = tl.load(token_table_ptr + slots * token_table_stride + positions, mask=inside, other=0)
    tl.store(ids_ptr + tokens, ids.to(tl.int64), mask=inside)
    tl.store(positions_ptr + tokens, positions, mask=inside)
    tl.store(token_lens_ptr + tokens, positions + 1, mask=inside)
    tl.store(prefix_lens_ptr + tokens, prefix_lens, mask=inside)
    tl.store(token_temperatures_ptr + tokens, temperatures, mask=inside)
    tl.store(token_seeds_ptr + tokens, seeds, mask=inside)
    tl.store(token_top_ks_ptr + tokens, top_ks, mask=inside)
    tl.store(token_top_ps_ptr + tokens, top_ps, mask=inside)
    tl.store(token_min_ps_ptr + tokens, min_ps, mask=inside)
    pages_ptr = page_tables_ptr + slots * page_table_stride + positions // PAGE_SIZE
    for group in tl.static_range(GROUPS):
        pages = tl.load(pages_ptr + group * group_stride, mask=inside, other=0).to(tl.int64)
        locations = pages * PAGE_SIZE + positions % PAGE_SIZE
        tl.store(locations_ptr + group * locations_stride + tokens, locations, mask=inside)


@kernel(
    one_variant_for=(
        "staged_ptr", "ids_ptr", "values_ptr", "token_table_ptr", "seq_lens_ptr", "outcome_ptr",
        "num_tokens", "dummy_slot", "staged_stride", "token_table_stride",
    )
)  # fmt: skip
def accept_draws_kernel(
    staged_ptr: tl.tensor,  # [7, tokens] int64
    ids_ptr: tl.tensor,  # [tokens] int64
    values_ptr: tl.tensor,  # [tokens] float32: the winning values; the draw is void if one is not finite
    token_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    outcome_ptr: tl.tensor,
    num_tokens: tl.tensor,
    dummy_slot: tl.tensor,
    staged_stride: tl.tensor,
    token_table_stride: tl.tensor,
    BLOCK: tl.constexpr,  # a power of two, at least the tokens of a row
) -> None:
    """Program r keeps the draws of row r up to the first that differs from the draft behind its token, that one included."""
    row = tl.program_id(0)
    slot = tl.load(staged_ptr + _ROW_SLOTS * staged_stride + row)
    count = tl.load(staged_ptr + _ROW_LENS * staged_stride + row)
    first = tl.load(staged_ptr + _ROW_FIRSTS * staged_stride + row)
    length = tl.load(seq_lens_ptr + slot)
    offsets = tl.arange(0, BLOCK)
    tokens = first + offsets
    inside = (offsets < count) & (tokens < num_tokens)
    ids = tl.load(ids_ptr + tokens, mask=inside, other=0)
    is_finite = tl.abs(tl.load(values_ptr + tokens, mask=inside, other=0.0)) < float("inf")
    targets = token_table_ptr + slot * token_table_stride + length + 1 + offsets
    has_draft = inside & (offsets < count - 1)
    drafted = tl.load(targets, mask=has_draft, other=-1).to(tl.int64)
    breaks = ((drafted != ids) | (is_finite == 0)).to(tl.int32)
    is_open = inside & (tl.cumsum(breaks, 0) == breaks)
    most = tl.where(slot != dummy_slot, count, 0)
    is_kept = is_open & (is_finite | (offsets == 0)) & (offsets < most)
    tl.store(targets, ids.to(tl.int32), mask=is_kept)
    tl.store(outcome_ptr + tokens, tl.where(is_open & is_finite, ids, -1), mask=inside)
    tl.debug_barrier()  # all threads have read the length
    if slot != dummy_slot:
        tl.store(seq_lens_ptr + slot, length + tl.sum(is_kept.to(tl.int64), 0))


def gather_tokens(
    staged: torch.Tensor,
    page_tables: torch.Tensor,
    token_table: torch.Tensor,
    seq_lens: torch.Tensor,
    draws: tuple[torch.Tensor, ...],
    page_size: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    token_draws: tuple[torch.Tensor, ...],
) -> None:
    """Gather the inputs of tokens, as many as `out` has room for: ids, positions, lengths, locations by page group, lengths of rows before.

    `staged` are the numbers of a VerifyRunner. `token_draws` get the sampling parameters of each token's slot.
    """
    ids, positions, lens, locations, prefix_lens = out
    num_tokens = len(ids)
    gather_tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        staged, page_tables, token_table, seq_lens, *draws, ids, positions, lens, locations, prefix_lens, *token_draws,
        num_tokens, staged.stride(0), page_tables.stride(0), page_tables.stride(1), token_table.stride(0), locations.stride(0),
        GROUPS=len(page_tables), PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip


def accept_draws(
    staged: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    token_table: torch.Tensor,
    seq_lens: torch.Tensor,
    dummy_slot: int,
    most_of_row: int,
    outcome: torch.Tensor,
) -> None:
    """Keep each row's draws that count: write them behind its last known token, make the row as much longer, and tell `outcome`.

    A row has up to `most_of_row` tokens. `outcome` gets the draw of each token if it counts and is finite, else -1.
    """
    accept_draws_kernel[(len(ids),)](
        staged, ids, values, token_table, seq_lens, outcome,
        len(ids), dummy_slot, staged.stride(0), token_table.stride(0),
        BLOCK=triton.next_power_of_2(most_of_row), num_warps=1,
    )  # fmt: skip
