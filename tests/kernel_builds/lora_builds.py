"""The products of LoRA adapters of rank 16, for the query, key and value projections of Qwen3-8B."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from srt.kernels.build.jit import dot_dtype
from srt.kernels.build.pdl import EARLY, LATE
from srt.kernels.gemm.gemv import GemvTiles
from srt.kernels.lora.products import (
    adapted_gemv_kernel,
    expand_gated_kernel,
    expand_tile_kernel,
    expand_token_kernel,
    shrink_tile_kernel,
    shrink_token_kernel,
)
from tests.kernel_builds.kernel_build import TYPE_NAMES, KernelBuild

HIDDEN, PARTS, RANK, ADAPTERS = 4096, (4096, 1024, 1024), 16, 8
LOW = RANK * len(PARTS)
_OUTPUTS = {"N0": PARTS[0], "N1": PARTS[1], "N2": PARTS[2], "LOW": LOW, "RANK": RANK}
_TABLE = dict.fromkeys(("tokens_ptr", "numbers_ptr", "firsts_ptr", "ends_ptr"), "*i32")
_COUNTS = dict.fromkeys(("num_rows", "num_parts", "stride_x", "stride_y", "stride_down", "stride_up"), "i32")


def lora_builds() -> list[KernelBuild]:
    """Tokens taken one by one, and tiles of few tokens and of many, in bfloat16 and in float32."""
    builds = []
    for dtype in (torch.bfloat16, torch.float32):
        builds += [_shrink_token(dtype), _expand_token(dtype), _adapted_gemv(dtype)]
        for block_m in (16, 32, 64):
            builds += [_shrink_tile(dtype, block_m), _expand_tile(dtype, block_m), _expand_gated(dtype, block_m)]
    return builds


def _shrink_token(dtype: torch.dtype) -> KernelBuild:
    block_k = 512 // dtype.itemsize
    constants = {"ADAPTERS": ADAPTERS, "LOW": LOW, "K": HIDDEN, "STEPS": 1, "BLOCK_LOW": 64, "BLOCK_K": block_k}
    return _build("shrink_token", shrink_token_kernel, dtype, constants, pdl=int(EARLY))


def _expand_token(dtype: torch.dtype) -> KernelBuild:
    num_parts = triton.next_power_of_2(HIDDEN * dtype.itemsize // 512)
    constants = {**_OUTPUTS, "ADAPTERS": ADAPTERS, "MOST_PARTS": num_parts, "BLOCK_N": 64}
    return _build("expand_token", expand_token_kernel, dtype, constants, pdl=int(EARLY))


def _shrink_tile(dtype: torch.dtype, block_m: int) -> KernelBuild:
    constants = {"ADAPTERS": ADAPTERS, "LOW": LOW, "K": HIDDEN, "PARTS": 8, "BLOCK_M": block_m, "BLOCK_LOW": 64}
    constants |= {"BLOCK_K": 256 // dtype.itemsize, "DOT": dot_dtype(dtype)}
    return _build(f"shrink_tile of {block_m}", shrink_tile_kernel, dtype, constants, pdl=int(LATE), num_stages=3)


def _expand_tile(dtype: torch.dtype, block_m: int) -> KernelBuild:
    block_n, blocks = {16: (256, 1), 32: (64, 2), 64: (64, 2)}[block_m]
    constants = {**_OUTPUTS, "PARTS": 8, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCKS": blocks, "BLOCK_R": RANK}
    constants |= {"ADAPTERS": ADAPTERS, "DOT": dot_dtype(dtype)}
    return _build(f"expand_tile of {block_m}", expand_tile_kernel, dtype, constants, pdl=int(LATE))


def _expand_gated(dtype: torch.dtype, block_m: int) -> KernelBuild:
    """The gates and ups of Qwen3-8B."""
    block_n, blocks = {16: (128, 1), 32: (64, 2), 64: (64, 2)}[block_m]
    constants = {"ADAPTERS": ADAPTERS, "RANK": RANK, "N": 12288, "PARTS": 8, "BLOCK_M": block_m, "BLOCK_N": block_n}
    constants |= {"BLOCKS": blocks, "BLOCK_R": RANK, "DOT": dot_dtype(dtype)}
    return _build(f"expand_gated of {block_m}", expand_gated_kernel, dtype, constants, pdl=int(LATE))


def _adapted_gemv(dtype: torch.dtype) -> KernelBuild:
    tiles = GemvTiles.choose(sum(PARTS), HIDDEN, False, dtype.itemsize)
    constants = {"N": sum(PARTS), "K": HIDDEN, "FIRST1": PARTS[0], "FIRST2": PARTS[0] + PARTS[1], "LOW": LOW}
    constants |= {"RANK": RANK, "ADAPTERS": ADAPTERS, "HAS_BIAS": True, "MOST_PARTS": 16}
    constants |= {"BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    return _build("adapted_gemv", adapted_gemv_kernel, dtype, constants, pdl=int(EARLY), num_warps=tiles.num_warps)


def _build(
    name: str, kernel: object, dtype: torch.dtype, constants: Mapping[str, object], pdl: int, **options: object
) -> KernelBuild:
    pointers = dict.fromkeys(
        ("x_ptr", "w_ptr", "bias_ptr", "out_ptr", "down_ptr", "up_ptr", "y_ptr"), f"*{TYPE_NAMES[dtype]}"
    )
    known = {**pointers, **_TABLE, **_COUNTS, "low_ptr": "*fp32"}
    types = {arg: known[arg] for arg in kernel.arg_names if arg in known}  # type: ignore[attr-defined]
    first, _, rest = name.partition(" ")
    what = f"{first}[{TYPE_NAMES[dtype]}{rest and ', ' + rest}]"
    return KernelBuild(what, kernel, types, {**constants, "PDL": pdl}, {"launch_pdl": True, **options})
