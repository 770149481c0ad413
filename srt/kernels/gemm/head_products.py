"""Products of a few rows with a matrix for each head: queries taken into the space of latents, and results taken out of it.

Reading the matrices takes all of the time. A program holds its part of one in registers, and requests it before it waits for its inputs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from srt.kernels.build.jit import cdiv, kernel, next_power_of_2
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

MOST_ROWS: Final = 2
"""Limit measured on an H200 with 16 heads. Three rows are in no graph of the default sizes, and four take as long with cuBLAS."""
_ELEMENTS: Final = 4096  # of a matrix, in a program


@kernel(one_variant_for=())
def head_products_kernel(
    x_ptr: tl.tensor,  # [ROWS, heads, K]
    w_ptr: tl.tensor,  # [heads, N, K], of any strides
    out_ptr: tl.tensor,  # [ROWS, heads, N]
    x_row_stride: tl.tensor,
    x_head_stride: tl.tensor,
    w_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, head) computes block b of the head's outputs, for all rows."""
    let_next_start(PDL)
    head = tl.program_id(1).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    weights = tl.load(
        w_ptr + head * w_head_stride + n[:, None] * N_STRIDE + k[None, :] * K_STRIDE, mask=inside, other=0.0
    ).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_row_stride + head * x_head_stride + k, mask=k < K, other=0.0).to(tl.float32)
        product = tl.sum(weights * x[None, :], 1)
        to = out_ptr + row * out_row_stride + head * out_head_stride + n
        tl.store(to, product.to(out_ptr.dtype.element_ty), mask=n < N)


def head_products(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, pdl: int = 0) -> None:
    """Store the products of x [rows, heads, k] with the heads' matrices [heads, n, k] in `out` [rows, heads, n].

    The last dimensions of x and out are contiguous, everything else may have any strides. If `pdl` is LATE, all kernels before this one
    have ended when the next one starts.
    """
    (rows, heads, k), n = x.shape, weights.shape[1]
    assert weights.shape == (heads, n, k) and out.shape == (rows, heads, n), (x.shape, weights.shape, out.shape)
    assert x.stride(2) == out.stride(2) == 1, (x.stride(), out.stride())
    if not rows:
        return
    block_k = next_power_of_2(k)
    block_n = min(max(_ELEMENTS // block_k, 1), next_power_of_2(n))
    head_products_kernel[(cdiv(n, block_n), heads)](
        x, weights, out, *x.stride()[:2], weights.stride(0), *out.stride()[:2], N=n, K=k, N_STRIDE=weights.stride(1),
        K_STRIDE=weights.stride(2), ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
