"""Paged decode attention in which every program reads the same number of positions, however long the rows are.

`decode_attention` assigns a row, or a fixed share of it, to a program. If lengths differ, the last programs run alone, far below the
memory's speed. Here the rows' blocks of positions form one sequence, and each of the programs that run at once gets nearly the same
number of blocks: the end of one row, some whole rows, and the beginning of another. If a row is cut, each part writes a partial result,
and the program that finishes last merges them. The cuts are computed on the device once per step, so a captured step serves any lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.decode_attention import LONG_PIPELINE_BYTES, NO_WINDOW, PROGRAMS_PER_PROCESSOR
from srt.kernels.attention.paged_kv import PagedKV, check_queries
from srt.kernels.build.jit import block_dim, dot_dtype, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

BLOCK_N: Final = 64  # positions
WINDOW_UNIT: Final = 16  # multiple to which the number of positions before a window that are left out is rounded down
MOST_ROWS: Final = 512
MOST_SHARES: Final = 256
NUM_WARPS: Final = 2
NUM_STAGES: Final = 3
SHARES_AT_ONCE: Final = 32  # shares that are computed in parallel; with hundreds of rows more would spill registers
LEAST_ROWS_AT_ONCE: Final = 32
LEAST_WORK: Final = 4  # smallest work of a program, in blocks: a smaller share costs more to merge than it saves


@dataclass(frozen=True, slots=True)
class EvenShares:
    """The blocks that each program reads in a step, and the partial results of programs. All layers share this memory, because
    launches on one stream do not overlap."""

    begins: (
        torch.Tensor
    )  # int32 [shares + 1]: the block where each share begins; for empty shares the number of all blocks
    first_rows: torch.Tensor  # int32 [shares]: the row of that block
    row_begins: torch.Tensor  # int32 [rows + 1]: the block where each row begins
    row_shares: torch.Tensor  # int32 [rows, 2]: the first and the last share with a part of the row
    partial: torch.Tensor  # float32 [2 * shares, heads, head_dim]: results of a share's first and last part of a row
    lse: torch.Tensor  # float32 [2 * shares, heads]
    arrived: torch.Tensor  # int32 [rows, KV heads], zeros between launches

    @classmethod
    def allocate(
        cls, rows: int, heads: int, kv_heads: int, head_dim: int, shares: int, device: torch.device
    ) -> EvenShares:
        """Allocate memory for up to `rows` rows, and `shares` of each KV head."""

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        tables = integers(shares + 1), integers(shares), integers(rows + 1), integers(rows, 2)
        return cls(*tables, floats(2 * shares, heads, head_dim), floats(2 * shares, heads), integers(rows, kv_heads))

    def beside(self) -> EvenShares:
        """Return tables of their own for layers with another window, with the same memory for results."""
        names = ("begins", "first_rows", "row_begins", "row_shares")
        return replace(self, **{name: torch.zeros_like(getattr(self, name)) for name in names})


def can_be_even(dtype: torch.dtype, head_dim: int, kv_heads: int, num_processors: int, shared: int) -> bool:
    """Return whether enough programs fit on a multiprocessor, as on Hopper. float32 is slower, being multiplied without tensor cores."""
    is_small = dtype is not torch.float32 and head_dim <= 128 and shared >= LONG_PIPELINE_BYTES
    return is_small and 1 <= shares_at_once(kv_heads, num_processors) <= MOST_SHARES


def is_worth_it(num_rows: int, kv_heads: int, num_processors: int) -> bool:
    """Return whether even shares are faster, as measured on an H200: with fewer rows, merging costs more than is gained."""
    return num_rows <= MOST_ROWS and num_rows * kv_heads >= 1.4 * num_processors


def shares_at_once(kv_heads: int, num_processors: int) -> int:
    """Return the number of shares of each KV head: as many as programs run at once."""
    return PROGRAMS_PER_PROCESSOR * num_processors // kv_heads


@kernel(one_variant_for=("seq_lens_ptr", "num_rows", "num_shares", "window"))
def find_shares_kernel(
    seq_lens_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    first_rows_ptr: tl.tensor,
    row_begins_ptr: tl.tensor,
    row_shares_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_shares: tl.tensor,
    window: tl.tensor,
    LEAST_WORK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW_UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Compute the shares in one program. Rows of length 0 are not assigned to any program."""
    rows = tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    lengths = tl.load(seq_lens_ptr + rows, mask=inside, other=0).to(tl.int32)
    lengths -= tl.maximum(lengths - window, 0) // WINDOW_UNIT * WINDOW_UNIT
    blocks = tl.cdiv(lengths, BLOCK_N)
    row_ends = tl.cumsum(blocks, 0)
    row_begins = row_ends - blocks
    tl.store(row_begins_ptr + rows, row_begins, mask=inside)
    tl.store(row_begins_ptr + num_rows, tl.sum(blocks, 0))

    # Work is counted in blocks. Beginning a row counts as one more.
    work_each = blocks + (blocks > 0).to(tl.int32)
    work_ends = tl.cumsum(work_each, 0)
    work = tl.max(work_ends, 0)
    num_live = tl.maximum(tl.minimum(num_shares, tl.cdiv(work, LEAST_WORK)), 1)
    num_begun = tl.zeros([BLOCK_R], tl.int32)
    num_begun_within = tl.zeros([BLOCK_R], tl.int32)
    for first in range(0, num_shares + 1, BLOCK_S):
        shares = first + tl.arange(0, BLOCK_S)
        before = tl.minimum(shares, num_live) * work // num_live
        is_done = (work_ends[None, :] <= before[:, None]) & inside[None, :]
        first_rows = tl.sum(is_done.to(tl.int32), 1)
        is_here = rows[None, :] == first_rows[:, None]
        row_begin = tl.sum(tl.where(is_here, row_begins[None, :], 0), 1)
        work_begin = tl.sum(tl.where(is_here, (work_ends - work_each)[None, :], 0), 1)
        begins = row_begin + tl.maximum(before - work_begin - 1, 0)
        begins = tl.where(shares < num_live, begins, tl.sum(blocks, 0))
        tl.store(begins_ptr + shares, begins, mask=shares <= num_shares)
        tl.store(first_rows_ptr + shares, first_rows, mask=shares < num_shares)
        is_live = (shares < num_live)[:, None]
        num_begun += tl.sum((is_live & (begins[:, None] <= row_begins[None, :])).to(tl.int32), 0)
        num_begun_within += tl.sum((is_live & (begins[:, None] < row_ends[None, :])).to(tl.int32), 0)
    tl.store(row_shares_ptr + 2 * rows, num_begun - 1, mask=inside)
    tl.store(row_shares_ptr + 2 * rows + 1, num_begun_within - 1, mask=inside)


