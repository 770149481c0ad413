"""x Wᵀ for few rows of x and weights of e4m3 or 4-bit numbers, where reading W takes most of the time: a Triton kernel.

Weights become bfloat16 in registers, which is exact, and tensor cores multiply them. Each program computes some columns of the result
from a part of the inputs; a second kernel adds the parts in a fixed order, with bias and residual. On Hopper the conversions are
instructions that handle four bytes at a time; elsewhere, and in the interpreter, Triton's own operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import IS_INTERPRETED, dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs
from srt.kernels.gemm.conversions import e4m3_to, e4m3_to_bf16, quarters_to_bf16

MOST_ROWS: Final = 64
"""Rows of a tile. More rows take several tiles, each of which reads the weights."""
_BLOCK_N: Final = 64
_PROGRAMS_PER_PROCESSOR: Final = 2
_LEAST_PART: Final = 512
"""Fewest inputs of a program: adding more parts costs more than it gains."""


@jit
def in_columns(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Return [ROWS, COLUMNS] with the numbers of words of 16 bits [ROWS, COLUMNS / 4] in the order of their columns.

    `a` has the lowest four bits of each word, `d` the highest. Of each 32 columns, word i has i, 16 + i, 8 + i and 24 + i. A lane of the
    tensor cores multiplies the numbers of its own words, so nothing moves between lanes.
    """
    parts = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS // 32, 8, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 4, 3, 2)), (ROWS, COLUMNS))


