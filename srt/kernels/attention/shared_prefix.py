"""Decode attention over the common prefix of several rows: its pages are read once for all of them.

Consecutive rows form a block, as many as one product takes. In each step the device finds the pages that the rows of a block share with
its first row, so nobody has to say which rows came from which prefix. `decode_attention` computes the rest of each row and merges the
result found here. If nothing is shared, the programs end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV, check_heads
from srt.kernels.build.jit import block_dim, dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs

MOST_PAIRS: Final = 128  # pairs of row and query head in a product
MOST_BLOCK_ROWS: Final = 16
PAGES_AT_ONCE: Final = 256  # pages compared per step of the search
BLOCK_N: Final = 64  # positions per inner step
MOST_SPLITS: Final = 16
MOST_HEAD_DIM: Final = 128  # with larger heads a block does not fit in the shared memory of every GPU


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Lengths of shared prefixes, and their results in a layer. All layers use the same memory, as launches on a stream do not overlap."""

    lens: torch.Tensor  # [rows] int32: number of first positions that the row shares; 0: none
    partial: torch.Tensor  # float32: [rows, heads, splits, head_dim], the weighted means of their values
    lse: torch.Tensor  # float32: [rows, heads, splits], log2 of the sums of weights
    num_splits: int

    @classmethod
    def allocate(
        cls, rows: int, heads: int, kv_heads: int, head_dim: int, num_processors: int, device: torch.device
    ) -> SharedPrefix:
        """Allocate memory for up to `rows` rows."""
        pairs = max(rows * heads, programs_at_once(heads // kv_heads, num_processors) * MOST_PAIRS)
        return cls(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.empty(pairs * head_dim, dtype=torch.float32, device=device),
            torch.empty(pairs, dtype=torch.float32, device=device),
            1,
        )

    def of(self, rows: int, group: int, kv_heads: int, num_processors: int) -> SharedPrefix:
        """Return the same memory for a step of `rows` rows, with enough splits to give all multiprocessors work."""
        blocks = -(-rows // block_rows(group))
        wanted = programs_at_once(group, num_processors) // (blocks * kv_heads)
        return replace(self, lens=self.lens[:rows], num_splits=max(1, min(MOST_SPLITS, wanted)))


def can_share(dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Return whether prefixes can be shared. float32 is multiplied without tensor cores, so many queries at once gain nothing."""
    return dtype is not torch.float32 and head_dim <= MOST_HEAD_DIM and block_rows(group) > 1


def block_rows(group: int) -> int:
    """Return the rows of a block, a power of two, if `group` query heads share a KV head."""
    return min(MOST_BLOCK_ROWS, 1 << max(MOST_PAIRS // group, 1).bit_length() - 1)


def programs_at_once(group: int, num_processors: int) -> int:
    """Return the programs that run at once: two per multiprocessor, one if blocks are large (measured on an H200)."""
    return num_processors * (2 if block_rows(group) * group <= MOST_PAIRS // 2 else 1)


@kernel(one_variant_for=("row_slots_ptr", "seq_lens_ptr", "num_rows", "page_table_stride", "least_saved"))
def find_shared_kernel(
    row_slots_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    page_table_stride: tl.tensor,
    least_saved: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block of rows): find the equal first pages. Never counts all pages of a row, so that it keeps positions of its own."""
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < num_rows
    columns = tl.arange(0, BLOCK)
    slots = tl.load(row_slots_ptr + rows, mask=inside, other=0).to(tl.int64)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=inside, other=0).to(tl.int32)
    leaders_ptr = page_table_ptr + tl.load(row_slots_ptr + first_row).to(tl.int64) * page_table_stride
    leader_len = tl.load(seq_lens_ptr + first_row).to(tl.int32)
    limits = tl.maximum(tl.minimum(seq_lens, leader_len) - 1, 0) // PAGE_SIZE
    common = limits
    begin = 0
    going = tl.max(tl.where(rows > first_row, limits, 0), 0)  # until the last of the others differs
    while begin < going:
        pages = begin + columns
        mine = tl.load(
            page_table_ptr + slots[:, None] * page_table_stride + pages[None, :],
            mask=pages[None, :] < limits[:, None],
            other=0,
        )
        leaders = tl.load(leaders_ptr + pages, mask=pages < going, other=0)
        differs = (mine != leaders[None, :]) & (pages[None, :] < limits[:, None])
        common = tl.minimum(common, tl.min(tl.where(differs, pages[None, :], 1 << 30), 1))
        begin += BLOCK
        going = tl.max(tl.where((rows > first_row) & (common >= begin), common, 0), 0)
    sharers = tl.sum((common[None, :] >= common[:, None]).to(tl.int32), 1)
    saved = common * (sharers - 1) * PAGE_SIZE
    most_saved = tl.max(saved, 0)
    shared = tl.max(tl.where(saved == most_saved, common, 0), 0)
    is_sharing = (common >= shared) & (most_saved >= least_saved)
    tl.store(shared_lens_ptr + rows, tl.where(is_sharing, shared * PAGE_SIZE, 0), mask=inside)


@jit
def tokens_per_shared_split(shared: tl.tensor, num_splits: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Return the positions per split of a shared prefix: a multiple of BLOCK_N."""
    return tl.cdiv(tl.cdiv(shared, num_splits), BLOCK_N) * BLOCK_N


@kernel(one_variant_for=("req_pool_indices_ptr", "num_rows"))
def shared_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_log2: float,
    num_rows: tl.tensor,
    q_row_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (KV head, split, block of rows): processes the queries of all rows of the block together."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    first_row = tl.program_id(2) * ROWS
    num_splits = tl.num_programs(1)
    rows = first_row + tl.arange(0, ROWS)
    shared = tl.max(tl.load(shared_lens_ptr + rows, mask=rows < num_rows, other=0), 0)
    split_tokens = tokens_per_shared_split(shared, num_splits, BLOCK_N)
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, shared)
    if (begin >= end) & (kv_head + split + first_row > 0):
        return
    wait_for_inputs(PDL)  # the first program waits even if it has no work
    if begin >= end:
        return

    pairs = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    row = first_row + pairs // GROUP
    head = kv_head * GROUP + pairs % GROUP
    is_pair = (pairs < ROWS * GROUP) & (row < num_rows)
    mask = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = row.to(tl.int64)[:, None] * q_row_stride + head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)
    slot = tl.load(req_pool_indices_ptr + first_row).to(tl.int64)
    pages_ptr = page_table_ptr + slot * page_table_stride

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(begin, end, BLOCK_N):
        positions = block + columns
        live = positions < end
        pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        locations = pages * PAGE_SIZE + positions % PAGE_SIZE
        kv_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        kv_offsets = kv_head * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + locations[:, None] * k_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
        v = tl.load(v_ptr + locations[:, None] * v_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        peak = new_peak

    num_heads = tl.num_programs(0) * GROUP
    slots = (row.to(tl.int64) * num_heads + head) * num_splits + split
    means = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(lse_ptr + slots, peak + tl.log2(total), mask=is_pair)
    tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], means, mask=mask)


def find_shared(
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    group: int,
    least_saved: int,
    out: torch.Tensor,
) -> None:
    """Write to `out` [rows] how many first positions each row shares with its block; 0 if that saves a block less than `least_saved` reads.

    `seq_lens` include the new position.
    """
    num_rows, rows = len(row_slots), block_rows(group)
    find_shared_kernel[(triton.cdiv(num_rows, rows),)](
        row_slots, seq_lens, page_table, out, num_rows, page_table.stride(0), least_saved,
        PAGE_SIZE=page_size, ROWS=rows, BLOCK=PAGES_AT_ONCE,
    )  # fmt: skip


def shared_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    scale: float,
    shared: SharedPrefix,
    pdl: bool = False,
) -> None:
    """Compute the results of the prefixes in `shared.lens`, and store them in `shared` for `decode_attention`."""
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // kv.num_kv_heads
    rows = block_rows(group)
    pairs = block_dim(rows * group)
    check_heads(q, num_heads, head_dim)
    assert shared.lens.numel() >= num_rows, shared.lens.numel()
    assert shared.partial.numel() >= num_rows * num_heads * shared.num_splits * head_dim, shared.partial.numel()
    shared_attention_kernel[(kv.num_kv_heads, shared.num_splits, triton.cdiv(num_rows, rows))](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, shared.lens, shared.partial, shared.lse,
        scale * kv.k_scale * math.log2(math.e), num_rows,
        q.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, DOT_DTYPE=dot_dtype(q.dtype), ROWS=rows,
        BLOCK_M=pairs, BLOCK_D=block_dim(head_dim), BLOCK_N=BLOCK_N,
        num_warps=8 if pairs > 64 else 4, num_stages=3, **pdl_options(pdl),
    )  # fmt: skip