@kernel(one_variant_for=("req_pool_indices_ptr", "seq_lens_ptr"))
def even_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    begins_ptr: tl.tensor,  # this and the next six belong to an EvenShares
    first_rows_ptr: tl.tensor,
    row_begins_ptr: tl.tensor,
    row_shares_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: float,  # softmax scale times the keys' scale times log2(e), so that weights are powers of two
    v_scale: float,
    q_row_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    out_row_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (KV head, share)."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)  # first, so that a token's heads, which lie side by side, are read at the same time
    share = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    share_begin = tl.load(begins_ptr + share)
    share_end = tl.load(begins_ptr + share + 1)
    if share_begin >= share_end:
        return  # without waiting; the first share is never empty, and waits
    row = tl.load(first_rows_ptr + share)

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    head_mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    kv_offsets = kv_head * HEAD_DIM + dims[None, :]
    wait_for_inputs(PDL)

    part_begin = share_begin
    while part_begin < share_end:
        row_begin = tl.load(row_begins_ptr + row)
        row_end = tl.load(row_begins_ptr + row + 1)
        part_end = tl.minimum(row_end, share_end)
        seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
        slot = tl.load(req_pool_indices_ptr + row).to(tl.int64)
        pages_ptr = page_table_ptr + slot * page_table_stride
        q = tl.load(q_ptr + row.to(tl.int64) * q_row_stride + head_offsets, mask=head_mask, other=0.0).to(DOT_DTYPE)
        begin = (part_begin - row_begin) * BLOCK_N
        end = tl.minimum((part_end - row_begin) * BLOCK_N, seq_len)

        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for block in range(begin, end, BLOCK_N):
            positions = block + columns
            live = positions < end
            pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
            locations = pages * PAGE_SIZE + positions % PAGE_SIZE
            kv_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + locations[:, None] * k_location_stride + kv_offsets, mask=kv_mask, other=0.0)
            v = tl.load(v_ptr + locations[:, None] * v_location_stride + kv_offsets, mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: every block has a live position
            weights = tl.exp2(scores - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), input_precision="ieee")
            peak = new_peak

        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        is_whole = (part_begin == row_begin) & (part_end == row_end)
        if not is_whole:
            # The row's first share stores its part as its last one, unless it has only one part. Other shares store theirs as their first.
            first_share = tl.load(row_shares_ptr + 2 * row)
            last_share = tl.load(row_shares_ptr + 2 * row + 1)
            place = 2 * share + (part_begin > share_begin).to(tl.int32)
            head_places = kv_head * GROUP + heads
            tl.store(lse_ptr + place * num_heads + head_places, peak + tl.log2(total), mask=heads < GROUP)
            tl.store(partial_ptr + place * num_heads * HEAD_DIM + head_offsets, attended, mask=head_mask)
            tl.debug_barrier()  # all threads have stored their results before the program counts as arrived
            counter_ptr = arrived_ptr + row * tl.num_programs(0) + kv_head
            is_whole = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == last_share - first_share
            if is_whole:
                tl.store(counter_ptr, 0)
                peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_G], tl.float32)
                acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                begins_inside = row_begin > tl.load(begins_ptr + first_share)
                for other in range(first_share, last_share + 1):
                    other_place = (2 * other + (begins_inside & (other == first_share)).to(tl.int32)) * num_heads
                    # Read past the L1 cache (.cg), which may hold old values.
                    lse = tl.load(
                        lse_ptr + other_place + head_places, mask=heads < GROUP, other=0.0, cache_modifier=".cg"
                    )
                    part = tl.load(
                        partial_ptr + other_place * HEAD_DIM + head_offsets,
                        mask=head_mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_peak = tl.maximum(peak, lse)
                    shrink, weight = tl.exp2(peak - new_peak), tl.exp2(lse - new_peak)
                    total = total * shrink + weight
                    acc = acc * shrink[:, None] + part * weight[:, None]
                    peak = new_peak
                attended = acc / total[:, None]
        if is_whole:
            out_offsets = row.to(tl.int64) * out_row_stride + head_offsets
            tl.store(out_ptr + out_offsets, (attended * v_scale).to(out_ptr.dtype.element_ty), mask=head_mask)
        part_begin = part_end
        row += 1
    let_next_start_late(PDL)


def find_shares(seq_lens: torch.Tensor, shares: EvenShares, window: int | None = None) -> None:
    """Assign the blocks of rows of these lengths to programs, before the first layer of a step.

    With a window the blocks are those of the positions that it shows; a multiple of `WINDOW_UNIT` before them is left out.
    """
    num_rows, num_shares = len(seq_lens), len(shares.first_rows)
    assert num_rows < len(shares.row_begins), num_rows
    find_shares_kernel[(1,)](
        seq_lens, shares.begins, shares.first_rows, shares.row_begins, shares.row_shares, num_rows, num_shares,
        NO_WINDOW if window is None else window, LEAST_WORK=LEAST_WORK, BLOCK_N=BLOCK_N, WINDOW_UNIT=WINDOW_UNIT,
        BLOCK_R=max(triton.next_power_of_2(num_rows), LEAST_ROWS_AT_ONCE), BLOCK_S=SHARES_AT_ONCE, num_warps=8,
    )  # fmt: skip


def even_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    shares: EvenShares,
    pdl: int = 0,
) -> None:
    """Compute `decode_attention` for rows whose shares were found.

    Results of rows of length 0 may stay unwritten. With `pdl` the next kernel may start early, and this one too; then some row must be
    longer than 0.
    """
    num_rows, _, head_dim = q.shape
    group = check_queries(q, out, kv)
    assert num_rows < len(shares.row_begins), num_rows
    even_attention_kernel[(kv.num_kv_heads, len(shares.first_rows))](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, seq_lens,
        shares.begins, shares.first_rows, shares.row_begins, shares.row_shares, shares.partial, shares.lse, shares.arrived, out,
        scale * kv.k_scale * math.log2(math.e), kv.v_scale,
        q.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0), out.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_G=block_dim(group), BLOCK_D=block_dim(head_dim), BLOCK_N=BLOCK_N,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES, **pdl_options(pdl),
    )  # fmt: skip
