"""Rotary embedding: compute a step's angles, and prepare packed queries, keys and values for attention."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import check_heads
from srt.kernels.build.jit import kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

_TOKENS: Final = 8
_HEADS: Final = 8
_LARGEST_FP8: Final = 448  # largest value of float8_e4m3fn, which has no infinity; larger ones are clamped to it


@kernel(one_variant_for=("positions_ptr", "num_tokens"))
def angles_kernel(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    factor: float,
    num_tokens: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program b computes cosines and sines for a block of tokens. Angles are float32 products, their functions are computed in float64."""
    let_next_start(PDL)
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    pairs = tl.arange(0, BLOCK_HALF)
    frequencies = tl.load(frequencies_ptr + pairs, mask=pairs < HALF, other=0.0)
    wait_for_inputs(PDL)
    positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.float32)
    angles = (positions[:, None] * frequencies[None, :]).to(tl.float64)
    inside = (tokens < num_tokens)[:, None] & (pairs < HALF)[None, :]
    offsets = tokens[:, None] * HALF + pairs[None, :]
    tl.store(cos_ptr + offsets, tl.cos(angles).to(tl.float32) * factor, mask=inside)
    tl.store(sin_ptr + offsets, tl.sin(angles).to(tl.float32) * factor, mask=inside)


@kernel(one_variant_for=("locations_ptr",))
def prepare_qkv_kernel(
    qkv_ptr: tl.tensor,  # [tokens, (q heads, KV heads, KV heads) of HEAD_DIM]
    out_ptr: tl.tensor,  # of the same shape; may be qkv_ptr
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [tokens, HEAD_DIM / 2] float32
    sin_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    k_buffer_ptr: tl.tensor,
    v_buffer_ptr: tl.tensor,
    eps: float,
    k_scale_inverse: float,
    v_scale_inverse: float,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PLUS_ONE: tl.constexpr,  # the norms' factors are 1 + weight
    LARGEST: tl.constexpr,  # largest value of the KV memory's type if it is fp8; else 0
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (t, b) processes block b of token t's heads. Queries and keys are normed and rotated; keys and values are also stored."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    HALF: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, BLOCK_HALF)
    in_head = pairs < HALF
    is_query = heads < NUM_HEADS
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    if HAS_NORM:
        q_weight_1 = tl.load(q_weight_ptr + pairs, mask=in_head, other=0.0).to(tl.float32)
        q_weight_2 = tl.load(q_weight_ptr + HALF + pairs, mask=in_head, other=0.0).to(tl.float32)
        k_weight_1 = tl.load(k_weight_ptr + pairs, mask=in_head, other=0.0).to(tl.float32)
        k_weight_2 = tl.load(k_weight_ptr + HALF + pairs, mask=in_head, other=0.0).to(tl.float32)
        if IS_PLUS_ONE:
            q_weight_1 += 1.0
            q_weight_2 += 1.0
            k_weight_1 += 1.0
            k_weight_2 += 1.0
    wait_for_inputs(PDL)

    first_of_token = token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    row, target = qkv_ptr + first_of_token, out_ptr + first_of_token
    offsets = heads[:, None] * HEAD_DIM + pairs[None, :]
    first = tl.load(row + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=in_head, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=in_head, other=0.0)[None, :]
    location = tl.load(locations_ptr + token).to(tl.int64)

    let_next_start_late(PDL)
    x1, x2 = first, second
    if HAS_NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        x1 = x1 * scale * tl.where(is_query[:, None], q_weight_1[None, :], k_weight_1[None, :])
        x2 = x2 * scale * tl.where(is_query[:, None], q_weight_2[None, :], k_weight_2[None, :])
    rotated_1 = tl.where(is_value[:, None], first, x1 * cos - x2 * sin)
    rotated_2 = tl.where(is_value[:, None], second, x2 * cos + x1 * sin)
    tl.store(target + offsets, rotated_1.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + offsets + HALF, rotated_2.to(out_ptr.dtype.element_ty), mask=inside)

    if LARGEST:
        scales = tl.where(is_value, v_scale_inverse, k_scale_inverse)[:, None]
        rotated_1 = tl.minimum(tl.maximum(rotated_1 * scales, -LARGEST), LARGEST)
        rotated_2 = tl.minimum(tl.maximum(rotated_2 * scales, -LARGEST), LARGEST)
    stored_1 = rotated_1.to(k_buffer_ptr.dtype.element_ty)
    stored_2 = rotated_2.to(k_buffer_ptr.dtype.element_ty)
    k_target = k_buffer_ptr + location * k_location_stride + offsets - NUM_HEADS * HEAD_DIM
    tl.store(k_target, stored_1, mask=inside & is_key[:, None])
    tl.store(k_target + HALF, stored_2, mask=inside & is_key[:, None])
    v_target = v_buffer_ptr + location * v_location_stride + offsets - (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    tl.store(v_target, stored_1, mask=inside & is_value[:, None])
    tl.store(v_target + HALF, stored_2, mask=inside & is_value[:, None])


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, pdl: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [tokens, 1, pairs] float32 of positions × frequencies, multiplied by `factor`."""
    num_tokens, half = len(positions), len(frequencies)
    both = torch.empty((2, num_tokens, 1, half), dtype=torch.float32, device=positions.device)
    cos, sin = both[0], both[1]
    if num_tokens:
        angles_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            positions, frequencies, cos, sin, factor, num_tokens,
            HALF=half, BLOCK_T=_TOKENS, BLOCK_HALF=triton.next_power_of_2(half), **pdl_options(pdl),
        )  # fmt: skip
    return cos, sin


def prepare_qkv(
    qkv: torch.Tensor,
    num_heads: int,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    locations: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: int = 0,
    out: torch.Tensor | None = None,
    is_plus_one: bool = False,
) -> None:
    """Norm the query and key heads of qkv [tokens, heads * head_dim] if `norm_weights` is given, and rotate them, in place or into `out`.

    Also store keys and values at `locations` in the type of the KV memory; an fp8 memory holds them divided by their scales.
    """
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_buffer.shape[1:]
    all_heads = num_heads + 2 * num_kv_heads
    assert width == all_heads * head_dim and qkv.is_contiguous(), (qkv.shape, num_heads, num_kv_heads, head_dim)
    out = qkv if out is None else out
    assert out.shape == qkv.shape and out.is_contiguous(), out.shape
    assert k_buffer.dtype == v_buffer.dtype, (k_buffer.dtype, v_buffer.dtype)
    check_heads(k_buffer, num_kv_heads, head_dim)
    check_heads(v_buffer, num_kv_heads, head_dim)
    if num_tokens == 0:
        return
    q_weight, k_weight = norm_weights or (qkv, qkv)
    prepare_qkv_kernel[(num_tokens, triton.cdiv(all_heads, _HEADS))](
        qkv, out, q_weight, k_weight, cos, sin, locations, k_buffer, v_buffer,
        eps, 1.0 / k_scale, 1.0 / v_scale, k_buffer.stride(0), v_buffer.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HAS_NORM=norm_weights is not None,
        IS_PLUS_ONE=is_plus_one, LARGEST=_LARGEST_FP8 if k_buffer.dtype == torch.float8_e4m3fn else 0,
        BLOCK_H=_HEADS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), **pdl_options(pdl),
    )  # fmt: skip
