"""Paged extend attention: a chunk of new tokens per row, causal, over the row's cached prefix and the chunk itself.

The chunk's keys and values are stored in the paged memory first, so prefix and chunk are read in the same way. A tile holds whole query
groups (token by token, all heads of one KV head), so that the KV memory is read once per tile and group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV, check_queries
from srt.kernels.attention.soft_cap import soft_cap
from srt.kernels.build.jit import block_dim, dot_dtype, jit, kernel
from srt.kernels.build.shared_memory import SHARED_BYTES


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """The tiles of extend attention: (token, head of the group) pairs per program, KV positions per inner step."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, dtype: torch.dtype, head_dim: int, pairs: int, shared_bytes: int) -> ExtendTiles:
        """Return the tiles for rows of up to this many pairs, as measured on an H200.

        float32 is multiplied without tensor cores: larger tiles spill, and take seconds to compile. Large heads take 107 KB (165 on
        Hopper) of shared memory, or half of it.
        """
        is_tight = head_dim > 128 and shared_bytes < SHARED_BYTES[80]
        if dtype is torch.float32:
            return cls(block_m=32, block_n=16 if is_tight else 32)
        if head_dim > 128:
            return cls(block_n=32 if is_tight else 64)
        if pairs <= 16:  # a decode's token and its drafts
            return cls(block_m=16, num_stages=2)
        return cls(block_m=128) if pairs > 64 else cls()


