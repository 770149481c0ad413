"""The products of experts whose weights and inputs are e4m3 numbers, which Hopper's tensor cores read from shared memory as they are.

Each 128 inputs of a row are rounded by their largest, and the product of each 128 is scaled by itself. So the gates can round their own
activations: a program has 128 outputs of its rows. Rows are those of `expert_tiles.py`. Weights are the first operand: their 128 rows fill
a tensor core's instruction even when an expert has few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton.language as tl

from srt.kernels.build.jit import kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs
from srt.kernels.gemm.fp8_gemm import GROUP, quantise_rows
from srt.kernels.gemm.packed_gemm import is_hopper
from srt.kernels.moe.expert_gemm import StoredMatrices, activate, expected_pairs
from srt.kernels.moe.expert_tiles import ExpertTiles

if TYPE_CHECKING:
    from srt.layers.moe.expert_ops import ExpertMatrices, ExpertWeights

_LARGEST: Final = tl.constexpr(448.0)
_LEAST_SCALE: Final = tl.constexpr(1e-12)


@kernel(one_variant_for=())
def rounded_gates_kernel(
    x_ptr: tl.tensor,  # [tokens, HIDDEN] e4m3
    x_scales_ptr: tl.tensor,  # [tokens, HIDDEN / 128] f32
    weight_ptr: tl.tensor,  # [experts, 2 * SIZE, HIDDEN] e4m3
    scales_ptr: tl.tensor,  # [experts, 1 or HIDDEN / 128, 2 * SIZE] f32
    out_ptr: tl.tensor,  # [pairs, SIZE] e4m3, in sorted order
    out_scales_ptr: tl.tensor,  # [pairs, SIZE / 128] f32
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    HAS_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) computes 128 activated gates and ups for the rows of tile t, and rounds them."""
    GROUPS: tl.constexpr = HIDDEN // 128
    let_next_start(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    first, end = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        tokens = (tl.load(pairs_ptr + rows, mask=is_row, other=0) // TOP_K).to(tl.int64)
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        columns, k = block * 128 + tl.arange(0, 128), tl.arange(0, 128)
        gates_at = weight_ptr + expert * (2 * SIZE * HIDDEN) + columns[:, None] * HIDDEN + k[None, :]
        x_at = x_ptr + tokens[:, None] * HIDDEN + k[None, :]
        scales_at = scales_ptr + expert * ((GROUPS if HAS_GROUPS else 1) * 2 * SIZE) + columns
        gate = tl.zeros((128, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((128, BLOCK_M), dtype=tl.float32)
        for group in range(GROUPS):
            x = tl.load(x_at + group * 128, mask=is_row[:, None], other=0.0)
            x_scales = tl.load(x_scales_ptr + tokens * GROUPS + group, mask=is_row, other=0.0)[None, :]
            gates = tl.load(gates_at + group * 128)
            ups = tl.load(gates_at + SIZE * HIDDEN + group * 128)
            of_gates = tl.dot(gates, tl.trans(x)) * x_scales
            of_ups = tl.dot(ups, tl.trans(x)) * x_scales
            if HAS_GROUPS:
                of_gates *= tl.load(scales_at + group * 2 * SIZE)[:, None]
                of_ups *= tl.load(scales_at + group * 2 * SIZE + SIZE)[:, None]
            gate += of_gates
            up += of_ups
        if not HAS_GROUPS:
            gate *= tl.load(scales_at)[:, None]
            up *= tl.load(scales_at + SIZE)[:, None]
        activated = activate(gate, up, 0.0)
        scale = tl.maximum(tl.max(tl.abs(activated), 0) / _LARGEST, _LEAST_SCALE)
        rounded = tl.minimum(tl.maximum(activated / scale[None, :], -_LARGEST), _LARGEST)
        out_at = out_ptr + rows.to(tl.int64)[None, :] * SIZE + columns[:, None]
        tl.store(out_at, rounded.to(out_ptr.dtype.element_ty), mask=is_row[None, :])
        tl.store(out_scales_ptr + rows * (SIZE // 128) + block, scale, mask=is_row)


@kernel(one_variant_for=())
def rounded_downs_kernel(
    x_ptr: tl.tensor,  # [pairs, SIZE] e4m3, in sorted order
    x_scales_ptr: tl.tensor,  # [pairs, SIZE / 128] f32
    weight_ptr: tl.tensor,  # [experts, HIDDEN, SIZE] e4m3
    scales_ptr: tl.tensor,  # [experts, 1 or SIZE / 128, HIDDEN] f32
    out_ptr: tl.tensor,  # [pairs, HIDDEN]
    factors_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    HAS_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) computes 128 outputs for the rows of tile t, times the router's weight, and stores each at its pair."""
    GROUPS: tl.constexpr = SIZE // 128
    let_next_start(PDL)
    tile = tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    first, end = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile)
    if first < end:
        rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        is_row = rows < end
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        columns, k = tl.program_id(0) * 128 + tl.arange(0, 128), tl.arange(0, 128)
        weight_at = weight_ptr + expert * (HIDDEN * SIZE) + columns[:, None] * SIZE + k[None, :]
        x_at = x_ptr + rows[:, None] * SIZE + k[None, :]
        scales_at = scales_ptr + expert * ((GROUPS if HAS_GROUPS else 1) * HIDDEN) + columns
        sums = tl.zeros((128, BLOCK_M), dtype=tl.float32)
        for group in range(GROUPS):
            x = tl.load(x_at + group * 128, mask=is_row[:, None], other=0.0)
            x_scales = tl.load(x_scales_ptr + rows * GROUPS + group, mask=is_row, other=0.0)[None, :]
            product = tl.dot(tl.load(weight_at + group * 128), tl.trans(x)) * x_scales
            if HAS_GROUPS:
                product *= tl.load(scales_at + group * HIDDEN)[:, None]
            sums += product
        if not HAS_GROUPS:
            sums *= tl.load(scales_at)[:, None]
        pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
        factors = tl.load(factors_ptr + pairs, mask=is_row, other=0.0)
        out_at = out_ptr + pairs.to(tl.int64)[None, :] * HIDDEN + columns[:, None]
        tl.store(out_at, (sums * factors[None, :]).to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@dataclass(frozen=True, slots=True)
class RoundedTiles:
    """The rows of a tile, and how a program computes it."""

    block_m: int
    num_warps: int = 4
    gate_stages: int = 3
    down_stages: int = 4

    @classmethod
    def choose(cls, num_pairs: int, num_experts: int) -> RoundedTiles:
        """Choose tiles that hold an expert's rows, if they are few: then its weights are read once."""
        mean = num_pairs / num_experts
        if mean <= 16:
            return cls(16 if mean <= 6 else 32)
        return cls(64, 8)


def rounds_inputs(x: torch.Tensor, weights: ExpertWeights) -> bool:
    """Return whether these kernels multiply the rows of x: on Hopper, if the format of the weights rounds inputs."""
    matrices = weights.gate_up, weights.down
    return (
        x.dtype is torch.bfloat16
        and is_hopper(x.device)
        and all(one is None for one in (weights.limit, weights.gate_up_bias, weights.down_bias))
        and not any(size % GROUP for size in weights.down.shape[1:])
        and all(_may_round(one) for one in matrices)
    )


def _may_round(matrices: torch.Tensor | ExpertMatrices) -> bool:
    return not isinstance(matrices, torch.Tensor) and matrices.stacked.rounds_inputs


def multiply_rounded(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    tiles: RoundedTiles | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """Return what `multiply_choices` returns, for e4m3 numbers and inputs rounded to such, 128 at a time."""
    assert weights.shared is None, "products of its own compute this shared expert"
    num_experts, hidden, size = weights.down.shape
    num_pairs, device = ids.numel(), x.device
    tiles = tiles or RoundedTiles.choose(expected_pairs(ids, weights), num_experts)
    numbers, x_scales = quantise_rows(x, has_groups=True, pdl=pdl)
    table = ExpertTiles.sort(ids, weights.num_routed, tiles.block_m, weights.load, pdl, weights.own)
    activated = torch.empty((num_pairs, size), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((num_pairs, size // GROUP), dtype=torch.float32, device=device)
    results = torch.empty((num_pairs, hidden), dtype=x.dtype, device=device)
    rows, num_tiles = (table.pairs, table.experts, table.firsts, table.ends), len(table.experts)
    gates, downs = _operands(weights.gate_up), _operands(weights.down)
    shape = {"SIZE": size, "HIDDEN": hidden, "BLOCK_M": tiles.block_m, "num_warps": tiles.num_warps, **pdl_options(pdl)}
    rounded_gates_kernel[(size // GROUP, num_tiles)](
        numbers, x_scales, *gates, activated, scales, *rows,
        HAS_GROUPS=gates[1].shape[1] > 1, TOP_K=ids.shape[1], num_stages=tiles.gate_stages, **shape,
    )  # fmt: skip
    rounded_downs_kernel[(hidden // GROUP, num_tiles)](
        activated, scales, *downs, results, factors, *rows,
        HAS_GROUPS=downs[1].shape[1] > 1, num_stages=tiles.down_stages, **shape,
    )  # fmt: skip
    return results


def _operands(matrices: torch.Tensor | ExpertMatrices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 numbers, their scales)."""
    numbers, scales, _ = StoredMatrices.of(matrices).tensors
    return numbers.view(torch.float8_e4m3fn), scales
