"""x Wᵀ for many rows of x, with inputs and weights of e4m3 numbers, which tensor cores multiply twice as fast as bfloat16.

cuBLASLt multiplies if each row of x and each output has one scale. If each 128 inputs have scales of their own, a Triton kernel does
where `block_gemm.py` cannot.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs

GROUP: Final = 128
_LARGEST: Final = tl.constexpr(448.0)
_LEAST_SCALE: Final = tl.constexpr(1e-12)
_MOST_SMALL_ROWS: Final = 64
WIDTH_UNIT: Final = 16
"""What cuBLASLt wants the widths of fp8 matrices to be multiples of."""
_MOST_TILE_ROWS: Final = 256
"""Rows of the largest tile of `block_gemm.py`."""
_TILES_TOGETHER: Final = 8
"""Tiles of rows whose programs run one after the other, so that they find their weights in the L2 cache."""


class RoundedRows(NamedTuple):
    """Rows as e4m3 numbers. Scales of groups of columns are next to each other in memory for each group."""

    numbers: torch.Tensor  # [rows, K] e4m3
    scales: torch.Tensor  # [rows, 1], or [rows, groups of 128 columns]; float32


@jit
def _scale_of(rows: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    return tl.maximum(tl.max(tl.abs(rows), axis) / _LARGEST, _LEAST_SCALE)


@jit
def _clamped(x: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@kernel(one_variant_for=("pitch",))
def norm_and_quantise_kernel(
    x_ptr: tl.tensor,  # [rows, SIZE]
    delta_ptr: tl.tensor,  # [rows, SIZE]
    weight_ptr: tl.tensor,  # [SIZE]
    numbers_ptr: tl.tensor,  # [rows, SIZE] e4m3
    scales_ptr: tl.tensor,  # [rows], or [SIZE / 128, pitch]; float32
    sum_ptr: tl.tensor,  # [rows, SIZE]
    eps: float,
    pitch: int,
    HAS_DELTA: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Norm a row of x, or of x + delta, which it also stores in `sum_ptr`; and quantise it by its largest element, or by each 128."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + columns, x, mask=inside)
        x = x.to(tl.float32)
    let_next_start_late(PDL)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if it had been stored
    if HAS_GROUPS:
        grouped = tl.reshape(normed, (BLOCK // 128, 128))
        scale, groups = _scale_of(grouped, 1), tl.arange(0, BLOCK // 128)
        tl.store(scales_ptr + groups * pitch + row, scale, mask=groups < SIZE // 128)
        rounded = tl.reshape(grouped / scale[:, None], (BLOCK,))
    else:
        scale = _scale_of(normed, 0)
        tl.store(scales_ptr + row, scale)
        rounded = normed / scale
    tl.store(numbers_ptr + row * SIZE + columns, _clamped(rounded).to(numbers_ptr.dtype.element_ty), mask=inside)


@kernel(one_variant_for=("scales_row_stride", "scales_group_stride"))
def quantise_rows_kernel(
    x_ptr: tl.tensor,  # [rows, K]
    given_ptr: tl.tensor,  # [1] float32: the scale, if it is not found here
    out_ptr: tl.tensor,  # [rows, K] e4m3
    scales_ptr: tl.tensor,  # [rows, 1], or [rows, K / 128] with strides; float32
    row_stride: int,
    scales_row_stride: int,
    scales_group_stride: int,
    K: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantise one row by its largest element, by the largest of each 128, or by a given scale."""
    GROUPS: tl.constexpr = (K + 127) // 128
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    let_next_start_late(PDL)
    if HAS_GROUPS:
        grouped = tl.reshape(x, (BLOCK // 128, 128))
        scale = _scale_of(grouped, 1)
        groups = tl.arange(0, BLOCK // 128)
        scales_at = scales_ptr + row * scales_row_stride + groups * scales_group_stride
        tl.store(scales_at, scale, mask=groups < GROUPS)
        x = tl.reshape(grouped / scale[:, None], (BLOCK,))
    else:
        if HAS_SCALE:
            scale = tl.load(given_ptr)
        else:
            scale = _scale_of(x, 0)
        tl.store(scales_ptr + row, scale)
        x = x / scale
    tl.store(out_ptr + row * K + columns, _clamped(x).to(out_ptr.dtype.element_ty), mask=columns < K)


@kernel(one_variant_for=("num_rows",))
def block_gemm_kernel(
    x_ptr: tl.tensor,  # [num_rows, K] e4m3
    x_scales_ptr: tl.tensor,  # [num_rows, K / 128]
    w_ptr: tl.tensor,  # [N, K] e4m3
    w_scales_ptr: tl.tensor,  # [K / 128, N]
    bias_ptr: tl.tensor,  # [N]
    out_ptr: tl.tensor,  # [num_rows, N]
    num_rows: int,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Compute a tile of the result. The product of each 128 inputs is scaled by itself."""
    GROUPS: tl.constexpr = (K + 127) // 128
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    together = TOGETHER * tiles_n
    first = tl.program_id(0) // together * TOGETHER
    height = min(tiles_m - first, TOGETHER)
    tile_m = first + tl.program_id(0) % together % height
    tile_n = tl.program_id(0) % together // height
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = rows < num_rows
    in_n = outputs < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(GROUPS):
        k = group * 128 + tl.arange(0, 128)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * K + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + outputs.to(tl.int64)[None, :] * K + k[:, None], mask=in_n[None, :] & (k < K)[:, None], other=0.0
        )
        x_scale = tl.load(x_scales_ptr + rows.to(tl.int64) * GROUPS + group, mask=in_m, other=0.0)
        w_scale = tl.load(w_scales_ptr + group * N + outputs, mask=in_n, other=0.0)
        acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=in_n, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def quantise_rows(
    x: torch.Tensor,
    *,
    has_groups: bool = False,
    by_group: bool = False,
    scale: torch.Tensor | None = None,
    pdl: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x as e4m3 numbers, and the scales [rows, 1], or [rows, groups of 128 columns]; a given `scale` is used for all.

    With `by_group` the scales of a group are next to each other in memory.
    """
    num_rows, k = x.shape
    assert x.stride(1) == 1 or k == 1, x.stride()
    out = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    width = triton.cdiv(k, GROUP) if has_groups else 1
    scales = _new_scales(num_rows, width, x.device, by_group)
    block = max(GROUP, triton.next_power_of_2(k))
    quantise_rows_kernel[(num_rows,)](
        x, scales if scale is None else scale, out, scales, x.stride(0), *scales.stride(),
        K=k, HAS_GROUPS=has_groups, HAS_SCALE=scale is not None, BLOCK=block,
        num_warps=min(max(block // 512, 4), 16), **pdl_options(pdl),
    )  # fmt: skip
    return out, scales


def fp8_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return x Wᵀ + b, with inputs quantised by row, or by the given scale; `scales` are [1, outputs]. bfloat16 only."""
    product = multiply_rounded(RoundedRows(*quantise_rows(x, scale=scale)), weight, scales, x.dtype)
    return product if bias is None else product.add_(bias)


def multiply_rounded(x: RoundedRows, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x Wᵀ in a dtype; `scales` are [1, outputs]. Both sizes of the weight must be multiples of WIDTH_UNIT."""
    return torch._scaled_mm(
        x.numbers, weight.t(), scale_a=x.scales, scale_b=scales, out_dtype=dtype, use_fast_accum=True
    )


def norm_and_quantise(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    has_groups: bool = False,
    pdl: int = 0,
) -> tuple[RoundedRows, torch.Tensor]:
    """Return the norm of x + delta, quantised by the largest element of each row or of each 128, and x + delta in the type of x."""
    num_rows, size = x.shape
    assert not (has_groups and size % GROUP)
    assert x.is_contiguous() and weight.shape == (size,) and (delta is None or delta.is_contiguous())
    numbers = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = _new_scales(num_rows, size // GROUP if has_groups else 1, x.device, has_groups)
    total = x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    norm_and_quantise_kernel[(num_rows,)](
        x, x if delta is None else delta, weight, numbers, scales, total, eps, scales.stride(1),
        HAS_DELTA=delta is not None, HAS_GROUPS=has_groups, SIZE=size, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **pdl_options(pdl),
    )  # fmt: skip
    return RoundedRows(numbers, scales), total


def _new_scales(num_rows: int, width: int, device: torch.device, by_group: bool) -> torch.Tensor:
    """Return memory for scales [rows, width]; if those of a group are next to each other, with room for whole tiles of rows."""
    if not by_group:
        return torch.empty((num_rows, width), dtype=torch.float32, device=device)
    padded = -(-num_rows // _MOST_TILE_ROWS) * _MOST_TILE_ROWS
    return torch.empty((width, padded), dtype=torch.float32, device=device)[:, :num_rows].t()


def block_gemm(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x Wᵀ + b, with each 128 inputs of a row quantised by themselves; `scales` are [groups of 128 inputs, outputs]."""
    numbers, x_scales = quantise_rows(x, has_groups=True)
    (num_rows, k), n = x.shape, len(weight)
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    block_m = 64 if num_rows <= _MOST_SMALL_ROWS else 128
    block_gemm_kernel[(triton.cdiv(num_rows, block_m) * triton.cdiv(n, 128),)](
        numbers, x_scales, weight, scales, x if bias is None else bias, out, num_rows,
        N=n, K=k, HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=128, TOGETHER=_TILES_TOGETHER,
        num_warps=4 if block_m == 64 else 8, num_stages=4,
    )  # fmt: skip
    return out
