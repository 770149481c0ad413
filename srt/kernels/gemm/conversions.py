"""Conversions of quantised numbers in registers, for kernels in Triton."""

from __future__ import annotations

import triton.language as tl

from srt.kernels.build.jit import jit


@jit
def e4m3_to_bf16(numbers: tl.tensor) -> tl.tensor:
    """Convert bytes that are e4m3 numbers, on Hopper. Exponents are moved to their place, and the bias is corrected by a product."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, t;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 s, a, 0x80008000;
        and.b32 t, b, 0x80008000;
        shr.u32 a, a, 4;
        shr.u32 b, b, 4;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        or.b32 a, a, s;
        or.b32 b, b, t;
        mov.b32 s, 0x7B807B80;
        mul.rn.bf16x2 $0, a, s;
        mul.rn.bf16x2 $1, b, s;
        }
        """,
        "=r,=r,r",
        [numbers],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def halves_to_bf16(numbers: tl.tensor) -> tl.tensor:
    """Convert bytes to (low half - 8, high half - 8), on Hopper. 0x4300 with a small number in its last bits is 128 plus that number."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, m, a, b;
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        mov.b32 m, 0x43084308;
        prmt.b32 a, low, 0x43434343, 0x4140;
        prmt.b32 b, low, 0x43434343, 0x4342;
        sub.rn.bf16x2 $0, a, m;
        sub.rn.bf16x2 $1, b, m;
        prmt.b32 a, high, 0x43434343, 0x4140;
        prmt.b32 b, high, 0x43434343, 0x4342;
        sub.rn.bf16x2 $2, a, m;
        sub.rn.bf16x2 $3, b, m;
        }
        """,
        "=r,=r,=r,=r,r",
        [numbers],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@jit
def e4m3_to(numbers: tl.tensor, DOT_DTYPE: tl.constexpr) -> tl.tensor:
    """Convert bytes that are e4m3 numbers with operations that every GPU has."""
    bits = numbers.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DOT_DTYPE)  # 2 ** 120


@jit
def mxfp4_to(numbers: tl.tensor, DOT_DTYPE: tl.constexpr) -> tl.tensor:
    """Convert 4-bit floating-point numbers in the low halves of bytes: sign, two bits of the exponent, one of the fraction."""
    bits = numbers.to(tl.int32)
    moved = ((bits & 8) << 28) | ((bits & 7) << 22)
    return (moved.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DOT_DTYPE)  # 2 ** 126
