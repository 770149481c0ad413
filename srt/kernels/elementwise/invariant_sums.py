"""Add up the parts of a product in order, and go on with the sum: the residual and the next norm, or norm, rotation and storing of heads.

A kernel has one variant for any number of parts and rows, so that a row's sums have one order. Only how launches overlap differs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import check_heads
from srt.kernels.build.jit import kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

_HEADS: Final = 8


@kernel(one_variant_for=("num_rows", "num_parts"))
def sum_add_norm_kernel(
    parts_ptr: tl.tensor,  # [parts, rows, SIZE] float32, or one part already rounded
    bias_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    eps: float,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program r adds row r of the product to the residual stream, stores the sum, and norms it. Each sum is rounded."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    delta = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        values = tl.load(parts_ptr + (part * num_rows + row) * SIZE + columns, mask=inside, other=0.0)
        delta += values.to(tl.float32)
    hidden = tl.load(hidden_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    let_next_start_late(PDL)
    if HAS_BIAS:
        delta += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = (hidden + delta.to(sum_ptr.dtype.element_ty).to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * SIZE + columns, x, mask=inside)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(one_variant_for=("locations_ptr", "num_tokens", "num_parts"))
def sum_prepare_qkv_kernel(
    parts_ptr: tl.tensor,  # [parts, tokens, (q heads, KV heads, KV heads) of HEAD_DIM] float32, or one part already rounded
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [tokens, as in parts]
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [tokens, HEAD_DIM / 2] float32
    sin_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    k_buffer_ptr: tl.tensor,
    v_buffer_ptr: tl.tensor,
    eps: float,
    num_tokens: tl.tensor,
    num_parts: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (t, b) processes block b of token t's heads. Queries and keys are normed and rotated; keys and values are also stored."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    pairs = tl.arange(0, BLOCK_HALF)
    in_head = pairs < HALF
    is_query = heads < NUM_HEADS
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    offsets = heads[:, None] * HEAD_DIM + pairs[None, :]
    wait_for_inputs(PDL)
    first = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    second = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    for part in range(num_parts):
        row = parts_ptr + (part * num_tokens + token) * WIDTH
        first += tl.load(row + offsets, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(row + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=in_head, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=in_head, other=0.0)[None, :]
    location = tl.load(locations_ptr + token).to(tl.int64)
    let_next_start_late(PDL)
    if HAS_BIAS:
        first += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    first = first.to(out_ptr.dtype.element_ty).to(tl.float32)
    second = second.to(out_ptr.dtype.element_ty).to(tl.float32)
    x1, x2 = first, second
    if HAS_NORM:
        q_weight_1 = tl.load(q_weight_ptr + pairs, mask=in_head, other=0.0).to(tl.float32)
        q_weight_2 = tl.load(q_weight_ptr + HALF + pairs, mask=in_head, other=0.0).to(tl.float32)
        k_weight_1 = tl.load(k_weight_ptr + pairs, mask=in_head, other=0.0).to(tl.float32)
        k_weight_2 = tl.load(k_weight_ptr + HALF + pairs, mask=in_head, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM + eps)[:, None]
        x1 = x1 * scale * tl.where(is_query[:, None], q_weight_1[None, :], k_weight_1[None, :])
        x2 = x2 * scale * tl.where(is_query[:, None], q_weight_2[None, :], k_weight_2[None, :])
    rotated_1 = tl.where(is_value[:, None], first, x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty)
    rotated_2 = tl.where(is_value[:, None], second, x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + offsets, rotated_1, mask=inside)
    tl.store(out_ptr + token * WIDTH + offsets + HALF, rotated_2, mask=inside)
    k_target = k_buffer_ptr + location * k_location_stride + offsets - NUM_HEADS * HEAD_DIM
    tl.store(k_target, rotated_1, mask=inside & is_key[:, None])
    tl.store(k_target + HALF, rotated_2, mask=inside & is_key[:, None])
    v_target = v_buffer_ptr + location * v_location_stride + offsets - (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    tl.store(v_target, rotated_1, mask=inside & is_value[:, None])
    tl.store(v_target + HALF, rotated_2, mask=inside & is_value[:, None])


def sum_add_norm(
    parts: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float, pdl: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of the sum, the sum) of `hidden` [rows, size], the parts [parts, rows, size] and the bias, in hidden's type."""
    num_parts, num_rows, size = parts.shape
    assert hidden.shape == (num_rows, size) and hidden.is_contiguous() and weight.shape == (size,), hidden.shape
    out, total = torch.empty_like(hidden), torch.empty_like(hidden)
    if num_rows:
        block = triton.next_power_of_2(size)
        sum_add_norm_kernel[(num_rows,)](
            parts, weight if bias is None else bias, hidden, weight, out, total, eps, num_rows, num_parts,
            HAS_BIAS=bias is not None, SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            **pdl_options(pdl),
        )  # fmt: skip
    return out, total


def sum_prepare_qkv(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    locations: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    pdl: int = 0,
) -> None:
    """Do what `prepare_qkv` does, from the parts [parts, tokens, width] of the packed product and its bias into `out` [tokens, width]."""
    num_parts, num_tokens, width = parts.shape
    num_kv_heads, head_dim = k_buffer.shape[1:]
    all_heads = num_heads + 2 * num_kv_heads
    assert width == all_heads * head_dim, (width, num_heads, num_kv_heads, head_dim)
    assert out.shape == (num_tokens, width) and out.is_contiguous() and out.dtype is k_buffer.dtype, out.shape
    check_heads(k_buffer, num_kv_heads, head_dim)
    check_heads(v_buffer, num_kv_heads, head_dim)
    if num_tokens == 0:
        return
    q_weight, k_weight = norm_weights or (out, out)
    sum_prepare_qkv_kernel[(num_tokens, triton.cdiv(all_heads, _HEADS))](
        parts, out if bias is None else bias, out, q_weight, k_weight, cos, sin, locations, k_buffer, v_buffer,
        eps, num_tokens, num_parts, k_buffer.stride(0), v_buffer.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HAS_BIAS=bias is not None,
        HAS_NORM=norm_weights is not None, BLOCK_H=_HEADS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        **pdl_options(pdl),
    )  # fmt: skip
