"""Products of a tile of rows with a tile of an expert's quantised weights, for the kernels of experts.

Weights are bytes: one number [outputs, K], or two numbers of 4 bits [outputs, K / 2], of which each 16 bytes have the first 16 of 32
inputs in their low halves (`srt/layers/quantization/int_weight.py`). Scales and zero points are [groups of inputs, outputs].
"""

from __future__ import annotations

import triton.language as tl

from srt.kernels.build.jit import jit
from srt.kernels.gemm.conversions import e4m3_to, e4m3_to_bf16, mxfp4_to

PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
INT8 = tl.constexpr(2)
SIGNED8 = tl.constexpr(3)
INT4 = tl.constexpr(4)  # from here on there are two numbers in a byte
MXFP4 = tl.constexpr(5)


@jit
def of_groups(
    at: tl.tensor,  # [BLOCK_N] pointers to the values of the first group
    is_column: tl.tensor,  # [BLOCK_N]
    first: int,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return the scales or zero points of ROWS rows, of PER_ROW inputs each, from input `first` on: [ROWS or 1, BLOCK_N]."""
    if ROWS * PER_ROW <= GROUP:
        return tl.load(at + (first // GROUP) * N, mask=is_column, other=0)[None, :]
    else:
        groups = first // GROUP + tl.arange(0, ROWS * PER_ROW // GROUP)
        inside = is_column[None, :] & (groups * GROUP < K)[:, None]
        values = tl.load(at[None, :] + groups[:, None] * N, mask=inside, other=0)
        spread = tl.broadcast_to(values[:, None, :], ROWS * PER_ROW // GROUP, GROUP // PER_ROW, is_column.shape[0])
        return tl.reshape(spread, ROWS, is_column.shape[0])


@jit
def values_of(numbers: tl.tensor, KIND: tl.constexpr, HOPPER: tl.constexpr) -> tl.tensor:
    """Return what plain or e4m3 numbers stand for, in float32, without scales."""
    if KIND != E4M3:
        return numbers.to(tl.float32)
    elif HOPPER:
        return e4m3_to_bf16(numbers).to(tl.float32)
    else:
        return e4m3_to(numbers, tl.float32)


@jit
def add_bytes(
    acc: tl.tensor,  # [BLOCK_M, BLOCK_N] f32
    x: tl.tensor,  # [BLOCK_M, BLOCK_K]
    weight_at: tl.tensor,  # [BLOCK_K, BLOCK_N] pointers
    is_weight: tl.tensor,  # [BLOCK_K, BLOCK_N]
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    is_column: tl.tensor,
    first: int,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    HOPPER: tl.constexpr,
) -> tl.tensor:
    """Return acc plus the product with weights of one byte. Groups of e4m3 numbers are not smaller than BLOCK_K."""
    numbers = tl.load(weight_at, mask=is_weight, other=0)
    scale = of_groups(scales_at, is_column, first, K, N, GROUP, 1, BLOCK_K).to(tl.float32)
    if KIND == E4M3:
        weight = e4m3_to_bf16(numbers) if HOPPER else e4m3_to(numbers, DOT)
        return acc + tl.dot(x, weight, input_precision="ieee") * scale
    else:
        if KIND == SIGNED8:
            values = numbers.to(tl.int8, bitcast=True).to(tl.float32) * scale
        elif HAS_ZEROS:
            zeros = of_groups(zeros_at, is_column, first, K, N, GROUP, 1, BLOCK_K).to(tl.float32)
            values = (numbers.to(tl.float32) - zeros) * scale
        else:
            values = (numbers.to(tl.float32) - 128.0) * scale
        return tl.dot(x, values.to(DOT), acc, input_precision="ieee")


@jit
def add_halves(
    acc: tl.tensor,  # [BLOCK_M, BLOCK_N] f32
    low_x: tl.tensor,  # [BLOCK_M, BLOCK_K / 2]: the inputs of the low halves
    high_x: tl.tensor,
    weight_at: tl.tensor,  # [BLOCK_K / 2, BLOCK_N] pointers
    is_weight: tl.tensor,  # [BLOCK_K / 2, BLOCK_N]
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    is_column: tl.tensor,
    first: int,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Return acc plus the product with weights of which a byte has two."""
    numbers = tl.load(weight_at, mask=is_weight, other=0)
    stored = of_groups(scales_at, is_column, first, K, N, GROUP, 2, BLOCK_K // 2)
    if KIND == MXFP4:
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        low = mxfp4_to(numbers & 15, tl.float32) * scale
        high = mxfp4_to(numbers >> 4, tl.float32) * scale
    else:
        scale = stored.to(tl.float32)
        if HAS_ZEROS:
            zeros = of_groups(zeros_at, is_column, first, K, N, GROUP, 2, BLOCK_K // 2).to(tl.float32)
            low = ((numbers & 15).to(tl.float32) - zeros) * scale
            high = ((numbers >> 4).to(tl.float32) - zeros) * scale
        else:
            low = ((numbers & 15).to(tl.float32) - 8.0) * scale
            high = ((numbers >> 4).to(tl.float32) - 8.0) * scale
    acc = tl.dot(low_x, low.to(DOT), acc, input_precision="ieee")
    return tl.dot(high_x, high.to(DOT), acc, input_precision="ieee")