@kernel(one_variant_for=("num_rows",))
def packed_gemm_kernel(
    x_ptr: tl.tensor,  # [num_rows, K]
    w_ptr: tl.tensor,  # bytes [N, K], or words of 16 bits [N, K / 4] with 4-bit numbers in the order of operands
    scales_ptr: tl.tensor,  # [K / GROUP, N]; the last group may be short
    zeros_ptr: tl.tensor,  # [K / GROUP, N] int16
    bias_ptr: tl.tensor,  # [N]
    residual_ptr: tl.tensor,  # [num_rows, N]
    out_ptr: tl.tensor,  # [num_rows, N], or [SPLITS, num_rows, N] float32
    num_rows: int,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute BLOCK_N columns of the result for BLOCK_M rows from one part of the inputs."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS_OF_PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    let_next_start(PDL)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_n = outputs < N
    in_m = rows < num_rows
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(PDL)
    for step in range(split * STEPS_OF_PART, min((split + 1) * STEPS_OF_PART, STEPS)):
        first = step * BLOCK_K
        group = first // GROUP
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[None, :] * K + k[:, None], mask=in_m[None, :] & (k < K)[:, None], other=0.0).to(
            DOT_DTYPE
        )
        if IS_FLOAT:
            numbers = tl.load(
                w_ptr + outputs.to(tl.int64)[:, None] * K + k[None, :],
                mask=in_n[:, None] & (k < K)[None, :],
                other=0,
                eviction_policy="evict_first",
            )
            w = e4m3_to_bf16(numbers) if HOPPER else e4m3_to(numbers, DOT_DTYPE)
            product = tl.dot(w, x, input_precision="ieee")
        else:
            word = first // 4 + tl.arange(0, BLOCK_K // 4)
            words = tl.load(
                w_ptr + outputs.to(tl.int64)[:, None] * (K // 4) + word[None, :],
                mask=in_n[:, None] & (word < K // 4)[None, :],
                other=0,
                eviction_policy="evict_first",
            )
            if HOPPER:
                a, b, c, d = quarters_to_bf16(words)
            else:
                a = ((words & 15).to(tl.float32) - 8.0).to(DOT_DTYPE)
                b = ((words >> 4 & 15).to(tl.float32) - 8.0).to(DOT_DTYPE)
                c = ((words >> 8 & 15).to(tl.float32) - 8.0).to(DOT_DTYPE)
                d = ((words >> 12 & 15).to(tl.float32) - 8.0).to(DOT_DTYPE)
            product = tl.dot(in_columns(a, b, c, d, BLOCK_N, BLOCK_K), x, input_precision="ieee")
            if HAS_ZEROS:
                # Numbers are taken as if their zero point were 8; what that misses is the same for all inputs of a group.
                zeros = tl.load(zeros_ptr + group * N + outputs, mask=in_n, other=8).to(tl.float32)
                product += (8.0 - zeros)[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
        scale = tl.load(scales_ptr + group * N + outputs, mask=in_n, other=0.0).to(tl.float32)
        acc += product * scale[:, None]
    places = rows[None, :] * N + outputs[:, None]
    inside_out = in_n[:, None] & in_m[None, :]
    if SPLITS > 1:
        tl.store(out_ptr + split * num_rows * N + places, acc, mask=inside_out)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + outputs, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            acc += tl.load(residual_ptr + places, mask=inside_out, other=0.0).to(tl.float32)
        tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=inside_out)


@kernel(one_variant_for=("num_rows",))
def add_parts_kernel(
    parts_ptr: tl.tensor,  # [SPLITS, num_rows, N] float32
    bias_ptr: tl.tensor,  # [N]
    residual_ptr: tl.tensor,  # [num_rows, N]
    out_ptr: tl.tensor,  # [num_rows, N]
    num_rows: int,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add the parts of one row's results, in order."""
    let_next_start(PDL)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (part * num_rows + row) * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def float_of_bits(bits: tl.tensor) -> tl.tensor:
    """Return 2 ** 23 plus the number in the last four bits, exactly: one instruction less than a conversion, and a faster one."""
    return ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True)


@kernel(one_variant_for=())
def dequantise_kernel(
    w_ptr: tl.tensor,  # words of 16 bits [N, K / 4]
    scales_ptr: tl.tensor,  # [K / GROUP, N]
    zeros_ptr: tl.tensor,  # [K / GROUP, N] int16
    out_ptr: tl.tensor,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute (number - zero point) * scale for BLOCK_K inputs of BLOCK_N outputs; the inputs are within a group."""
    first = tl.program_id(0) * BLOCK_K
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = first + tl.arange(0, BLOCK_K)
    word = first // 4 + tl.arange(0, BLOCK_K // 4)
    in_n = outputs < N
    at = w_ptr + outputs.to(tl.int64)[:, None] * (K // 4) + word[None, :]
    words = tl.load(at, mask=in_n[:, None] & (word < K // 4)[None, :], other=0).to(tl.int32)
    places = first // GROUP * N + outputs
    scale = tl.load(scales_ptr + places, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + places, mask=in_n, other=0).to(tl.float32)[:, None] + 8388608.0
    else:
        zero = tl.full([BLOCK_N, 1], 8388616.0, tl.float32)
    dtype = out_ptr.dtype.element_ty
    a = ((float_of_bits(words) - zero) * scale).to(dtype)
    b = ((float_of_bits(words >> 4) - zero) * scale).to(dtype)
    c = ((float_of_bits(words >> 8) - zero) * scale).to(dtype)
    d = ((float_of_bits(words >> 12) - zero) * scale).to(dtype)
    values = in_columns(a, b, c, d, BLOCK_N, BLOCK_K)
    out = out_ptr + outputs.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out, values, mask=in_n[:, None] & (k < K)[None, :])


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """The tiles into which a product is cut."""

    block_m: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def choose(cls, num_rows: int, n: int, k: int, group: int, num_processors: int) -> PackedTiles:
        """Return tiles that give every multiprocessor two programs, if their parts of the inputs stay long enough."""
        programs = -(-n // _BLOCK_N)
        programs *= -(-num_rows // MOST_ROWS)
        splits = max(1, min(k // _LEAST_PART, _PROGRAMS_PER_PROCESSOR * num_processors // programs, 8))
        block_m = max(16, triton.next_power_of_2(min(num_rows, MOST_ROWS)))
        return cls(block_m, min(128, group & -group), splits)


def packed_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiles: PackedTiles | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x Wᵀ + bias + residual, rounded once.

    `weight` has e4m3 numbers [n, k] or two 4-bit numbers a byte [n, k / 2], which `order_operands` (int_weight.py) has put in order.
    `scales` and `zeros` are [groups, n].
    """
    num_rows, k = x.shape
    n, is_float = len(weight), weight.dtype is torch.float8_e4m3fn
    assert num_rows > 0 and weight.shape[1] == (k if is_float else k // 2), (x.shape, weight.shape)
    for tensor in (x, weight, scales, zeros, bias, residual):
        assert tensor is None or tensor.is_contiguous(), tensor.stride()
    if tiles is None:
        tiles = PackedTiles.choose(num_rows, n, k, group, _num_processors(x.device))
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    splits = tiles.splits
    target = out if splits == 1 else torch.empty((splits, num_rows, n), dtype=torch.float32, device=x.device)
    packed_gemm_kernel[(triton.cdiv(n, _BLOCK_N), splits, triton.cdiv(num_rows, tiles.block_m))](
        x, weight.view(torch.uint8 if is_float else torch.int16), scales, x if zeros is None else zeros, x if bias is None else bias,
        x if residual is None else residual, target, num_rows,
        N=n, K=k, GROUP=group, IS_FLOAT=is_float, HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, SPLITS=splits,
        BLOCK_M=tiles.block_m, BLOCK_N=_BLOCK_N, BLOCK_K=tiles.block_k, DOT_DTYPE=dot_dtype(x.dtype),
        HOPPER=x.dtype is torch.bfloat16 and is_hopper(x.device), num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    if splits > 1:
        block = min(1024, triton.next_power_of_2(n))
        add_parts_kernel[(triton.cdiv(n, block), num_rows)](
            target, x if bias is None else bias, x if residual is None else residual, out, num_rows,
            N=n, SPLITS=splits, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, BLOCK=block,
            **pdl_options(pdl),
        )  # fmt: skip
    return out


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return 4-bit numbers [n, k / 2], packed in the order of operands, as a matrix [n, k]: (number - zero point) * scale."""
    n, k = len(weight), 2 * weight.shape[1]
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    block_k = min(128, group & -group)
    dequantise_kernel[(triton.cdiv(k, block_k), triton.cdiv(n, _BLOCK_N))](
        weight.view(torch.int16), scales, scales if zeros is None else zeros, out,
        N=n, K=k, GROUP=group, HAS_ZEROS=zeros is not None, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
    )  # fmt: skip
    return out


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has the instructions that convert four bytes at a time."""
    return not IS_INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _num_processors(device: torch.device) -> int:
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
