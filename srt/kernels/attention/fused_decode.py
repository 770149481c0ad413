"""Decode attention from the packed projection: norm, rotation, storing of the new key and value, and attention in one kernel.

This is for small batches, for which starting and waiting for a kernel takes longer than its work. A program reads its part of the older
keys and values before it waits for the projection. It computes the new ones itself, and the last split stores them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from srt.kernels.attention.decode_attention import MAX_SPLITS, NO_WINDOW, DecodeScratch, merge_splits, tokens_per_split
from srt.kernels.attention.paged_kv import PagedKV, check_heads
from srt.kernels.build.jit import block_dim, dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs

BLOCK_N: Final = 64  # positions, of heads up to 128; half as many of wider ones, which registers hold


@dataclass(frozen=True, slots=True)
class FusedShape:
    """The shape of a program beside its block of positions."""

    num_warps: int
    merged: int
    """Results of a head and a split that the last program requests at a time."""

    @classmethod
    def choose(cls, head_dim: int, group: int) -> FusedShape:
        """Choose the shape that is fastest for one row with `group` query heads per KV head (measured on an H200)."""
        if head_dim > 128 or group <= 2:
            return cls(4, 32)
        return cls(4, 128) if head_dim == 128 and 4 < group <= 8 else cls(2, 32)


@jit
def _load_block(
    k_ptr: tl.tensor, v_ptr: tl.tensor, pages_ptr: tl.tensor, positions: tl.tensor, end: tl.tensor, kv_head: tl.tensor,
    k_location_stride: tl.tensor, v_location_stride: tl.tensor, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return (first halves of the keys, second halves, values), with zeros from `end` on."""
    HALF: tl.constexpr = HEAD_DIM // 2
    live = positions < end
    pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    locations = (pages * PAGE_SIZE + positions % PAGE_SIZE)[:, None]
    keys = k_ptr + locations * k_location_stride + kv_head * HEAD_DIM + tl.arange(0, HALF)[None, :]
    values = v_ptr + locations * v_location_stride + kv_head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    k_1 = tl.load(keys, mask=live[:, None], other=0.0)
    k_2 = tl.load(keys + HALF, mask=live[:, None], other=0.0)
    return k_1, k_2, tl.load(values, mask=live[:, None], other=0.0)


