"""x Wᵀ with one order of sums for each shape of W: the result of a row does not depend, to the bit, on the number of rows beside it.

The sum over K is cut into splits whose number follows from N and K alone. A split is added up in order by one kind of instruction, and
the splits are added in order in float32. Tiles have weights in their first dimension and rows in their second: Hopper's instruction for
matrices has 64 of the former and any multiple of 8 of the latter, and computes each element alike. So few rows get small tiles, and
many rows large ones, without another result. Of float32 all tiles are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import IS_INTERPRETED, dot_dtype, jit, kernel
from srt.kernels.build.pdl import (
    EARLY,
    let_next_start,
    let_next_start_late,
    pdl_for,
    pdl_options,
    prefetch,
    wait_for_inputs,
)

_FEWEST_TILES: Final = 100  # tiles of 64 weights and splits together: enough for most multiprocessors of an H200
_LEAST_SPLIT: Final = 512  # shortest split of a sum
_MOST_PARTED_ROWS: Final = 256  # with more rows, one program adds all splits of its tile
_SUM_BLOCK: Final = 1024
UNIT: Final = 128  # splits begin at its multiples
PREFETCHED: Final = 512  # elements of each row of weights that a program requests while the previous kernel runs
INTERPRETED = tl.constexpr(IS_INTERPRETED)
LINE = tl.constexpr(64)  # elements of a cache line


@dataclass(frozen=True, slots=True)
class Splits:
    """How the sum over K is cut: the same for every number of rows."""

    num: int
    units: int  # UNIT elements each; the last split may be shorter

    @classmethod
    def of(cls, n: int, k: int) -> Splits:
        num, tiles = 1, triton.cdiv(n, 64)
        while num * tiles < _FEWEST_TILES and k >= 2 * num * _LEAST_SPLIT:
            num *= 2
        units = triton.cdiv(triton.cdiv(k, num), UNIT)
        return cls(triton.cdiv(k, units * UNIT), units)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tile of a program: weights, rows, elements of K at once. None of them changes a bit of the result."""

    weights: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, num_rows: int, num_splits: int, dtype: torch.dtype) -> ProductTiles:
        """Return the fastest tile for this number of rows, as measured on an H200. That of float32 is always the same."""
        if dtype is torch.float32:
            return cls(64, 32, 32, num_warps=4, num_stages=2)
        if num_rows > _MOST_PARTED_ROWS:
            return cls(128, 256, 64, 8, 3) if num_splits == 1 else cls(128, 128, 64, 8, 4)
        rows = min(max(16, triton.next_power_of_2(num_rows)), 128)
        if rows == 16 and num_splits <= 2:
            return cls(128, rows, 64, 8, 4)
        if rows <= 32:
            return cls(64, rows, 128, 4, 4)
        return cls(64, rows, 128, 4, 3) if rows == 64 and num_splits > 1 else cls(64, rows, 64, 4, 4)


@jit
def _gated(gates: tl.tensor, ups: tl.tensor) -> tl.tensor:
    """Return silu(gates) * ups, with the instructions that `row_tiles.cuh` has."""
    if INTERPRETED:
        return gates * tl.sigmoid(gates) * ups
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.f32 t, t; add.f32 t, t, 0f3F800000;"
        " div.approx.f32 t, $1, t; mul.f32 $0, t, $2; }",
        "=f,f,f", [gates, ups], tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@kernel(one_variant_for=("num_rows", "split_units"))
