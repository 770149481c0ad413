"""y = x Wᵀ for one to a few rows of x, where reading W takes all of the time; fused with the operations before and after it.

Each program holds whole rows of W. These do not depend on the previous kernel, so the program requests them before it waits for its
inputs. With dependent launches, reading one layer's weights thus hides the end of the previous layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs

_SMALL: Final = 1 << 24  # elements of a weight
_SHORT: Final = 3072  # elements in a row of a weight
_LONG: Final = 1 << 16  # outputs of an LM head


def max_rows(weight: torch.Tensor) -> int:
    """Return the number of rows of x up to which this kernel beats cuBLAS on an H200; with more, reading and multiplying them shows."""
    return 3 if weight.numel() <= _SMALL and weight.shape[1] <= _SHORT else 1


@jit
def _none() -> tl.tuple:
    return ()


@jit
def _with(items: tl.tuple, item: tl.tensor) -> tl.tuple:
    return items + (item,)  # noqa: RUF005  Triton's compiler does not support unpacking


@jit
def _stream(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@jit
def _factor(weight: tl.tensor, IS_PLUS_ONE: tl.constexpr) -> tl.tensor:
    """Return the factor of a norm with this weight."""
    factor = weight.to(tl.float32)
    if IS_PLUS_ONE:
        factor += 1.0
    return factor


@kernel(one_variant_for=())
def gemv_kernel(
    x_ptr: tl.tensor,  # [ROWS, K]
    delta_ptr: tl.tensor,  # [ROWS, K]: added to x first
    delta_weight_ptr: tl.tensor,  # [K]: of a norm of delta before that
    norm_weight_ptr: tl.tensor,  # [K]
    w_ptr: tl.tensor,  # [N, K], or [2 N, K] where GATED
    scales_ptr: tl.tensor,  # [N], or [2 N] where GATED: float32 factors of the rows of W
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,  # [ROWS, N]: added to the product
    out_ptr: tl.tensor,  # [ROWS, N]
    sum_ptr: tl.tensor,  # [ROWS, K]: x + delta
    delta_eps: float,
    eps: float,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PLUS_ONE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N columns of the output for all rows, in each program. Sums are float32; a norm scales the sum, not the summands."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_next_start(PDL)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    in_n = outputs < N
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * K
    weights = _none()
    gate_weights = _none()
    norms = _none()
    delta_norms = _none()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + columns
        inside = in_n[:, None] & (k < K)[None, :]
        if GATED:
            gate_weights = _with(gate_weights, _stream(w_rows + k[None, :], inside))
            weights = _with(weights, _stream(w_rows + N * K + k[None, :], inside))
        else:
            weights = _with(weights, _stream(w_rows + k[None, :], inside))
        if HAS_NORM:
            norms = _with(norms, tl.load(norm_weight_ptr + k, mask=k < K, other=0.0))
        if HAS_DELTA_NORM:
            delta_norms = _with(delta_norms, tl.load(delta_weight_ptr + k, mask=k < K, other=0.0))
    scales = tl.full([BLOCK_N], 1.0, tl.float32)
    gate_scales = scales
    if HAS_SCALES:
        scales = tl.load(scales_ptr + outputs + (N if GATED else 0), mask=in_n, other=0.0)
        if GATED:
            gate_scales = tl.load(scales_ptr + outputs, mask=in_n, other=0.0)
    bias = tl.zeros([BLOCK_N], tl.float32)
    gate_bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs + (N if GATED else 0), mask=in_n, other=0.0).to(tl.float32)
        if GATED:
            gate_bias = tl.load(bias_ptr + outputs, mask=in_n, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)

    for row in tl.static_range(ROWS):
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        gate_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        delta_scale = 1.0
        if HAS_DELTA_NORM:
            delta_squares = tl.zeros([BLOCK_K], tl.float32)
            for step in tl.static_range(STEPS):
                k = step * BLOCK_K + columns
                delta = tl.load(delta_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
                delta_squares += delta * delta
            delta_scale = tl.rsqrt(tl.sum(delta_squares, 0) / K + delta_eps)
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
            if HAS_DELTA:
                delta = tl.load(delta_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
                if HAS_DELTA_NORM:
                    delta *= delta_scale * _factor(delta_norms[step], IS_PLUS_ONE)
                    delta = delta.to(sum_ptr.dtype.element_ty).to(tl.float32)
                x += delta
                x = x.to(sum_ptr.dtype.element_ty)
                if tl.program_id(0) == 0:
                    tl.store(sum_ptr + row * K + k, x, mask=k < K)
                x = x.to(tl.float32)
            if HAS_NORM:
                squares += x * x
                x *= _factor(norms[step], IS_PLUS_ONE)
            acc += weights[step].to(tl.float32) * x[None, :]
            if GATED:
                gate_acc += gate_weights[step].to(tl.float32) * x[None, :]
        product = tl.sum(acc, 1)
        gate = tl.sum(gate_acc, 1) if GATED else product
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
            product *= scale
            gate *= scale
        if HAS_SCALES:
            product *= scales
            gate *= gate_scales
        product += bias
        if GATED:
            gate += gate_bias
            slope = gate
            if IS_GELU:  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
                slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            product *= gate * tl.sigmoid(slope)
        if HAS_RESIDUAL:
            product += tl.load(residual_ptr + row * N + outputs, mask=in_n, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * N + outputs, product.to(out_ptr.dtype.element_ty), mask=in_n)


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """The tiles into which a product is cut."""

    block_n: int
    block_k: int
    num_warps: int

    @classmethod
    def choose(cls, n: int, k: int, is_gated: bool, item_bytes: int = 2) -> GemvTiles:
        """Return the tiles for n outputs, of gate and up together, as measured on an H200.

        A program keeps its weights in registers: about 8,192 elements, or twice as many if W has many rows but is not an LM head. Weights
        of one byte were not measured: a program has as many bytes of them.
        """
        elements = 16_384 if not is_gated and 6144 <= n < _LONG and 4096 <= k <= 8192 else 8192
        elements = elements * 2 // item_bytes if item_bytes < 2 else elements
        rows = max(1, elements // k // (2 if is_gated else 1))
        block_n = 1 << (rows.bit_length() - 1)
        block_k = min(2048 if block_n > 1 and k >= 4096 else 1024, triton.next_power_of_2(k))
        return cls(block_n, block_k, num_warps=8 if block_n * k > 12_288 and block_n > 1 else 4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: GemvTiles,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    delta_weight: torch.Tensor | None = None,
    delta_eps: float = 0.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_plus_one: bool = False,
    is_gated: bool = False,
    is_gelu: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + delta) @ weight.T + bias + residual, x + delta), each part only if it is given.

    With `is_gated` the product becomes silu(first half) * second half, with `is_gelu` gelu(first half) * second half, by the
    approximation with tanh. With `delta_weight` delta is normed and rounded before it is added, and with `is_plus_one` the factors of both
    norms are 1 + weight. The norm is applied to the rounded sum. `scales` are float32 factors of the rows of `weight`, which may then
    have e4m3 numbers.
    """
    num_rows, k = x.shape
    n = weight.shape[0] // (2 if is_gated else 1)
    for tensor in (x, weight, delta, residual, out):
        assert tensor is None or tensor.is_contiguous(), tensor.stride()
    assert weight.shape[1] == k, (x.shape, weight.shape)
    if out is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, n), (out.shape, num_rows, n)
    total = x if delta is None else torch.empty_like(x)
    gemv_kernel[(triton.cdiv(n, tiles.block_n),)](
        x, x if delta is None else delta, x if delta_weight is None else delta_weight, x if norm_weight is None else norm_weight, weight,
        x if scales is None else scales, x if bias is None else bias, x if residual is None else residual, out, total, delta_eps, eps,
        N=n, K=k, ROWS=num_rows, GATED=is_gated, IS_GELU=is_gelu, HAS_DELTA=delta is not None,
        HAS_DELTA_NORM=delta_weight is not None, IS_PLUS_ONE=is_plus_one, HAS_NORM=norm_weight is not None,
        HAS_SCALES=scales is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return out, total
