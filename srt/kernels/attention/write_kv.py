"""Store a step's new keys and values in the paged KV memory."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.attention.paged_kv import PagedKV, check_heads
from srt.kernels.build.jit import kernel

_MAX_BLOCK: Final = 4096


@kernel(one_variant_for=("locations_ptr",))
def write_kv_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    k_buffer_ptr: tl.tensor,
    v_buffer_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    v_token_stride: tl.tensor,
    k_location_stride: tl.tensor,
    v_location_stride: tl.tensor,
    k_scale: float,
    v_scale: float,
    AS_FP8: tl.constexpr,  # divide by the scales, and clamp to the type's range
    ROW: tl.constexpr,  # elements of one token: kv_heads * head_dim
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, b) copies block b of token t's keys and values to that token's location."""
    # 64-bit offsets: a KV memory has more than 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < ROW
    location = tl.load(locations_ptr + token).to(tl.int64)
    k = tl.load(k_ptr + token * k_token_stride + columns, mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + columns, mask=inside)
    if AS_FP8:
        k = tl.clamp(k.to(tl.float32) / k_scale, -448.0, 448.0).to(k_buffer_ptr.dtype.element_ty)
        v = tl.clamp(v.to(tl.float32) / v_scale, -448.0, 448.0).to(v_buffer_ptr.dtype.element_ty)
    tl.store(k_buffer_ptr + location * k_location_stride + columns, k, mask=inside)
    tl.store(v_buffer_ptr + location * v_location_stride + columns, v, mask=inside)


def write_kv(k: torch.Tensor, v: torch.Tensor, locations: torch.Tensor, kv: PagedKV) -> None:
    """Store row t of k and v ([tokens, kv_heads, head_dim]) at flat location `locations[t]` of the buffers.

    Locations must be distinct, except that padding rows may share one, whose contents are then a mixture. k and v may be slices of wider
    rows; each token's elements are contiguous, in them and in the buffers. Buffers of float8_e4m3fn hold the values divided by the scales.
    """
    num_tokens, num_heads, head_dim = k.shape
    k_buffer, v_buffer = kv.k_buffer, kv.v_buffer
    as_fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert as_fp8 or k.dtype == k_buffer.dtype, (k.dtype, k_buffer.dtype)
    assert as_fp8 or v.dtype == v_buffer.dtype, (v.dtype, v_buffer.dtype)
    for tensor in (k, v, k_buffer, v_buffer):
        check_heads(tensor, num_heads, head_dim)
    if num_tokens == 0:
        return
    row = num_heads * head_dim
    block = min(triton.next_power_of_2(row), _MAX_BLOCK)
    write_kv_kernel[(num_tokens, triton.cdiv(row, block))](
        k, v, locations, k_buffer, v_buffer, k.stride(0), v.stride(0), k_buffer.stride(0), v_buffer.stride(0),
        kv.k_scale, kv.v_scale, AS_FP8=as_fp8, ROW=row, BLOCK=block,
    )  # fmt: skip
