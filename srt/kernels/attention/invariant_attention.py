"""Paged attention whose result for a token depends, to the bit, on its position and on what its request has stored, and on nothing else.

The positions that a token sees are cut into splits at fixed places. A split is computed from its first position on, in blocks, and the
splits are merged in order. A prompt's token and a decode do the same arithmetic with the same instructions: a tile of a decode is padded
to the 64 rows that Hopper's instruction has. Programs may compute a split each, which the last of them to finish merges, or all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV, check_queries
from srt.kernels.build.jit import block_dim, dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

SPLIT: Final = 512  # positions; a result depends on it
_PROGRAMS_PER_PROCESSOR: Final = 2
_MOST_PARTS_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class InvariantTiles:
    """(Token, head of the group) pairs of a program, and positions at once. Only `positions` is part of the order of sums."""

    pairs: int
    positions: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, dtype: torch.dtype, head_dim: int, pairs: int) -> InvariantTiles:
        """Return the tile for rows of up to this many pairs."""
        if dtype is torch.float32:
            return cls(16, 32, num_warps=4, num_stages=1)
        if head_dim > 128:
            return cls(64, 64, num_warps=4, num_stages=2)
        return cls(128, 64, 8, 5) if pairs > 64 else cls(64, 64, 4, 5)

    @classmethod
    def most_grouped(cls, dtype: torch.dtype) -> int:
        """Return how many query heads may share a KV head."""
        return cls.choose(dtype, 64, 1).pairs


@jit
def _merged(
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    peak_2: tl.tensor,
    total_2: tl.tensor,
    acc_2: tl.tensor,
    scale_log2: float,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge the results of two neighbouring ranges of positions. The later one may have none that the token sees."""
    new_peak = tl.maximum(peak, peak_2)
    shrink = tl.exp2((peak - new_peak) * scale_log2)
    shrink_2 = tl.exp2((peak_2 - new_peak) * scale_log2)
    return new_peak, total * shrink + total_2 * shrink_2, acc * shrink[:, None] + acc_2 * shrink_2[:, None]