@jit
def _attend_block(
    q_1: tl.tensor, q_2: tl.tensor, k_1: tl.tensor, k_2: tl.tensor, v: tl.tensor, live: tl.tensor,
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor, scale_log2: float, DOT_DTYPE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    scores = tl.dot(q_1, tl.trans(k_1.to(DOT_DTYPE)), input_precision="ieee")
    scores = tl.dot(q_2, tl.trans(k_2.to(DOT_DTYPE)), scores, input_precision="ieee") * scale_log2
    scores = tl.where(live[None, :], scores, float("-inf"))
    new_peak = tl.maximum(
        peak, tl.max(scores, 1)
    )  # finite: the block has a live position, or the split has the row's own
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@kernel(one_variant_for=("req_pool_indices_ptr", "seq_lens_ptr", "locations_ptr", "window"))
def fused_decode_kernel(
    qkv_ptr: tl.tensor,  # [rows, (query heads, KV heads, KV heads) of HEAD_DIM]
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [rows, HEAD_DIM / 2] float32
    sin_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    req_pool_indices_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,  # the new position included
    partial_ptr: tl.tensor,  # as in `decode_attention_kernel`, like the two after it
    lse_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [rows, query heads, HEAD_DIM]
    eps: float,
    scale_log2: float,
    window: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    page_table_stride: tl.tensor,
    HAS_NORM: tl.constexpr,
    IS_PLUS_ONE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, KV head, split). What it reads before the wait was written before any kernel of a layer: see decode_attention."""
    let_next_start(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    heads = tl.arange(0, BLOCK_G)
    pairs = tl.arange(0, HALF)
    dims = tl.arange(0, HEAD_DIM)
    columns = tl.arange(0, BLOCK_N)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    tokens = tokens_per_split(seq_len - first, num_splits, BLOCK_N, BLOCK_N)
    begin = first + split * tokens
    end = tl.minimum(begin + tokens, seq_len)
    old_end = tl.minimum(end, seq_len - 1)
    if begin >= seq_len:
        return  # without waiting, so that the next kernel's programs find room; the row's first split waits
    pages_ptr = page_table_ptr + tl.load(req_pool_indices_ptr + row).to(tl.int64) * page_table_stride
    k_1, k_2, v = _load_block(
        k_ptr, v_ptr, pages_ptr, begin + columns, old_end, kv_head,
        k_location_stride, v_location_stride, HEAD_DIM, PAGE_SIZE,
    )  # fmt: skip
    location = tl.load(locations_ptr + row).to(tl.int64)
    if HAS_NORM:
        q_weight_1 = tl.load(q_weight_ptr + pairs).to(tl.float32)
        q_weight_2 = tl.load(q_weight_ptr + HALF + pairs).to(tl.float32)
        k_weight_1 = tl.load(k_weight_ptr + pairs).to(tl.float32)
        k_weight_2 = tl.load(k_weight_ptr + HALF + pairs).to(tl.float32)
        if IS_PLUS_ONE:
            q_weight_1, q_weight_2, k_weight_1, k_weight_2 = (
                q_weight_1 + 1.0, q_weight_2 + 1.0, k_weight_1 + 1.0, k_weight_2 + 1.0
            )  # fmt: skip
    wait_for_inputs(PDL)

    # The angles are those of a dependent launch, which may still run before the wait.
    cos = tl.load(cos_ptr + row * HALF + pairs)
    sin = tl.load(sin_ptr + row * HALF + pairs)
    packed = qkv_ptr + row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    in_group = (heads < GROUP)[:, None]
    queries = packed + (kv_head * GROUP + heads)[:, None] * HEAD_DIM + pairs[None, :]
    x_1 = tl.load(queries, mask=in_group, other=0.0).to(tl.float32)
    x_2 = tl.load(queries + HALF, mask=in_group, other=0.0).to(tl.float32)
    key = packed + (NUM_HEADS + kv_head) * HEAD_DIM + pairs
    y_1, y_2 = tl.load(key).to(tl.float32), tl.load(key + HALF).to(tl.float32)
    new_v = tl.load(packed + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dims)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x_1 * x_1, 1) + tl.sum(x_2 * x_2, 1)) / HEAD_DIM + eps)[:, None]
        x_1, x_2 = x_1 * scale * q_weight_1[None, :], x_2 * scale * q_weight_2[None, :]
        scale = tl.rsqrt((tl.sum(y_1 * y_1, 0) + tl.sum(y_2 * y_2, 0)) / HEAD_DIM + eps)
        y_1, y_2 = y_1 * scale * k_weight_1, y_2 * scale * k_weight_2
    q_1 = (x_1 * cos[None, :] - x_2 * sin[None, :]).to(qkv_ptr.dtype.element_ty).to(DOT_DTYPE)
    q_2 = (x_2 * cos[None, :] + x_1 * sin[None, :]).to(qkv_ptr.dtype.element_ty).to(DOT_DTYPE)
    new_k_1 = (y_1 * cos - y_2 * sin).to(k_ptr.dtype.element_ty)
    new_k_2 = (y_2 * cos + y_1 * sin).to(k_ptr.dtype.element_ty)

    is_last = end == seq_len
    products = (
        q_1.to(tl.float32) * new_k_1.to(tl.float32)[None, :] + q_2.to(tl.float32) * new_k_2.to(tl.float32)[None, :]
    )
    peak = tl.where(is_last, tl.sum(products, 1) * scale_log2, float("-inf"))
    total = tl.zeros([BLOCK_G], tl.float32) + tl.where(is_last, 1.0, 0.0)
    acc = total[:, None] * new_v.to(tl.float32)[None, :]
    if is_last:
        new_key = k_ptr + location * k_location_stride + kv_head * HEAD_DIM + pairs
        tl.store(new_key, new_k_1)
        tl.store(new_key + HALF, new_k_2)
        tl.store(v_ptr + location * v_location_stride + kv_head * HEAD_DIM + dims, new_v)
    live = begin + columns < old_end
    peak, total, acc = _attend_block(q_1, q_2, k_1, k_2, v, live, peak, total, acc, scale_log2, DOT_DTYPE)
    for block in range(begin + BLOCK_N, old_end, BLOCK_N):
        positions = block + columns
        k_1, k_2, v = _load_block(
            k_ptr, v_ptr, pages_ptr, positions, old_end, kv_head,
            k_location_stride, v_location_stride, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
        live = positions < old_end
        peak, total, acc = _attend_block(q_1, q_2, k_1, k_2, v, live, peak, total, acc, scale_log2, DOT_DTYPE)

    attended = acc / total[:, None]
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    out = out_ptr + (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    num_live = tl.cdiv(seq_len - first, tokens)
    if num_live <= 1:
        tl.store(out + head_offsets, attended.to(out_ptr.dtype.element_ty), mask=in_group)
        return
    first_head = (row * NUM_HEADS + kv_head * GROUP) * num_splits
    slots = first_head + heads * num_splits + split
    tl.store(lse_ptr + slots, peak + tl.log2(total), mask=heads < GROUP)
    tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], attended, mask=in_group)
    tl.debug_barrier()  # all threads have stored their results before the program counts as arrived
    counter_ptr = arrived_ptr + row * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") != num_live - 1:
        return
    tl.store(counter_ptr, 0)
    merge_splits(
        partial_ptr, lse_ptr, out, first_head, num_splits, num_live, 1.0, GROUP, HEAD_DIM, HEAD_DIM, BLOCK_S, MERGED
    )


def can_fuse_decode(kv: PagedKV, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports this: heads of a power of two, and a KV memory of the model's type."""
    head_dim = kv.head_dim
    return kv.k_buffer.dtype == dtype and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def fused_decode(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    locations: torch.Tensor,
    kv: PagedKV,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    num_splits: int,
    scratch: DecodeScratch,
    window: int | None = None,
    pdl: bool = False,
    is_plus_one: bool = False,
) -> torch.Tensor:
    """Return [rows, query heads * head_dim] for rows of one new token each, at position seq_lens - 1, stored at `locations`.

    qkv [rows, heads * head_dim] must be contiguous, and is not changed. With `is_plus_one` the norms' factors are 1 + weight.
    """
    num_rows, width = qkv.shape
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    num_heads = width // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and qkv.is_contiguous(), (qkv.shape, qkv.stride())
    assert group * num_kv_heads == num_heads and can_fuse_decode(kv, qkv.dtype), (num_heads, num_kv_heads, head_dim)
    assert 1 <= num_splits <= MAX_SPLITS, num_splits
    check_heads(kv.k_buffer, num_kv_heads, head_dim)
    check_heads(kv.v_buffer, num_kv_heads, head_dim)
    if num_splits > 1:
        assert scratch.partial.numel() >= num_rows * num_heads * num_splits * head_dim, scratch.partial.numel()
        assert scratch.arrived.numel() >= num_rows * num_kv_heads, scratch.arrived.numel()
    out = torch.empty((num_rows, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    q_weight, k_weight = norm_weights or (qkv, qkv)
    shape = FusedShape.choose(head_dim, group)
    fused_decode_kernel[(num_rows, num_kv_heads, num_splits)](
        qkv, q_weight, k_weight, cos, sin, locations, kv.k_buffer, kv.v_buffer, kv.page_table, req_pool_indices, seq_lens,
        scratch.partial, scratch.lse, scratch.arrived, out,
        eps, scale * math.log2(math.e), NO_WINDOW if window is None else window,
        kv.k_buffer.stride(0), kv.v_buffer.stride(0), kv.page_table.stride(0),
        HAS_NORM=norm_weights is not None, IS_PLUS_ONE=is_plus_one, GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PAGE_SIZE=kv.page_size, DOT_DTYPE=dot_dtype(qkv.dtype), BLOCK_G=block_dim(group),
        BLOCK_N=BLOCK_N if head_dim <= 128 else BLOCK_N // 2, BLOCK_S=MAX_SPLITS,
        MERGED=shape.merged, num_warps=shape.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return out
