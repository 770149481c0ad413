"""hidden + x Wᵀ for a few dozen rows of x and few columns, where cuBLAS leaves most of the device without work.

The inner dimension is split, and the last of a tile's programs adds up what the others left, in their order. As in `gemv` the
weights are sent for before the kernel waits for its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.jit import dot_dtype, kernel
from srt.kernels.pdl import let_next_start, pdl_options, prefetch, wait_for_inputs

MAX_ROWS: Final = 64
_MAX_TILES: Final = 1024
_LINE: Final = 128  # bytes


@kernel(one_variant_for=("num_rows",))
def skinny_gemm_kernel(
    x_ptr: tl.tensor,  # [rows, K]
    w_ptr: tl.tensor,  # [N, K]
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,  # [rows, N]
    out_ptr: tl.tensor,  # [rows, N]
    partial_ptr: tl.tensor,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] float32
    arrived_ptr: tl.tensor,  # [tiles] int32, 0 between launches
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,  # elements of W in a line of the cache
    PDL: tl.constexpr,
) -> None:
    """Program (n, s): BLOCK_N columns of all rows, over part s of the inner dimension."""
    let_next_start(PDL)
    LENGTH: tl.constexpr = K // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    in_rows = (rows < num_rows)[:, None]
    w_rows = (w_ptr + outputs.to(tl.int64) * K + split * LENGTH)[:, None]
    if PDL:
        for k in tl.static_range(0, LENGTH, BLOCK_K):
            prefetch(w_rows + k + LINE * tl.arange(0, BLOCK_K // LINE)[None, :])
    wait_for_inputs(PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_rows = (x_ptr + rows * K + split * LENGTH)[:, None]
    for k in range(0, LENGTH, BLOCK_K):
        x = tl.load(x_rows + (k + columns)[None, :], mask=in_rows, other=0.0).to(DOT_DTYPE)
        w = tl.load(w_rows + (k + columns)[None, :]).to(DOT_DTYPE)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")

    within = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts = partial_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + within
    tl.store(parts + split * (BLOCK_M * BLOCK_N), acc)
    tl.debug_barrier()  # the whole program's part is out before it counts as arrived
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
        return
    tl.store(arrived_ptr + tile, 0)
    offsets = rows[:, None] * N + outputs[None, :]
    total = tl.load(residual_ptr + offsets, mask=in_rows, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    for part in tl.static_range(SPLITS):
        # Past the first cache, which may hold what was there before.
        total += tl.load(parts + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=in_rows)


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """How a product is cut."""

    block_n: int
    block_k: int
    splits: int
    num_stages: int

    def fits(self, n: int, k: int) -> bool:
        return n % self.block_n == 0 and k % (self.splits * self.block_k) == 0 and n // self.block_n <= _MAX_TILES

    def shared_bytes(self, num_rows: int) -> int:
        """At most: each stage holds a block of x and one of the weights."""
        return 2 * self.num_stages * (block_rows(num_rows) + self.block_n) * self.block_k

    @classmethod
    def choose(cls, num_rows: int, n: int, k: int, shared_bytes: int) -> SkinnyTiles | None:
        """For products of 2-byte weights; None where cuBLAS is as fast, or the shape does not fit, or the device's memory is too
        small. Measured on an H200."""
        if n <= 2048:
            tiles = cls(32, 128, 4, 4) if num_rows <= 16 else cls(32, 256, 4, 3)
        elif n <= 4096 and num_rows <= 16:
            tiles = cls(64, 256, 2, 4)
        else:
            return None
        is_possible = num_rows <= MAX_ROWS and tiles.fits(n, k) and tiles.shared_bytes(num_rows) <= shared_bytes
        return tiles if is_possible else None


def block_rows(num_rows: int) -> int:
    """Of a program's block."""
    return max(16, int(triton.next_power_of_2(num_rows)))


def take_counters(device: torch.device) -> torch.Tensor:
    """What programs of one tile count themselves in; launches on one stream may share it."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def skinny_gemm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: SkinnyTiles,
    counters: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """residual + x @ weight.T + bias; the sum is rounded once."""
    num_rows, k = x.shape
    n = weight.shape[0]
    for tensor in (x, weight, residual):
        assert tensor.is_contiguous(), tensor.stride()
    assert 0 < num_rows <= MAX_ROWS and weight.shape[1] == k and tiles.fits(n, k), (x.shape, weight.shape, tiles)
    block_m = block_rows(num_rows)
    num_tiles = n // tiles.block_n
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    partial = torch.empty(num_tiles * tiles.splits * block_m * tiles.block_n, dtype=torch.float32, device=x.device)
    skinny_gemm_kernel[(num_tiles, tiles.splits)](
        x, weight, x if bias is None else bias, residual, out, partial, counters, num_rows,
        N=n, K=k, HAS_BIAS=bias is not None, DOT_DTYPE=dot_dtype(x.dtype), SPLITS=tiles.splits,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, LINE=_LINE // weight.element_size(),
        num_stages=tiles.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out