def invariant_product_kernel(
    x_ptr: tl.tensor,  # [rows, k]
    weight_ptr: tl.tensor,  # [n, k]; IS_GATED: [2 n, k]
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [rows, n]
    parts_ptr: tl.tensor,  # [splits or 1, rows, n] float32
    num_rows: tl.tensor,
    row_stride: tl.tensor,  # k
    out_row_stride: tl.tensor,  # n
    split_units: tl.tensor,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTED: tl.constexpr,  # a program adds one split, and stores it in `parts_ptr`
    IS_RAW: tl.constexpr,  # the sum is stored in `parts_ptr`, without bias, not in `out_ptr`
    IS_GATED: tl.constexpr,  # a tile has gates in its first half and ups in its second; silu(gate) * up is stored
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # k is a multiple of BLOCK_K
    DOT_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (tile, split) computes a tile. Neighbours share rows within a band of BAND tiles of weights."""
    let_next_start(PDL)
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N  # columns of the result
    num_row_tiles = tl.cdiv(num_rows, BLOCK_R)
    num_tiles = tl.cdiv(out_row_stride, WIDTH)
    band = tl.program_id(0) // (BAND * num_row_tiles)
    band_size = tl.minimum(num_tiles - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * num_row_tiles)
    first_column = (band * BAND + place % band_size) * WIDTH
    rows = place // band_size * BLOCK_R + tl.arange(0, BLOCK_R)
    lanes = tl.arange(0, BLOCK_N)
    # Outside the matrices the last row is read again: no result of it is stored.
    if IS_GATED:
        weights_at = tl.minimum(first_column + lanes % WIDTH, out_row_stride - 1) + lanes // WIDTH * out_row_stride
    else:
        weights_at = tl.minimum(first_column + lanes, out_row_stride - 1)
    x_rows = x_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * row_stride
    weight_rows = weight_ptr + weights_at.to(tl.int64)[:, None] * row_stride
    depths = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * split_units * UNIT if PARTED else 0
    end = tl.minimum(first + split_units * UNIT, row_stride) if PARTED else row_stride
    if PDL == EARLY and PREFETCHED > 0:
        lines = first + tl.arange(0, PREFETCHED // LINE) * LINE
        prefetch(weight_rows + tl.minimum(lines, row_stride - 1)[None, :])
    wait_for_inputs(PDL)

    # One loop over all splits: a loop for each would wait for the first loads of each.
    ADDS: tl.constexpr = SPLITS > 1 and not PARTED
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(first, end, BLOCK_K):
        if EVEN:
            weights = tl.load(weight_rows + (start + depths)[None, :])
            x = tl.load(x_rows + (start + depths)[None, :])
        else:
            is_depth = (start + depths < row_stride)[None, :]
            weights = tl.load(weight_rows + (start + depths)[None, :], mask=is_depth, other=0.0)
            x = tl.load(x_rows + (start + depths)[None, :], mask=is_depth, other=0.0)
        acc = tl.dot(weights.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), acc, input_precision="ieee")
        if ADDS:
            if ((start + BLOCK_K) % (split_units * UNIT) == 0) | (start + BLOCK_K >= end):
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if not ADDS:
        total = acc
    let_next_start_late(PDL)

    if IS_GATED:
        gates, ups = tl.split(tl.permute(tl.reshape(total, [2, WIDTH, BLOCK_R]), (1, 2, 0)))
        total = _gated(gates, ups)
    columns = first_column + tl.arange(0, WIDTH)
    inside = (rows < num_rows)[None, :] & (columns < out_row_stride)[:, None]
    offsets = rows.to(tl.int64)[None, :] * out_row_stride + columns[:, None]
    if IS_RAW:
        part = tl.program_id(1).to(tl.int64) * num_rows * out_row_stride
        tl.store(parts_ptr + part + offsets, total, mask=inside)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < out_row_stride, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(one_variant_for=("num_rows", "num_parts"))
def sum_parts_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    out_row_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, r) adds the parts of block b of row r in order."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_row_stride
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts_ptr + (part * num_rows + row) * out_row_stride + columns, mask=inside, other=0.0)
    let_next_start_late(PDL)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row_stride + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def invariant_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: ProductTiles | None = None,
) -> torch.Tensor:
    """Return x [rows, k] times weight [n, k] transposed, plus `bias`, in the type of x; the sums are float32.

    `tiles` replaces the choice by the number of rows.
    """
    num_rows, n = len(x), len(weight)
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (num_rows, n) and out.is_contiguous(), (out.shape, out.stride())
    if num_rows == 0:
        return out
    if not _is_parted(num_rows, Splits.of(*weight.shape)):
        _launch(x, weight, bias, out, None, False, tiles)
        return out
    parts, pdl = invariant_parts(x, weight, tiles), pdl_of(x)
    sum_parts_kernel[(triton.cdiv(n, _SUM_BLOCK), num_rows)](
        parts, weight if bias is None else bias, out, num_rows, len(parts), n,
        HAS_BIAS=bias is not None, BLOCK=_SUM_BLOCK, **pdl_options(pdl),
    )  # fmt: skip
    return out


def invariant_parts(x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles | None = None) -> torch.Tensor:
    """Return the product as parts [parts, rows, n] float32, whose sum in order is the product."""
    splits = Splits.of(*weight.shape)
    num_parts = splits.num if _is_parted(len(x), splits) else 1
    parts = torch.empty((num_parts, len(x), len(weight)), dtype=torch.float32, device=x.device)
    if len(x):
        _launch(x, weight, None, None, parts, False, tiles)
    return parts


def can_be_gated(weight: torch.Tensor) -> bool:
    """Return whether `gated_product` serves these gates and ups: whether they are enough without splits."""
    return Splits.of(*weight.shape).num == 1


def gated_product(x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles | None = None) -> torch.Tensor:
    """Return silu(x Gᵀ) * (x Uᵀ) for weight [2 n, k], which has G above U; rounded once."""
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    if len(x):
        _launch(x, weight, None, out, None, True, tiles)
    return out


def pdl_of(x: torch.Tensor) -> int:
    """Return the kind of dependent launch for these rows. On a GPU, deterministic servers run on Hopper only."""
    return pdl_for(len(x)) if x.is_cuda else 0


def _is_parted(num_rows: int, splits: Splits) -> bool:
    return splits.num > 1 and num_rows <= _MOST_PARTED_ROWS


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    parts: torch.Tensor | None,
    is_gated: bool,
    tiles: ProductTiles | None,
) -> None:
    """Store the product in `out`, or in `parts`."""
    num_rows, k = x.shape
    assert weight.shape[1] == k and weight.is_contiguous(), (weight.shape, weight.stride())
    x, splits = x.contiguous(), Splits.of(*weight.shape)
    n = len(weight) // 2 if is_gated else len(weight)
    tiles = tiles or ProductTiles.choose(num_rows, splits.num, x.dtype)
    num_parts = 1 if parts is None else len(parts)
    width = tiles.weights // 2 if is_gated else tiles.weights
    invariant_product_kernel[(triton.cdiv(n, width) * triton.cdiv(num_rows, tiles.rows), num_parts)](
        x, weight, weight if bias is None else bias, x if out is None else out, x if parts is None else parts,
        num_rows, k, n, splits.units,
        SPLITS=splits.num, UNIT=UNIT, PARTED=num_parts > 1, IS_RAW=parts is not None, IS_GATED=is_gated,
        HAS_BIAS=bias is not None, EVEN=k % tiles.depth == 0, DOT_DTYPE=dot_dtype(x.dtype),
        BLOCK_N=tiles.weights, BLOCK_R=tiles.rows, BLOCK_K=tiles.depth, BAND=8, PREFETCHED=PREFETCHED,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl_options(pdl_of(x)),
    )  # fmt: skip
