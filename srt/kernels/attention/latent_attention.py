"""Paged attention over latents (MLA): all query heads share one key, the latent, and one value, the latent's first part.

Queries are absorbed: they are already in the space of latents. One kernel serves chunks and decodes. A program holds a tile of pairs of a
token and a head, and reads each latent once for all of them. The latents of a decode row are cut into splits, which are processed in
parallel and merged by a second kernel, in order, so that the same step gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import block_dim, dot_dtype, kernel
from srt.kernels.build.shared_memory import SHARED_BYTES

MAX_SPLITS: Final = 32
PROGRAMS_PER_PROCESSOR: Final = 2  # programs of decodes that run on a multiprocessor at once
MIN_SPLIT_TOKENS: Final = 64
DECODE_PAIRS: Final = 16  # pairs of a program of decodes
EXTEND_PAIRS: Final = 64


@dataclass(frozen=True, slots=True)
class PagedLatents:
    """Latents of one layer, and the table that locates a request's tokens in them, as in `PagedKV`."""

    latents: torch.Tensor  # [locations, 1, latent_dim], the last dimension contiguous
    rank: int  # elements of the first part
    page_table: torch.Tensor  # [slots, max_pages], int32
    page_size: int


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """The tiles of attention over latents: pairs of a token and a head per program, positions per inner step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2

    @classmethod
    def choose(cls, dtype: torch.dtype, pairs: int, shared_bytes: int) -> LatentTiles:
        """Return the tiles for rows of up to this many pairs. The tiles of large chunks take most of the shared memory of an A100."""
        if dtype is torch.float32:
            return cls(DECODE_PAIRS, 16, 4)
        if pairs <= DECODE_PAIRS and shared_bytes >= SHARED_BYTES[90]:
            return cls(DECODE_PAIRS, 32, 4, 3)  # two programs fit a multiprocessor, with two blocks of latents each
        if pairs <= DECODE_PAIRS or shared_bytes < SHARED_BYTES[80]:
            return cls(DECODE_PAIRS, 32, 4)
        return cls(EXTEND_PAIRS, 32, 8)


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Results of splits, before they are merged. All layers share the memory: a kernel accesses it when those before have ended.

    The shapes are those of the Triton kernel. `stream_latents` has its own, with a group of clusters in place of a split.
    """

    partial: torch.Tensor  # float32, [pairs of row and head, splits, rank]
    lse: torch.Tensor  # float32, [pairs, splits]: log2 of each split's sum of weights
    arrived: torch.Tensor  # int32, [programs], zeros: how many results wait for the program that merges them

    @classmethod
    def allocate(cls, num_processors: int, rank: int, device: torch.device) -> LatentScratch:
        """Allocate enough for every batch: rows are split into at most as many programs as run at once."""
        programs = PROGRAMS_PER_PROCESSOR * num_processors
        pairs = programs * DECODE_PAIRS
        partial, lse = (torch.empty(size, dtype=torch.float32, device=device) for size in (pairs * rank, pairs))
        return cls(partial, lse, torch.zeros(programs, dtype=torch.int32, device=device))


