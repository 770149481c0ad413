"""Paged decode attention: one query per row. The row's keys and values are cut into splits, which are processed in parallel.

There is a program for each (row, KV head, split), which reads its part of the KV memory once for all query heads of its group. If a row
has several splits, each program writes a partial result, and the program that finishes last merges them. Everything that depends on
lengths is read on the device, so the launch depends only on the number of rows and can be captured in a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV, check_queries
from srt.kernels.attention.shared_prefix import BLOCK_N as SHARED_BLOCK_N
from srt.kernels.attention.shared_prefix import SharedPrefix, tokens_per_shared_split
from srt.kernels.attention.soft_cap import soft_cap
from srt.kernels.build.jit import block_dim, dot_dtype, jit, kernel
from srt.kernels.build.pdl import EARLY, let_next_start, let_next_start_late, pdl_options, prefetch, wait_for_inputs

MAX_SPLITS: Final = 32  # a power of two
MIN_SPLIT_TOKENS: Final = 64  # a shorter split costs more to merge than it saves
PROGRAMS_PER_PROCESSOR: Final = 4  # programs with a short pipeline that run on a multiprocessor at once
NO_WINDOW: Final = 1 << 30
LONG_PIPELINE_BYTES: Final = 216_576  # shared memory of three programs with five stages, for heads of 128 in two bytes


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The split of decode attention over programs. A row uses only as many of the `num_splits` as `min_split_tokens` lets it fill."""

    num_splits: int  # at most MAX_SPLITS
    min_split_tokens: int = MIN_SPLIT_TOKENS
    block_n: int = 64  # KV positions per inner step
    num_warps: int = 2
    num_stages: int = 3

    @classmethod
    def choose(
        cls, dtype: torch.dtype, head_dim: int, num_programs: int, max_context: int, num_processors: int, shared: int
    ) -> DecodeTiles:
        """Return the tiles for this number of pairs of row and KV head; `num_processors` have `shared` bytes of memory each.

        Measured on an H200 with rows of equal and of mixed lengths: long pipelines, three to a multiprocessor, are mostly the
        fastest, and by far if one more short pipeline would begin a turn of its own. float32 is multiplied without tensor cores, where
        larger blocks spill and take seconds to compile.
        """
        most = most_splits(num_programs, max_context, num_processors)
        if dtype is torch.float32:
            return cls(most, block_n=32, num_warps=4)
        if head_dim > 128 and num_programs <= num_processors // 4:
            return cls(most, min_split_tokens=32, block_n=32, num_warps=4)
        if head_dim > 128 or shared < LONG_PIPELINE_BYTES:
            return cls(most)
        if 0.8 <= num_programs / (PROGRAMS_PER_PROCESSOR * num_processors) <= 1.0:
            return cls(1, num_warps=4)
        at_once = 3 * num_processors - 1
        wanted = max(1, num_processors // num_programs, min(at_once // num_programs, 8))
        return cls(min(wanted, most), num_stages=5)

    def fill(self, num_programs: int, num_processors: int) -> bool:
        """Return whether the programs fill the device with this number of pairs of row and KV head.

        If they do not, they must start on an empty device to be placed evenly.
        """
        at_once = 3 if self.num_stages > 3 else PROGRAMS_PER_PROCESSOR
        return num_programs * self.num_splits >= 0.9 * at_once * num_processors


def most_splits(num_programs: int, max_context: int, num_processors: int) -> int:
    """Return the splits per (row, KV head): as many as run at once, but no more than the longest context can use.

    Depends on the batch's size alone, so that a captured graph serves every step of that size.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // num_programs
    return max(1, min(wanted, -(-max_context // MIN_SPLIT_TOKENS), MAX_SPLITS))


PREFETCHED = tl.constexpr(256)  # positions that a program prefetches before it may read its query


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Memory shared by the programs of a row: partial results, and a count of those present, which is 0 between launches.

    All layers share it, because launches on one stream do not overlap.
    """

    partial: torch.Tensor  # float32, for num_rows * num_heads * num_splits * head_dim elements
    lse: torch.Tensor  # float32, for num_rows * num_heads * num_splits
    arrived: torch.Tensor  # int32 zeros, for num_rows * num_kv_heads

    @classmethod
    def allocate(
        cls, rows: int, heads: int, kv_heads: int, splits: int, head_dim: int, device: torch.device
    ) -> DecodeScratch:
        """Allocate scratch memory for rows and splits up to these numbers."""
        return cls(
            torch.empty(rows * heads * splits * head_dim, dtype=torch.float32, device=device),
            torch.empty(rows * heads * splits, dtype=torch.float32, device=device),
            torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


@jit
def tokens_per_split(
    seq_len: tl.tensor, num_splits: tl.tensor, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Return the positions per split: a multiple of BLOCK_N that depends on the row's own length alone.

    More than 16 splits pay only if they are long, because merging each takes time.
    """
    worth_splitting = tl.maximum(tl.minimum(tl.cdiv(seq_len, 16), 4 * MIN_SPLIT), MIN_SPLIT)
    return tl.cdiv(tl.maximum(tl.cdiv(seq_len, num_splits), worth_splitting), BLOCK_N) * BLOCK_N


@jit
def merge_splits(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_head: tl.tensor,
    num_splits: tl.tensor,
    num_live: tl.tensor,
    v_scale: float,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGED: tl.constexpr = 32,
) -> None:
    """Merge the splits of all heads of a group, weighting each by its share: MERGED results of a head and a split at a time."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: tl.constexpr = min(BLOCK_S, max(1, MERGED // HEADS))
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, BLOCK_S)
    # Read past the L1 cache (.cg), which may hold old values.
    slots = first_head + heads[None, :] * num_splits + splits[:, None]
    is_live = (splits < num_live)[:, None] & (heads < GROUP)[None, :]
    peak = tl.max(tl.load(lse_ptr + slots, mask=is_live, other=float("-inf"), cache_modifier=".cg"), 0)
    peak = tl.where(heads < GROUP, peak, 0.0)
    total = tl.zeros([HEADS], tl.float32)
    merged = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for begin in range(0, num_live, SPLITS):
        some = begin + tl.arange(0, SPLITS)
        some_slots = first_head + heads[None, :] * num_splits + some[:, None]
        some_live = (some < num_live)[:, None] & (heads < GROUP)[None, :]
        partial = tl.load(
            partial_ptr + some_slots[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=some_live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.load(lse_ptr + some_slots, mask=some_live, other=float("-inf"), cache_modifier=".cg")
        shares = tl.exp2(lse - peak[None, :])
        total += tl.sum(shares, 0)
        merged += tl.sum(partial * shares[:, :, None], 0)
    merged = merged / tl.where(heads < GROUP, total, 1.0)[:, None] * v_scale
    out_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_offsets, merged.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def merge_shared(
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor, partial_ptr: tl.tensor, lse_ptr: tl.tensor, first_slot: tl.tensor,
    shared: tl.tensor, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Merge the result of the row's shared prefix into that of its own positions."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    num_live = tl.cdiv(shared, tokens_per_shared_split(shared, NUM_SPLITS, BLOCK_N))
    for split in range(num_live):
        slots = first_slot + heads * NUM_SPLITS + split
        lse = tl.load(lse_ptr + slots, mask=heads < GROUP, other=float("-inf"))
        means = tl.load(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, lse)
        shrink, share = tl.exp2(peak - new_peak), tl.exp2(lse - new_peak)
        total = total * shrink + share
        acc = acc * shrink[:, None] + means * share[:, None]
        peak = new_peak
    return peak, total, acc


@kernel(one_variant_for=("req_pool_indices_ptr", "seq_lens_ptr", "window"))
def decode_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [rows, heads, splits, HEAD_DIM] float32: each split's own weighted mean of v
    lse_ptr: tl.tensor,  # [rows, heads, splits] float32: log2 of each split's sum of weights
    arrived_ptr: tl.tensor,  # [rows, KV heads] int32
    shared_lens_ptr: tl.tensor,  # this and the next two belong to a SharedPrefix, if there is one
    shared_partial_ptr: tl.tensor,
    shared_lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,  # [heads]
    out_ptr: tl.tensor,
    scale_log2: float,  # softmax scale times the keys' scale times log2(e), so that weights are powers of two
    v_scale: float,
    window: tl.tensor,
    q_row_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    out_row_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,  # a power of two, at least the number of splits
    SHARED_SPLITS: tl.constexpr,  # 0: there is no SharedPrefix
    SHARED_BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: products are not capped
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (KV head, row, split); zeros for a row of length 0."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)  # first, so that a token's heads, which lie side by side, are read at the same time
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    if SHARED_SPLITS > 0:
        first = tl.load(shared_lens_ptr + row)
    split_tokens = tokens_per_split(seq_len - first, num_splits, MIN_SPLIT, BLOCK_N)
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, seq_len)
    if begin >= seq_len and split > 0:
        return  # without waiting, so that the next kernel's programs find room; the row's first split waits
    slot = tl.load(req_pool_indices_ptr + row).to(tl.int64)
    pages_ptr = page_table_ptr + slot * page_table_stride
    if PDL == EARLY:
        # Lengths, tables and the KV of earlier steps can be read before the wait: the embedding, or `copy_received` in a stage behind
        # the first, is launched after everything that writes them, without a dependent launch. So it has ended before a layer starts.
        for block in range(begin, tl.minimum(end, begin + PREFETCHED), BLOCK_N):
            positions = tl.minimum(block + tl.arange(0, BLOCK_N), end - 1)
            pages = tl.load(pages_ptr + positions // PAGE_SIZE).to(tl.int64)
            locations = pages * PAGE_SIZE + positions % PAGE_SIZE
            lines = kv_head * HEAD_DIM + tl.arange(0, 2) * (HEAD_DIM // 2)
            prefetch(k_ptr + locations[:, None] * k_location_stride + lines[None, :])
            prefetch(v_ptr + locations[:, None] * v_location_stride + lines[None, :])
    wait_for_inputs(PDL)

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    head_mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_row_stride + head_offsets, mask=head_mask, other=0.0).to(DOT_DTYPE)

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if HAS_SINKS:
        if split == 0:  # the sink is as a position of its own, whose value is zero
            sinks = tl.load(sinks_ptr + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0)
            peak = sinks.to(tl.float32) * 1.4426950408889634
            total = tl.full([BLOCK_G], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
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
        if SOFTCAP > 0:
            scores = soft_cap(scores, SOFTCAP)
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: every block has a live position
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        peak = new_peak

    let_next_start_late(PDL)
    num_heads = tl.num_programs(0) * GROUP
    first_head = row.to(tl.int64) * num_heads + kv_head * GROUP
    if SHARED_SPLITS > 0:
        if (split == 0) & (first > 0):
            peak, total, acc = merge_shared(
                peak, total, acc, shared_partial_ptr, shared_lse_ptr, first_head * SHARED_SPLITS, first,
                GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, SHARED_BLOCK_N, SHARED_SPLITS,
            )  # fmt: skip

    attended = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = row.to(tl.int64) * out_row_stride + head_offsets
    num_live = tl.cdiv(seq_len - first, split_tokens)
    if num_live <= 1:
        tl.store(out_ptr + out_offsets, (attended * v_scale).to(out_ptr.dtype.element_ty), mask=head_mask)
        return

    first_slot = first_head * num_splits
    slots = first_slot + heads * num_splits + split
    tl.store(lse_ptr + slots, peak + tl.log2(total), mask=heads < GROUP)
    tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], attended, mask=head_mask)
    tl.debug_barrier()  # all threads have stored their results before the program counts as arrived
    counter_ptr = arrived_ptr + row * tl.num_programs(0) + kv_head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") != num_live - 1:
        return
    tl.store(counter_ptr, 0)
    merge_splits(
        partial_ptr, lse_ptr, out_ptr + row.to(tl.int64) * out_row_stride + kv_head * GROUP * HEAD_DIM,
        first_slot, num_splits, num_live, v_scale, GROUP, HEAD_DIM, BLOCK_D, BLOCK_S,
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: DecodeTiles,
    scratch: DecodeScratch,
    window: int | None = None,
    pdl: int = 0,
    shared: SharedPrefix | None = None,
    softcap: float | None = None,
    starts_early: bool = True,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend with one query per row ([rows, heads, head_dim]) to the row's first `seq_lens` positions, or the last `window` of
    them, and write the result to `out`.

    A row of length 0 gets zeros. Positions past a row's length are never read. With `shared`, which `shared_attention` has filled, a row's
    own positions begin after its shared prefix; it excludes a window. A `softcap` c replaces each scaled product s by c * tanh(s / c);
    `sinks` are a score of each head that takes its share of the softmax. Both exclude a shared prefix. With `pdl` the next kernel may
    start early, and this one too if `starts_early`.
    """
    assert shared is None or (window is None and softcap is None and sinks is None)
    num_rows, num_heads, head_dim = q.shape
    group = check_queries(q, out, kv)
    assert 1 <= tiles.num_splits <= MAX_SPLITS, tiles.num_splits
    if num_rows == 0:
        return
    if tiles.num_splits > 1:
        assert scratch.partial.numel() >= num_rows * num_heads * tiles.num_splits * head_dim, scratch.partial.numel()
        assert scratch.arrived.numel() >= num_rows * kv.num_kv_heads, scratch.arrived.numel()
    # Without a shared prefix, other tensors of the same types are passed in its place.
    stand_ins = scratch.arrived, scratch.partial, scratch.lse
    options = pdl_options(pdl) if starts_early else {"PDL": pdl}
    parts_of_shared = stand_ins if shared is None else (shared.lens, shared.partial, shared.lse)
    decode_attention_kernel[(kv.num_kv_heads, num_rows, tiles.num_splits)](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, seq_lens,
        scratch.partial, scratch.lse, scratch.arrived, *parts_of_shared, q if sinks is None else sinks, out,
        scale * kv.k_scale * math.log2(math.e), kv.v_scale, NO_WINDOW if window is None else window,
        q.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0), out.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size,
        MIN_SPLIT=tiles.min_split_tokens, DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_G=block_dim(group), BLOCK_D=block_dim(head_dim), BLOCK_N=tiles.block_n, BLOCK_S=MAX_SPLITS,
        SHARED_SPLITS=0 if shared is None else shared.num_splits, SHARED_BLOCK_N=SHARED_BLOCK_N,
        SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
    )  # fmt: skip