@jit
def _attend_block(
    q: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    block: tl.tensor,
    end: tl.tensor,
    query_positions: tl.tensor,
    window: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    kv_head: tl.tensor,
    scale_log2: float,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Process one inner step. Without MASKED, every query of the tile sees the whole block."""
    dims = tl.arange(0, BLOCK_D)
    positions = block + tl.arange(0, BLOCK_N)
    if MASKED:
        live = positions < end
        if HAS_WINDOW:  # pages behind the window may be another request's
            live = live & (positions > tl.min(query_positions, 0) - window)
        pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        kv_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        pages = tl.load(pages_ptr + positions // PAGE_SIZE).to(tl.int64)
        kv_mask = (dims < HEAD_DIM)[None, :] & (positions >= 0)[:, None]
    locations = pages * PAGE_SIZE + positions % PAGE_SIZE
    kv_offsets = kv_head * HEAD_DIM + dims[None, :]
    k = tl.load(k_ptr + locations[:, None] * k_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
    v = tl.load(v_ptr + locations[:, None] * v_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if SOFTCAP > 0:
        scores = soft_cap(scores, SOFTCAP)
    if MASKED:
        visible = live[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            visible = visible & (positions[None, :] > query_positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf: the query has seen no position yet
    else:
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        origin = new_peak
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(peak - origin)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
    return new_peak, total, acc


@kernel(
    one_variant_for=(
        "req_pool_indices_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr", "num_rows", "window",
    )
)  # fmt: skip
def extend_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    prefix_lens_ptr: tl.tensor,
    extend_lens_ptr: tl.tensor,
    start_locs_ptr: tl.tensor,
    num_rows: tl.tensor,
    sinks_ptr: tl.tensor,  # [heads]
    out_ptr: tl.tensor,
    scale_log2: float,  # softmax scale times the keys' scale times log2(e), so that weights are powers of two
    v_scale: float,
    window: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: products are not capped
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # a power of two, at least the number of rows; 0: the grid has the same number of tiles for each row
) -> None:
    """Program (tile, KV head, row); pair m of a row is token m // GROUP of its chunk, head m % GROUP of the group.

    With BLOCK_R the program is (tile of all rows, KV head): chunks follow each other in q, and surplus programs end at once.
    """
    kv_head = tl.program_id(1)
    # The tiles of a row that see the most positions go first.
    if BLOCK_R == 0:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        row = tl.program_id(2)
        extend_len = tl.load(extend_lens_ptr + row).to(tl.int32)
        if tile * BLOCK_M >= extend_len * GROUP:
            return
        start = tl.load(start_locs_ptr + row).to(tl.int64)
    else:
        rows = tl.arange(0, BLOCK_R)
        lens = tl.load(extend_lens_ptr + rows, mask=rows < num_rows, other=0).to(tl.int32)
        num_tiles = tl.cdiv(lens * GROUP, BLOCK_M)
        place = tl.sum(num_tiles, 0) - 1 - tl.program_id(0)
        if place < 0:
            return
        row = tl.sum((tl.cumsum(num_tiles, 0) <= place).to(tl.int32), 0)
        tile = place - tl.sum(tl.where(rows < row, num_tiles, 0), 0)
        extend_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        start = tl.sum(tl.where(rows < row, lens, 0), 0).to(tl.int64)
    prefix_len = tl.load(prefix_lens_ptr + row).to(tl.int32)

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    mask = (tokens < extend_len)[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    q_offsets = (start + tokens)[:, None] * q_token_stride + head_offsets
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)
    slot = tl.load(req_pool_indices_ptr + row).to(tl.int64)
    pages_ptr = page_table_ptr + slot * page_table_stride

    query_positions = prefix_len + tokens
    first_position = prefix_len + tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, extend_len - 1)
    end = prefix_len + last_token + 1
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # a sink is as a position of its own, whose value is zero
        peak = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        masked_from = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (first_position + 1) // BLOCK_N * BLOCK_N
        for block in range(0, masked_from, BLOCK_N):
            peak, total, acc = _attend_block(
                q, peak, total, acc, block, end, query_positions, window, k_ptr, v_ptr, pages_ptr, kv_head,
                scale_log2, k_location_stride, v_location_stride,
                False, HAS_WINDOW, SOFTCAP, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    for block in range(masked_from, end, BLOCK_N):
        peak, total, acc = _attend_block(
            q, peak, total, acc, block, end, query_positions, window, k_ptr, v_ptr, pages_ptr, kv_head,
            scale_log2, k_location_stride, v_location_stride,
            True, HAS_WINDOW, SOFTCAP, HEAD_DIM, PAGE_SIZE, DOT_DTYPE, BLOCK_D, BLOCK_N,
        )  # fmt: skip

    out_offsets = (start + tokens)[:, None] * out_token_stride + head_offsets
    attended = acc / total[:, None] * v_scale
    tl.store(out_ptr + out_offsets, attended.to(out_ptr.dtype.element_ty), mask=mask)


def extend_attention(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    start_locs: torch.Tensor,
    max_extend_len: int,
    scale: float,
    out: torch.Tensor,
    tiles: ExtendTiles,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend with the queries ``q[start_locs[r] :][: extend_lens[r]]`` of each row r, at positions from `prefix_lens[r]` on, into `out`.

    A query sees the positions up to its own, or the last `window` of them. A `softcap` c replaces each scaled product s by c * tanh(s / c).
    `sinks` are a score of each head that takes its share of the softmax.
    Tokens without a row stay unchanged in `out`. Memory past a
    row's last position is never read. `max_extend_len` must be at least the longest of `extend_lens`.
    """
    num_rows, group = len(req_pool_indices), check_queries(q, out, kv)
    if num_rows == 0 or max_extend_len == 0:
        return
    grid = triton.cdiv(max_extend_len * group, tiles.block_m), kv.num_kv_heads, num_rows
    _launch(
        grid,
        q,
        kv,
        (req_pool_indices, prefix_lens, extend_lens, start_locs),
        scale,
        out,
        tiles,
        window,
        softcap,
        sinks,
        0,
    )


def extend_any_rows(
    q: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: ExtendTiles,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Do what `extend_attention` does for chunks that follow each other from q's first token on.

    The launch depends only on the numbers of rows and tokens for which there is room, so it can be captured in a graph and serve any
    lengths. Rows without tokens are skipped.
    """
    num_rows, group = len(req_pool_indices), check_queries(q, out, kv)
    grid = triton.cdiv(len(q) * group, tiles.block_m) + num_rows, kv.num_kv_heads, 1
    block_r = triton.next_power_of_2(num_rows)
    # Lengths are passed in place of the chunks' beginnings, which the kernel computes from them.
    rows = req_pool_indices, prefix_lens, extend_lens, extend_lens
    _launch(grid, q, kv, rows, scale, out, tiles, window, softcap, sinks, block_r)


def _launch(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    kv: PagedKV,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    out: torch.Tensor,
    tiles: ExtendTiles,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    block_r: int,
) -> None:
    _, num_heads, head_dim = q.shape
    extend_kernel[grid](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, *rows, len(rows[0]), q if sinks is None else sinks, out,
        scale * kv.k_scale * math.log2(math.e), kv.v_scale, window or 0,
        q.stride(0), out.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
        HAS_WINDOW=window is not None, SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None,
        GROUP=num_heads // kv.num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size,
        DOT_DTYPE=dot_dtype(q.dtype), BLOCK_M=tiles.block_m, BLOCK_D=block_dim(head_dim), BLOCK_N=tiles.block_n, BLOCK_R=block_r,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