def num_splits_of(num_rows: int, num_heads: int, max_context: int, num_processors: int) -> int:
    """Return the splits per row and tile of heads. They depend on the batch's size alone, so that a graph serves every step of it."""
    num_programs = num_rows * -(-num_heads // DECODE_PAIRS)
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // num_programs
    return max(1, min(wanted, -(-max_context // MIN_SPLIT_TOKENS), MAX_SPLITS))


@kernel(one_variant_for=("slots_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr"))
def latent_attention_kernel(
    q_ptr: tl.tensor,  # [tokens, heads, RANK]
    rotated_ptr: tl.tensor,  # [tokens, heads, ROPE]
    latents_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    prefix_lens_ptr: tl.tensor,  # of decodes: positions of the row, the new one included
    extend_lens_ptr: tl.tensor,
    start_locs_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [tokens, heads, RANK]
    scale_log2: float,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    rotated_token_stride: tl.tensor,
    rotated_head_stride: tl.tensor,
    location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DECODES: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Program (tile, row, split); pair m of a row is token m // HEADS of its chunk, head m % HEADS. Zeros for a decode row of length 0."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the tiles that see the most positions go first
    row, split = tl.program_id(1), tl.program_id(2)
    if DECODES:
        extend_len, start = 1, row.to(tl.int64)
        prefix_len = tl.load(prefix_lens_ptr + row).to(tl.int32) - 1
    else:
        extend_len = tl.load(extend_lens_ptr + row).to(tl.int32)
        start = tl.load(start_locs_ptr + row).to(tl.int64)
        prefix_len = tl.load(prefix_lens_ptr + row).to(tl.int32)
    if tile * BLOCK_M >= extend_len * HEADS:
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = pairs // HEADS, pairs % HEADS
    is_pair = tokens < extend_len
    query_positions = prefix_len + tokens
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, extend_len - 1)
    seen = prefix_len + last_token + 1
    split_tokens = tl.cdiv(tl.maximum(tl.cdiv(seen, SPLITS), MIN_SPLIT), BLOCK_N) * BLOCK_N
    begin = split * split_tokens if SPLITS > 1 else 0
    end = tl.minimum(begin + split_tokens, seen) if SPLITS > 1 else seen

    firsts, lasts = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    q_at = q_ptr + (start + tokens)[:, None] * q_token_stride + heads[:, None] * q_head_stride
    rotated_at = rotated_ptr + (start + tokens)[:, None] * rotated_token_stride + heads[:, None] * rotated_head_stride
    first_mask = is_pair[:, None] & (firsts < RANK)[None, :]
    last_mask = is_pair[:, None] & (lasts < ROPE)[None, :]
    q_first = tl.load(q_at + firsts[None, :], mask=first_mask, other=0.0).to(DOT_DTYPE)
    q_last = tl.load(rotated_at + lasts[None, :], mask=last_mask, other=0.0).to(DOT_DTYPE)
    pages_ptr = page_table_ptr + tl.load(slots_ptr + row).to(tl.int64) * page_table_stride

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    # The pages of a block are found a block ahead, so that the loads of its latents wait for nothing and can be issued early.
    positions = begin + tl.arange(0, BLOCK_N)
    pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=positions < end, other=0)
    for block in range(begin, end, BLOCK_N):
        positions = block + tl.arange(0, BLOCK_N)
        live = positions < end
        at = latents_ptr + (pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE)[:, None] * location_stride
        ahead = positions + BLOCK_N
        pages = tl.load(pages_ptr + ahead // PAGE_SIZE, mask=ahead < end, other=0)
        first = tl.load(at + firsts[None, :], mask=live[:, None] & (firsts < RANK)[None, :], other=0.0).to(DOT_DTYPE)
        last = tl.load(at + RANK + lasts[None, :], mask=live[:, None] & (lasts < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_first, tl.trans(first), input_precision="ieee")
        scores = tl.dot(q_last, tl.trans(last.to(DOT_DTYPE)), scores, input_precision="ieee") * scale_log2
        is_seen = live[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf: the query has seen no position yet
        weights = tl.exp2(scores - origin[:, None])
        shrink = tl.exp2(peak - origin)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), first, input_precision="ieee")
        peak = new_peak

    divisor = tl.where(total > 0, total, 1.0)
    attended = acc / divisor[:, None]
    places = (start + tokens) * HEADS + heads
    if SPLITS > 1:
        slots = places * SPLITS + split
        tl.store(lse_ptr + slots, tl.where(total > 0, peak + tl.log2(divisor), float("-inf")), mask=is_pair)
        tl.store(partial_ptr + slots[:, None] * RANK + firsts[None, :], attended, mask=first_mask)
    else:
        tl.store(
            out_ptr + places[:, None] * RANK + firsts[None, :], attended.to(out_ptr.dtype.element_ty), mask=first_mask
        )


@kernel(one_variant_for=())
def merge_latent_splits_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Each program merges the splits of one pair of row and head, weighting each by its share. A split without positions has none."""
    pair = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_R)
    lse = tl.load(lse_ptr + pair * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    peak = tl.max(lse, 0)
    shares = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(shares, 0)
    merged = tl.zeros([BLOCK_R], tl.float32)
    for split in range(SPLITS):
        share = tl.sum(tl.where(splits == split, shares, 0.0), 0)
        at = partial_ptr + (pair * SPLITS + split) * RANK + dims
        merged += tl.load(at, mask=dims < RANK, other=0.0) * share
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + pair * RANK + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < RANK)


def latent_decode(
    q: torch.Tensor,
    rotated: torch.Tensor,
    memory: PagedLatents,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_splits: int,
    scratch: LatentScratch,
    tiles: LatentTiles,
) -> None:
    """Attend with one absorbed query per row and head to the row's first `seq_lens` positions.

    Its two parts are q [rows, heads, rank] and `rotated` [rows, heads, rope], with any strides of rows and heads. The
    weighted sums of latents' first parts, [rows, heads, rank], are written to `out`. A row of length 0 gets zeros.
    """
    num_rows, num_heads, _ = q.shape
    if not num_rows:
        return
    assert num_splits == 1 or scratch.lse.numel() >= num_rows * num_heads * num_splits, (q.shape, num_splits)
    assert tiles.block_m == DECODE_PAIRS, tiles
    grid = triton.cdiv(num_heads, DECODE_PAIRS), num_rows, num_splits
    _launch(grid, q, rotated, memory, (slots, seq_lens, seq_lens, seq_lens), scale, out, scratch, tiles)
    if num_splits > 1:
        merge_latent_splits_kernel[(num_rows * num_heads,)](
            scratch.partial, scratch.lse, out,
            RANK=memory.rank, SPLITS=num_splits, BLOCK_R=block_dim(memory.rank), BLOCK_S=MAX_SPLITS,
        )  # fmt: skip


def latent_extend(
    q: torch.Tensor,
    rotated: torch.Tensor,
    memory: PagedLatents,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    start_locs: torch.Tensor,
    max_extend_len: int,
    scale: float,
    out: torch.Tensor,
    tiles: LatentTiles,
) -> None:
    """Attend with the absorbed queries of chunks, whose latents are stored, as `extend_attention` does over keys and values."""
    if not len(slots) or not max_extend_len:
        return
    grid = triton.cdiv(max_extend_len * q.shape[1], tiles.block_m), len(slots), 1
    nothing = torch.empty(0, dtype=torch.float32, device=q.device)
    no_scratch = LatentScratch(nothing, nothing, nothing)
    _launch(grid, q, rotated, memory, (slots, prefix_lens, extend_lens, start_locs), scale, out, no_scratch, tiles)


def _launch(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    rotated: torch.Tensor,
    memory: PagedLatents,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    out: torch.Tensor,
    scratch: LatentScratch,
    tiles: LatentTiles,
) -> None:
    _, num_heads, rank = q.shape
    latent_dim = rank + rotated.shape[2]
    assert q.stride(2) == rotated.stride(2) == 1 and rotated.shape[:2] == q.shape[:2], (q.stride(), rotated.stride())
    assert rank == memory.rank and out.is_contiguous() and out.shape == q.shape, (q.shape, out.shape)
    assert memory.latents.shape[1:] == (1, latent_dim) and memory.latents.stride(2) == 1, memory.latents.shape
    latent_attention_kernel[grid](
        q, rotated, memory.latents, memory.page_table, *rows, scratch.partial, scratch.lse, out,
        scale * math.log2(math.e), *q.stride()[:2], *rotated.stride()[:2], memory.latents.stride(0), memory.page_table.stride(0),
        HEADS=num_heads, RANK=rank, ROPE=latent_dim - rank, PAGE_SIZE=memory.page_size,
        DECODES=rows[1] is rows[2], SPLITS=grid[2], MIN_SPLIT=MIN_SPLIT_TOKENS, DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_M=tiles.block_m, BLOCK_R=block_dim(rank), BLOCK_P=block_dim(latent_dim - rank), BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
