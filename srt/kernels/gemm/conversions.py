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
def quarters_to_bf16(numbers: tl.tensor) -> tl.tensor:
    """Convert words of 16 bits to their four 4-bit numbers, the lowest first, minus 8, on Hopper.

    0x4300 with a small number in its last bits is 128 plus that number.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, m;
        mov.b32 m, 0x43084308;
        shr.u32 a, $4, 4;
        shr.u32 b, $4, 8;
        shr.u32 c, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $0, $0, m;
        sub.rn.bf16x2 $1, $1, m;
        sub.rn.bf16x2 $2, $2, m;
        sub.rn.bf16x2 $3, $3, m;
        }
        """,
        "=r,=r,=r,=r,r",
        [numbers],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
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
