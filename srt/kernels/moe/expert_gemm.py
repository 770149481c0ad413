"""The products of the chosen experts: gates and ups with their activation, then downs with the router's weights, then their sum.

Rows are sorted by expert (`expert_tiles.py`), so with few rows each chosen expert's weights are read once. Results are stored for each
choice of a token and added in the order of its choices, so the same step gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import dot_dtype, kernel
from srt.kernels.moe.expert_tiles import ExpertTiles

if TYPE_CHECKING:
    from srt.layers.moe.expert_ops import ExpertWeights

_SUM_BLOCK: Final = 1024
_GATE_SLOPE = tl.constexpr(1.702)  # of gpt-oss's activation


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The part of a product that one program computes at a time, beside the rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertGemmTiles:
    """Tiles of both products."""

    block_m: int
    gates: ProductTiles
    downs: ProductTiles

    @classmethod
    def choose(cls, num_pairs: int, num_experts: int, item_size: int) -> ExpertGemmTiles:
        """Choose tiles that hold an expert's rows, if they are few: then its weights are read once."""
        mean = num_pairs / num_experts
        if mean <= 16:
            block_m = 16 if mean <= 4 else 32
            few = ProductTiles(32 if num_pairs > 64 else 16, 256 // item_size, 4, 4)
            return cls(block_m, few, ProductTiles(64 if num_pairs > 64 else 32, 256 // item_size, 4, 4))
        block_m, warps = (64, 4) if mean <= 48 else (128, 8)
        return cls(block_m, ProductTiles(64, 128 // item_size, warps, 3), ProductTiles(128, 128 // item_size, warps, 3))


@kernel(one_variant_for=())
def expert_gates_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: the activation is silu(gate) * up
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Program (n, t) computes block n of the activated gates and ups for the rows of tile t, in sorted order."""
    tile = tl.program_id(1)
    first, end = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        tokens = tl.load(pairs_ptr + rows, mask=is_row, other=0) // TOP_K
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (columns < SIZE)[None, :]
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        of_expert = weight_ptr + expert * (2 * SIZE * HIDDEN)
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN
        gate_at = of_expert + columns[None, :] * HIDDEN
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, HIDDEN, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            inside = k < HIDDEN
            x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0).to(DOT)
            is_weight = is_column & inside[:, None]
            gates = tl.load(gate_at + k[:, None], mask=is_weight, other=0.0).to(DOT)
            ups = tl.load(gate_at + SIZE * HIDDEN + k[:, None], mask=is_weight, other=0.0).to(DOT)
            gate = tl.dot(x, gates, gate, input_precision="ieee")
            up = tl.dot(x, ups, up, input_precision="ieee")
        if HAS_BIAS:
            bias_at = bias_ptr + expert * (2 * SIZE) + columns
            gate += tl.load(bias_at, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_at + SIZE, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
        if LIMIT > 0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            activated = (up + 1.0) * gate * tl.sigmoid(gate * _GATE_SLOPE)
        else:
            activated = gate * tl.sigmoid(gate) * up
        out_at = out_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        tl.store(out_at, activated.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


@kernel(one_variant_for=())
def expert_downs_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Program (n, t) computes block n of the weighted results for the rows of tile t, and stores each at its pair."""
    tile = tl.program_id(1)
    first, end = tl.load(firsts_ptr + tile), tl.load(ends_ptr + tile)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (columns < HIDDEN)[None, :]
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        of_expert = weight_ptr + expert * (HIDDEN * SIZE)
        x_at = x_ptr + rows.to(tl.int64)[:, None] * SIZE
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, SIZE, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            inside = k < SIZE
            x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0).to(DOT)
            weight_at = of_expert + columns[None, :] * SIZE + k[:, None]
            weight = tl.load(weight_at, mask=is_column & inside[:, None], other=0.0).to(DOT)
            sums = tl.dot(x, weight, sums, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
        factors = tl.load(factors_ptr + pairs, mask=is_row, other=0.0)
        out_at = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(out_at, (sums * factors[:, None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


@kernel(one_variant_for=())
def sum_choices_kernel(
    results_ptr: tl.tensor, out_ptr: tl.tensor, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Program (t, b) adds block b of the results of all choices of token t, in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        at = results_ptr + (token * TOP_K + choice) * HIDDEN + columns
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def multiply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    tiles: ExpertGemmTiles | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts.

    x [tokens, hidden], ids i32 and factors f32 [tokens, top_k]. All tensors are contiguous. There must be tokens.
    """
    gate_up, down = weights.gate_up, weights.down
    num_experts, hidden, size = down.shape
    tiles = tiles or ExpertGemmTiles.choose(ids.numel(), num_experts, x.itemsize)
    table = ExpertTiles.sort(ids, num_experts, tiles.block_m)
    activated = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    results = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    rows = (table.pairs, table.experts, table.firsts, table.ends)
    shape: dict[str, Any] = {"SIZE": size, "HIDDEN": hidden, "BLOCK_M": tiles.block_m, "DOT": dot_dtype(x.dtype)}
    num_tiles = len(table.experts)
    expert_gates_kernel[(triton.cdiv(size, tiles.gates.block_n), num_tiles)](
        x,
        gate_up,
        gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        activated,
        *rows,
        HAS_BIAS=weights.gate_up_bias is not None,
        LIMIT=weights.limit or 0.0,
        TOP_K=ids.shape[1],
        **shape,
        **_options(tiles.gates),
    )
    expert_downs_kernel[(triton.cdiv(hidden, tiles.downs.block_n), num_tiles)](
        activated,
        down,
        down if weights.down_bias is None else weights.down_bias,
        results,
        factors,
        *rows,
        HAS_BIAS=weights.down_bias is not None,
        **shape,
        **_options(tiles.downs),
    )
    out = torch.empty_like(x)
    sum_choices_kernel[(len(x), triton.cdiv(hidden, _SUM_BLOCK))](
        results, out, TOP_K=ids.shape[1], HIDDEN=hidden, BLOCK=_SUM_BLOCK
    )
    return out


def _options(tiles: ProductTiles) -> dict[str, int]:
    return {
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