@jit
def _with_block(
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    k_ptr: tl.tensor,  # of the KV head
    v_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    block: tl.tensor,
    end: tl.tensor,
    query_positions: tl.tensor,
    scale_log2: float,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    IS_SEEN: tl.constexpr,  # all queries see all positions of the block
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of positions to the sums of a split. What is not masked gets the same bits with a mask."""
    dims = tl.arange(0, BLOCK_D)
    positions = block + tl.arange(0, BLOCK_N)
    if IS_SEEN:
        pages = tl.load(pages_ptr + positions // PAGE_SIZE).to(tl.int64)
    else:
        pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=positions < end, other=0).to(tl.int64)
    locations = pages * PAGE_SIZE + positions % PAGE_SIZE
    k_ptrs = k_ptr + locations[:, None] * k_location_stride + dims[None, :]
    v_ptrs = v_ptr + locations[:, None] * v_location_stride + dims[None, :]
    if IS_SEEN and HEAD_DIM == BLOCK_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        kv_mask = (positions < end)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
    if not IS_SEEN:
        visible = (positions < end)[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    origin = new_peak if IS_SEEN else tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf: nothing seen yet
    weights = tl.exp2(tl.fma(scores, scale_log2, -(origin * scale_log2)[:, None]))
    shrink = tl.exp2((peak - origin) * scale_log2)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@kernel(
    one_variant_for=(
        "slots_ptr",
        "lens_ptr",
        "prefix_lens_ptr",
        "start_locs_ptr",
        "parts_ptr",
        "peaks_ptr",
        "arrivals_ptr",
        "most_splits",
    )
)
def invariant_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lens_ptr: tl.tensor,  # tokens of the row; IS_DECODE: its positions, the new one included
    prefix_lens_ptr: tl.tensor,
    start_locs_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,  # [rows, heads, most_splits, HEAD_DIM] float32
    peaks_ptr: tl.tensor,  # [rows, heads, most_splits, 2] float32: largest score, sum of weights
    arrivals_ptr: tl.tensor,  # [rows, KV heads] int32: programs that have stored their splits; 0 before and after
    most_splits: tl.tensor,
    scale_log2: float,  # softmax scale times log2(e), so that weights are powers of two
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    IS_DECODE: tl.constexpr,
    PARTED: tl.constexpr,  # splits are stored, not merged
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (tile, KV head, row); pair m of a row is token m // GROUP, head m % GROUP of the group.

    With IS_DECODE a row has one tile, and the first index is that of a program which takes each n-th split of n programs.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    if IS_DECODE:
        extend_len = 1
        prefix_len = tl.load(lens_ptr + row).to(tl.int32) - 1
        start = row.to(tl.int64)
        tile = 0
        first_split = tl.program_id(0)
        step = tl.num_programs(0)
        if PARTED and first_split > prefix_len // SPLIT:
            return
    else:
        extend_len = tl.load(lens_ptr + row).to(tl.int32)
        prefix_len = tl.load(prefix_lens_ptr + row).to(tl.int32)
        start = tl.load(start_locs_ptr + row).to(tl.int64)
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the tiles that see the most positions go first
        first_split = 0
        step = 1
        if tile * BLOCK_M >= extend_len * GROUP:
            return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    is_pair = tokens < extend_len
    mask = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + (start + tokens)[:, None] * q_token_stride + head_offsets, mask=mask, other=0.0).to(DOT_DTYPE)
    pages_ptr = page_table_ptr + tl.load(slots_ptr + row).to(tl.int64) * page_table_stride
    query_positions = prefix_len + tokens
    end = prefix_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, extend_len - 1) + 1

    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    seen = (
        (prefix_len + tile * BLOCK_M // GROUP + 1) // BLOCK_N * BLOCK_N
    )  # all queries see the blocks before this position

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if PARTED:
        for split in range(first_split, tl.cdiv(end, SPLIT), step):
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            first = split * SPLIT
            middle = tl.minimum(first + SPLIT, seen)
            for block in range(first, middle, BLOCK_N):
                peak, total, acc = _with_block(
                    peak, total, acc, q, k_ptr, v_ptr, pages_ptr, block, end, query_positions, scale_log2,
                    k_location_stride, v_location_stride, True, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
                )  # fmt: skip
            for block in range(tl.maximum(first, middle), tl.minimum(first + SPLIT, end), BLOCK_N):
                peak, total, acc = _with_block(
                    peak, total, acc, q, k_ptr, v_ptr, pages_ptr, block, end, query_positions, scale_log2,
                    k_location_stride, v_location_stride, False, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
                )  # fmt: skip
            place = (row.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * most_splits + split
            tl.store(parts_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(peaks_ptr + place * 2, peak, mask=is_pair)
            tl.store(peaks_ptr + place * 2 + 1, total, mask=is_pair)
        let_next_start_late(PDL)
        arrivals = arrivals_ptr + row * tl.num_programs(1) + kv_head
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrivals, 1) < tl.minimum(step, tl.cdiv(end, SPLIT)) - 1:
            return
        tl.store(arrivals, 0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(tl.cdiv(end, SPLIT)):
            # Past the first-level cache, which does not see what other multiprocessors store.
            place = (row.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * most_splits + split
            part_ptrs = parts_ptr + place[:, None] * HEAD_DIM + dims[None, :]
            split_acc = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            split_peak = tl.load(peaks_ptr + place * 2, mask=is_pair, other=0.0, cache_modifier=".cg")
            split_total = tl.load(peaks_ptr + place * 2 + 1, mask=is_pair, other=1.0, cache_modifier=".cg")
            peak, total, acc = _merged(peak, total, acc, split_peak, split_total, split_acc, scale_log2)
    else:
        # One loop over all splits: a loop for each would wait for the first loads of each.
        split_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_total = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for block in range(0, seen, BLOCK_N):
            split_peak, split_total, split_acc = _with_block(
                split_peak, split_total, split_acc, q, k_ptr, v_ptr, pages_ptr, block, end, query_positions, scale_log2,
                k_location_stride, v_location_stride, True, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
            if ((block + BLOCK_N) % SPLIT == 0) & (block + BLOCK_N < end):
                peak, total, acc = _merged(peak, total, acc, split_peak, split_total, split_acc, scale_log2)
                split_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                split_total = tl.zeros([BLOCK_M], tl.float32)
                split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for block in range(seen, end, BLOCK_N):
            split_peak, split_total, split_acc = _with_block(
                split_peak, split_total, split_acc, q, k_ptr, v_ptr, pages_ptr, block, end, query_positions, scale_log2,
                k_location_stride, v_location_stride, False, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
            if ((block + BLOCK_N) % SPLIT == 0) & (block + BLOCK_N < end):
                peak, total, acc = _merged(peak, total, acc, split_peak, split_total, split_acc, scale_log2)
                split_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                split_total = tl.zeros([BLOCK_M], tl.float32)
                split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        let_next_start_late(PDL)
        peak, total, acc = _merged(peak, total, acc, split_peak, split_total, split_acc, scale_log2)
    out_offsets = (start + tokens)[:, None] * out_token_stride + head_offsets
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def attend_chunks(
    q: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    start_locs: torch.Tensor,
    max_extend_len: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend with the queries ``q[start_locs[r] :][: extend_lens[r]]`` of each row r, at positions from `prefix_lens[r]` on, into `out`.

    All keys and values, those of the chunks included, are read from the memory.
    """
    num_rows, group = len(slots), check_queries(q, out, kv)
    if num_rows == 0 or max_extend_len == 0:
        return
    tiles = InvariantTiles.choose(q.dtype, kv.head_dim, max_extend_len * group)
    grid = triton.cdiv(max_extend_len * group, tiles.pairs), kv.num_kv_heads, num_rows
    _launch(grid, q, kv, (slots, extend_lens, prefix_lens, start_locs), scale, out, tiles, None, 1, 0)


def attend_decodes(
    q: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    lens: torch.Tensor,
    max_context: int,
    num_processors: int,
    scale: float,
    out: torch.Tensor,
    pdl: int = 0,
    num_programs: int | None = None,
    arrivals: torch.Tensor | None = None,
) -> None:
    """Attend with one query for each row, the last of its `lens` positions. `num_programs` replaces the choice of programs for a head.

    `arrivals` has `most_arrivals` zeros, as they are again afterwards; without it each call creates some.
    """
    num_rows, num_heads, head_dim = q.shape
    group = check_queries(q, out, kv)
    tiles = InvariantTiles.choose(q.dtype, head_dim, group)
    assert group <= tiles.pairs, f"{group} query heads share a KV head, more than a tile's {tiles.pairs}"
    if num_rows == 0:
        return
    most_splits = triton.cdiv(max_context, SPLIT)
    sizes = num_rows, num_heads, most_splits
    if num_programs is None:
        wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, num_rows * kv.num_kv_heads)
        num_programs = min(wanted, most_splits) if 4 * math.prod(sizes) * (head_dim + 2) <= _MOST_PARTS_BYTES else 1
    rows, parts = (slots, lens, lens, lens), None
    if num_programs > 1:
        if arrivals is None:
            arrivals = torch.zeros(num_rows * kv.num_kv_heads, dtype=torch.int32, device=q.device)
        assert len(arrivals) >= num_rows * kv.num_kv_heads, (len(arrivals), num_rows, kv.num_kv_heads)
        parts = (
            torch.empty((*sizes, head_dim), dtype=torch.float32, device=q.device),
            torch.empty((*sizes, 2), dtype=torch.float32, device=q.device),
            arrivals,
        )
    _launch((num_programs, kv.num_kv_heads, num_rows), q, kv, rows, scale, out, tiles, parts, most_splits, pdl)


def most_arrivals(num_processors: int) -> int:
    """Return how many rows times KV heads decodes may have whose splits are computed by several programs."""
    return _PROGRAMS_PER_PROCESSOR * num_processors


def _launch(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    kv: PagedKV,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    out: torch.Tensor,
    tiles: InvariantTiles,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    most_splits: int,
    pdl: int,
) -> None:
    # Without fused multiplications and additions, which the compiler would place otherwise in another variant.
    _, num_heads, head_dim = q.shape
    slots, lens, prefix_lens, start_locs = rows
    invariant_attention_kernel[grid](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, slots, lens, prefix_lens, start_locs, out,
        *((out, out, slots) if parts is None else parts), most_splits, scale * math.log2(math.e),
        q.stride(0), out.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
        IS_DECODE=prefix_lens is lens, PARTED=parts is not None, GROUP=num_heads // kv.num_kv_heads, HEAD_DIM=head_dim,
        PAGE_SIZE=kv.page_size, DOT_DTYPE=dot_dtype(q.dtype), BLOCK_M=tiles.pairs, BLOCK_D=block_dim(head_dim),
        BLOCK_N=tiles.positions, SPLIT=SPLIT, num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
        **pdl_options(pdl),
    )  # fmt: skip
