"""Paged extend attention: a chunk of new tokens per row, causal, over the row's cached prefix and the chunk itself.

The chunk's keys and values are written to the paged memory first, so prefix and chunk are read alike. A tile holds
whole query groups (token by token, all heads of one KV head), so that the KV is read once per tile and group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.jit import block_dim, dot_dtype, kernel
from srt.kernels.paged_kv import PagedKV, check_heads


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """How extend attention is cut: (token, head of the group) pairs per program, KV positions per inner step."""

    block_m: int = 64
    block_n: int = 64

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> ExtendTiles:
        """float32 is multiplied without tensor cores, where larger tiles spill and take seconds to compile."""
        return cls(block_m=32, block_n=32) if dtype is torch.float32 else cls()


@kernel(one_variant_for=("req_pool_indices_ptr", "prefix_lens_ptr", "extend_lens_ptr", "start_locs_ptr"))
def extend_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    prefix_lens_ptr: tl.tensor,
    extend_lens_ptr: tl.tensor,
    start_locs_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: float,  # softmax scale times log2(e), so that weights are powers of two
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Program (tile, KV head, row); pair m of a row is token m // GROUP of its chunk, head m % GROUP of the group."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    extend_len = tl.load(extend_lens_ptr + row).to(tl.int32)
    if tile * BLOCK_M >= extend_len * GROUP:
        return
    prefix_len = tl.load(prefix_lens_ptr + row).to(tl.int32)
    start = tl.load(start_locs_ptr + row).to(tl.int64)

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    tokens = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    mask = (tokens < extend_len)[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    q_offsets = (start + tokens)[:, None] * q_token_stride + head_offsets
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)
    slot = tl.load(req_pool_indices_ptr + row).to(tl.int64)
    pages_ptr = page_table_ptr + slot * page_table_stride

    query_positions = prefix_len + tokens
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, extend_len - 1)
    end = prefix_len + last_token + 1
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(0, end, BLOCK_N):
        positions = block + columns
        live = positions < end
        pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        locations = pages * PAGE_SIZE + positions % PAGE_SIZE
        kv_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        kv_offsets = kv_head * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + locations[:, None] * k_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
        v = tl.load(v_ptr + locations[:, None] * v_location_stride + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = live[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: every query sees position 0, in the first block
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        peak = new_peak

    out_offsets = (start + tokens)[:, None] * out_token_stride + head_offsets
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


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
) -> None:
    """Row r's queries are ``q[start_locs[r] :][: extend_lens[r]]``, at positions from `prefix_lens[r]` on; into `out`.

    Tokens of no row are left alone in `out`. Memory past a row's last position is never read. `max_extend_len` is at
    least the longest of `extend_lens`.
    """
    num_heads, head_dim = q.shape[1:]
    num_rows = req_pool_indices.shape[0]
    group = num_heads // kv.num_kv_heads
    assert group * kv.num_kv_heads == num_heads, (num_heads, kv.num_kv_heads)
    assert kv.page_table.stride(1) == 1, kv.page_table.stride()
    check_heads(q, num_heads, head_dim)
    check_heads(out, num_heads, head_dim)
    check_heads(kv.k_buffer, kv.num_kv_heads, head_dim)
    check_heads(kv.v_buffer, kv.num_kv_heads, head_dim)
    if num_rows == 0 or max_extend_len == 0:
        return
    extend_kernel[(triton.cdiv(max_extend_len * group, tiles.block_m), kv.num_kv_heads, num_rows)](
        q, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, prefix_lens, extend_lens, start_locs, out,
        scale * math.log2(math.e),
        q.stride(0), out.stride(0), kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_M=tiles.block_m, BLOCK_D=block_dim(head_dim), BLOCK_N=tiles.block_n,
    )  # fmt: skip
