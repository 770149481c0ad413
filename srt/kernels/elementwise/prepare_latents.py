"""Prepare a step's queries and latents (MLA) for attention: rotate queries, norm, rotate and store latents, in one kernel."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

_HEADS: Final = 16


@jit
def _rotate_pair(
    first_ptr: tl.tensor, second_ptr: tl.tensor, inside: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tl.tuple:
    """Return the rotated numbers as float32."""
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@kernel(one_variant_for=("locations_ptr",))
def prepare_latents_kernel(
    q_ptr: tl.tensor,  # [tokens, HEADS * HEAD_DIM]
    latents_ptr: tl.tensor,  # [tokens, RANK + ROPE]
    norm_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [tokens, ROPE / 2] float32
    sin_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    memory_ptr: tl.tensor,  # [locations, RANK + ROPE]
    eps: float,
    q_token_stride: tl.tensor,
    latents_token_stride: tl.tensor,
    location_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (t, b) rotates the last ROPE elements of block b of token t's queries; the last program stores the token's latent."""
    let_next_start(PDL)
    HALF: tl.constexpr = ROPE // 2
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs, ranks = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_R)
    in_pairs = pairs < HALF
    firsts, seconds = (2 * pairs, 2 * pairs + 1) if INTERLEAVED else (pairs, HALF + pairs)
    norm_weight = tl.load(norm_weight_ptr + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=in_pairs, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=in_pairs, other=0.0)
    let_next_start_late(PDL)
    if block * BLOCK_H < HEADS:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < HEADS)[:, None] & in_pairs[None, :]
        row = q_ptr + token * q_token_stride + (heads * HEAD_DIM + HEAD_DIM - ROPE)[:, None]
        at_first, at_second = row + firsts[None, :], row + seconds[None, :]
        query_1, query_2 = _rotate_pair(at_first, at_second, inside, cos[None, :], sin[None, :])
        tl.store(at_first, query_1.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(at_second, query_2.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        latent = latents_ptr + token * latents_token_stride
        stored = memory_ptr + tl.load(locations_ptr + token).to(tl.int64) * location_stride
        x = tl.load(latent + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * norm_weight
        tl.store(stored + ranks, normed.to(memory_ptr.dtype.element_ty), mask=ranks < RANK)
        last_1, last_2 = _rotate_pair(latent + RANK + firsts, latent + RANK + seconds, in_pairs, cos, sin)
        tl.store(stored + RANK + firsts, last_1.to(memory_ptr.dtype.element_ty), mask=in_pairs)
        tl.store(stored + RANK + seconds, last_2.to(memory_ptr.dtype.element_ty), mask=in_pairs)


def prepare_latents(
    q: torch.Tensor,
    head_dim: int,
    latents: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_interleaved: bool,
    locations: torch.Tensor,
    memory: torch.Tensor,
    pdl: int = 0,
) -> None:
    """Rotate the last elements of each head of q [tokens, heads * head_dim] in place, and store the normed and rotated latents.

    cos and sin are [tokens, 1, pairs], for the last elements of heads and latents. The rest of a latent is normed. `memory` is
    [locations, 1, latent_dim].
    """
    num_tokens, width = q.shape
    half, rank = cos.shape[-1], len(norm_weight)
    assert latents.shape == (num_tokens, rank + 2 * half) and memory.shape[1:] == (1, rank + 2 * half), latents.shape
    assert q.stride(1) == latents.stride(1) == memory.stride(2) == 1, (q.stride(), latents.stride(), memory.stride())
    if not num_tokens:
        return
    num_heads = width // head_dim
    prepare_latents_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS) + 1)](
        q, latents, norm_weight, cos, sin, locations, memory, eps, q.stride(0), latents.stride(0), memory.stride(0),
        HEADS=num_heads, HEAD_DIM=head_dim, ROPE=2 * half, RANK=rank, INTERLEAVED=is_interleaved, BLOCK_H=_HEADS,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_R=triton.next_power_of_2(rank), **pdl_options(pdl),
    )  # fmt: skip
