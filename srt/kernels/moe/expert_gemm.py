"""The products of the chosen experts: gates and ups with their activation, then downs with the router's weights, then their sum.

Rows are sorted by expert (`expert_tiles.py`), so with few rows each chosen expert's weights are read once. Results are stored for each
choice of a token and added in the order of its choices, so the same step gives the same bits every time. A rank that has some of the
experts only (--ep-size) computes nothing for choices of others, and adds nothing for them.

The shared expert is computed beside the chosen ones, in SHARED parts of the size of one of those, which have all tokens. Its tiles come
first. Rows of its activations and results are behind those of the pairs: of token t and part p at row pairs + t * SHARED + p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs
from srt.kernels.gemm.packed_gemm import is_hopper
from srt.kernels.moe.expert_tiles import ExpertTiles
from srt.kernels.moe.packed_tiles import E4M3, INT4, INT8, MXFP4, PLAIN, SIGNED8, add_bytes, add_halves

if TYPE_CHECKING:
    from srt.layers.moe.expert_ops import ExpertMatrices, ExpertWeights

_SUM_BLOCK: Final = 1024
_GATE_SLOPE = tl.constexpr(1.702)  # of gpt-oss's activation


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The part of a product that one program computes at a time, beside the rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """Whether the weights are the first operand: for few rows, of which the tensor cores of Hopper take 8 and more as the second."""


@dataclass(frozen=True, slots=True)
class ExpertGemmTiles:
    """Tiles of both products."""

    block_m: int
    gates: ProductTiles
    downs: ProductTiles

    @classmethod
    def choose(cls, num_pairs: int, num_experts: int, item_size: int, has_room: bool = False) -> ExpertGemmTiles:
        """Choose tiles that hold an expert's rows, if they are few: then its weights are read once.

        `has_room` says that programs have the shared memory of Hopper, and that weights are plain. `num_pairs` are those of these experts.
        """
        mean, is_hopper = num_pairs / num_experts, has_room and item_size == 2
        if mean <= 16:
            block_m = 16 if mean <= 4 else 32
            if is_hopper and num_pairs > 32:
                downs = ProductTiles(128, 128, 4, 3, True) if block_m == 16 else ProductTiles(128, 64, 4, 5, True)
                return cls(block_m, ProductTiles(64, 128, 4, 4, True), downs)
            if has_room and num_pairs <= 64:
                both = ProductTiles(64, 256 // item_size, 4, 4)
                return cls(block_m, both, both)
            few = ProductTiles(32 if num_pairs > 64 else 16, 256 // item_size, 4, 4)
            return cls(block_m, few, ProductTiles(64 if num_pairs > 64 else 32, 256 // item_size, 4, 4))
        if is_hopper and mean <= 64:
            return cls(64, ProductTiles(128, 64, 4, 4), ProductTiles(128, 64, 4, 3))
        if is_hopper:
            return cls(128, ProductTiles(128, 64, 8, 4), ProductTiles(256, 64, 8, 4))
        block_m, warps = (64, 4) if mean <= 48 else (128, 8)
        return cls(block_m, ProductTiles(64, 128 // item_size, warps, 3), ProductTiles(128, 128 // item_size, warps, 3))


@jit
def activate(gate: tl.tensor, up: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Return silu(gate) * up; gpt-oss's activation if there is a limit."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate * tl.sigmoid(gate * _GATE_SLOPE)
    else:
        return gate * tl.sigmoid(gate) * up


@jit
def _find_tile(
    number: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_tokens: int,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tuple:
    """Return (first row, end, expert, part of the shared expert, whether it is a tile of that). Rows of the shared expert are tokens."""
    if SHARED == 0:
        expert = tl.load(experts_ptr + number).to(tl.int64)
        return tl.load(firsts_ptr + number), tl.load(ends_ptr + number), expert, 0, False
    else:
        num_shared = tl.cdiv(num_tokens, BLOCK_M) * SHARED
        is_shared, tile = number < num_shared, number - num_shared
        first = tl.load(firsts_ptr + tile, mask=tile >= 0, other=0)
        end = tl.load(ends_ptr + tile, mask=tile >= 0, other=0)
        expert = tl.load(experts_ptr + tile, mask=tile >= 0, other=0).to(tl.int64)
        token = number // SHARED * BLOCK_M
        end = tl.where(is_shared, tl.minimum(token + BLOCK_M, num_tokens), end)
        return tl.where(is_shared, token, first), end, expert, number % SHARED, is_shared


@kernel(one_variant_for=("num_tokens",))
def expert_gates_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,  # [2 * SHARED * SIZE, HIDDEN]: gates, then ups
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_tokens: int,
    SHARED: tl.constexpr,  # parts of the shared expert; 0: it is not computed here
    KIND: tl.constexpr,  # of the weights' numbers (packed_tiles.py)
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: the activation is silu(gate) * up
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,  # compute the product of the weights and x's columns
    DOT: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) computes block n of the activated gates and ups for the rows of tile t, in sorted order."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    first, end, expert, part, is_shared = _find_tile(
        tl.program_id(1), experts_ptr, firsts_ptr, ends_ptr, num_tokens, SHARED, BLOCK_M
    )
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        if SHARED == 0:
            tokens, places = tl.load(pairs_ptr + rows, mask=is_row, other=0) // TOP_K, rows
        else:
            pairs = tl.load(pairs_ptr + rows, mask=rows < tl.where(is_shared, first, end), other=0)
            tokens = tl.where(is_shared, rows, pairs // TOP_K)
            places = tl.where(is_shared, num_tokens * TOP_K + rows * SHARED + part, rows)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (columns < SIZE)[None, :]
        WIDTH: tl.constexpr = HIDDEN // 2 if KIND >= INT4 else HIDDEN
        of_expert, to_ups = weight_ptr + expert * (2 * SIZE * WIDTH), SIZE * WIDTH
        if SHARED > 0:
            of_expert = tl.where(is_shared, shared_ptr + part * (SIZE * HIDDEN), of_expert)
            to_ups = tl.where(is_shared, SHARED * SIZE * HIDDEN, SIZE * HIDDEN)
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN
        gate_at = of_expert + columns[None, :] * WIDTH
        groups_at = expert * (2 * SIZE * ((HIDDEN + GROUP - 1) // GROUP)) + columns
        scales_at, zeros_at = scales_ptr + groups_at, zeros_ptr + groups_at
        IS_SWAPPED: tl.constexpr = SWAP and KIND == PLAIN
        gate = tl.zeros((BLOCK_N, BLOCK_M) if IS_SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M) if IS_SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, HIDDEN, BLOCK_K):
            if IS_SWAPPED:
                k = begin + tl.arange(0, BLOCK_K)[None, :]
                weight_at = of_expert + columns[:, None] * HIDDEN + k
                x = tl.load(x_at + k, mask=is_row[:, None] & (k < HIDDEN), other=0.0).to(DOT)
                is_weight = (columns < SIZE)[:, None] & (k < HIDDEN)
                gates = tl.load(weight_at, mask=is_weight, other=0.0).to(DOT)
                ups = tl.load(weight_at + to_ups, mask=is_weight, other=0.0).to(DOT)
                gate = tl.dot(gates, tl.trans(x), gate, input_precision="ieee")
                up = tl.dot(ups, tl.trans(x), up, input_precision="ieee")
            elif KIND >= INT4:
                byte = tl.arange(0, BLOCK_K // 2)
                k = begin + byte // 16 * 32 + byte % 16
                inside = k < HIDDEN
                is_x, is_weight = is_row[:, None] & inside[None, :], is_column & inside[:, None]
                low_x = tl.load(x_at + k[None, :], mask=is_x, other=0.0).to(DOT)
                high_x = tl.load(x_at + k[None, :] + 16, mask=is_x, other=0.0).to(DOT)
                at = gate_at + (begin // 2 + byte)[:, None]
                gate = add_halves(
                    gate, low_x, high_x, at, is_weight, scales_at, zeros_at, columns < SIZE, begin,
                    KIND, HAS_ZEROS, HIDDEN, 2 * SIZE, GROUP, BLOCK_K, DOT,
                )  # fmt: skip
                up = add_halves(
                    up, low_x, high_x, at + SIZE * WIDTH, is_weight, scales_at + SIZE, zeros_at + SIZE,
                    columns < SIZE, begin, KIND, HAS_ZEROS, HIDDEN, 2 * SIZE, GROUP, BLOCK_K, DOT,
                )  # fmt: skip
            else:
                k = begin + tl.arange(0, BLOCK_K)
                inside = k < HIDDEN
                x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0).to(DOT)
                is_weight = is_column & inside[:, None]
                if KIND == PLAIN:
                    gates = tl.load(gate_at + k[:, None], mask=is_weight, other=0.0).to(DOT)
                    ups = tl.load(gate_at + to_ups + k[:, None], mask=is_weight, other=0.0).to(DOT)
                    gate = tl.dot(x, gates, gate, input_precision="ieee")
                    up = tl.dot(x, ups, up, input_precision="ieee")
                else:
                    at = gate_at + k[:, None]
                    gate = add_bytes(
                        gate, x, at, is_weight, scales_at, zeros_at, columns < SIZE, begin,
                        KIND, HAS_ZEROS, HIDDEN, 2 * SIZE, GROUP, BLOCK_K, DOT, HOPPER,
                    )  # fmt: skip
                    up = add_bytes(
                        up, x, at + SIZE * WIDTH, is_weight, scales_at + SIZE, zeros_at + SIZE,
                        columns < SIZE, begin, KIND, HAS_ZEROS, HIDDEN, 2 * SIZE, GROUP, BLOCK_K, DOT, HOPPER,
                    )  # fmt: skip
        if IS_SWAPPED:
            gate, up = tl.trans(gate), tl.trans(up)
        if HAS_BIAS:
            bias_at = bias_ptr + expert * (2 * SIZE) + columns
            gate += tl.load(bias_at, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_at + SIZE, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
        activated = activate(gate, up, LIMIT)
        out_at = out_ptr + places.to(tl.int64)[:, None] * SIZE + columns[None, :]
        tl.store(out_at, activated.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


@kernel(one_variant_for=("num_tokens",))
def expert_downs_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,  # [HIDDEN, SHARED * SIZE]
    out_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_tokens: int,
    SHARED: tl.constexpr,  # parts of the shared expert; 0: it is not computed here
    KIND: tl.constexpr,  # of the weights' numbers (packed_tiles.py)
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    DOT: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (n, t) computes block n of the weighted results for the rows of tile t, and stores each at its pair."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    first, end, expert, part, is_shared = _find_tile(
        tl.program_id(1), experts_ptr, firsts_ptr, ends_ptr, num_tokens, SHARED, BLOCK_M
    )
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (columns < HIDDEN)[None, :]
        WIDTH: tl.constexpr = SIZE // 2 if KIND >= INT4 else SIZE
        of_expert, row_size, places = weight_ptr + expert * (HIDDEN * WIDTH), WIDTH, rows
        if SHARED > 0:
            of_expert = tl.where(is_shared, shared_ptr + part * SIZE, of_expert)
            row_size = tl.where(is_shared, SHARED * SIZE, SIZE)
            places = tl.where(is_shared, num_tokens * TOP_K + rows * SHARED + part, rows)
        x_at = x_ptr + places.to(tl.int64)[:, None] * SIZE
        weight_at = of_expert + columns[None, :] * row_size
        groups_at = expert * (HIDDEN * ((SIZE + GROUP - 1) // GROUP)) + columns
        scales_at, zeros_at = scales_ptr + groups_at, zeros_ptr + groups_at
        IS_SWAPPED: tl.constexpr = SWAP and KIND == PLAIN
        sums = tl.zeros((BLOCK_N, BLOCK_M) if IS_SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, SIZE, BLOCK_K):
            if IS_SWAPPED:
                k = begin + tl.arange(0, BLOCK_K)[None, :]
                is_weight = (columns < HIDDEN)[:, None] & (k < SIZE)
                weight = tl.load(of_expert + columns[:, None] * row_size + k, mask=is_weight, other=0.0).to(DOT)
                x = tl.load(x_at + k, mask=is_row[:, None] & (k < SIZE), other=0.0).to(DOT)
                sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
            elif KIND >= INT4:
                byte = tl.arange(0, BLOCK_K // 2)
                k = begin + byte // 16 * 32 + byte % 16
                inside = k < SIZE
                is_x, is_weight = is_row[:, None] & inside[None, :], is_column & inside[:, None]
                low_x = tl.load(x_at + k[None, :], mask=is_x, other=0.0).to(DOT)
                high_x = tl.load(x_at + k[None, :] + 16, mask=is_x, other=0.0).to(DOT)
                sums = add_halves(
                    sums, low_x, high_x, weight_at + (begin // 2 + byte)[:, None], is_weight, scales_at, zeros_at,
                    columns < HIDDEN, begin, KIND, HAS_ZEROS, SIZE, HIDDEN, GROUP, BLOCK_K, DOT,
                )  # fmt: skip
            else:
                k = begin + tl.arange(0, BLOCK_K)
                inside = k < SIZE
                x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0).to(DOT)
                is_weight = is_column & inside[:, None]
                if KIND == PLAIN:
                    weight = tl.load(weight_at + k[:, None], mask=is_weight, other=0.0).to(DOT)
                    sums = tl.dot(x, weight, sums, input_precision="ieee")
                else:
                    sums = add_bytes(
                        sums, x, weight_at + k[:, None], is_weight, scales_at, zeros_at, columns < HIDDEN, begin,
                        KIND, HAS_ZEROS, SIZE, HIDDEN, GROUP, BLOCK_K, DOT, HOPPER,
                    )  # fmt: skip
        if IS_SWAPPED:
            sums = tl.trans(sums)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        if SHARED == 0:
            pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
            factors = tl.load(factors_ptr + pairs, mask=is_row, other=0.0)
        else:
            is_pair = rows < tl.where(is_shared, first, end)
            pairs = tl.load(pairs_ptr + rows, mask=is_pair, other=0)
            factors = tl.where(is_shared, 1.0, tl.load(factors_ptr + pairs, mask=is_pair, other=0.0))
            pairs = tl.where(is_shared, places, pairs)
        out_at = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(out_at, (sums * factors[:, None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


@kernel(one_variant_for=("first_own",))
def sum_choices_kernel(
    results_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: float,
    first_own: int,
    NUM_OWN: tl.constexpr,  # 0: all experts are here
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # parts of the shared expert, whose results are behind those of all pairs
    HAS_NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (t, b) adds block b of the results of all choices of token t, in their order.

    With a norm it adds `hidden` too, the block is the whole row, and the norm of the rounded sum is stored as well.
    """
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    for choice in tl.static_range(TOP_K):
        at = results_ptr + (token * TOP_K + choice) * HIDDEN + columns
        if NUM_OWN > 0:
            expert = tl.load(ids_ptr + token * TOP_K + choice) - first_own
            end = tl.where((expert >= 0) & (expert < NUM_OWN), HIDDEN, 0)
            total += tl.load(at, mask=columns < end, other=0.0).to(tl.float32)
        else:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(SHARED):
        row = tl.num_programs(0).to(tl.int64) * TOP_K + token * SHARED + part
        total += tl.load(results_ptr + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        total += tl.load(hidden_ptr + token * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    let_next_start_late(PDL)
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + columns, rounded, mask=inside)
    if HAS_NORM:
        x = rounded.to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps) * norm_weight
        tl.store(normed_ptr + token * HIDDEN + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)


_KINDS: Final = {"e4m3": E4M3, "int8": INT8, "signed8": SIGNED8, "int4": INT4, "mxfp4": MXFP4}
_ONE_GROUP: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """What kernels are told of the matrices of all experts."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Numbers, scales, zero points."""
    kind: int
    group: int
    """Inputs that share a scale."""
    has_zeros: bool

    @classmethod
    def of(cls, matrices: torch.Tensor | ExpertMatrices) -> StoredMatrices:
        if isinstance(matrices, torch.Tensor):
            return cls((matrices, matrices, matrices), PLAIN.value, _ONE_GROUP, False)
        stacked = matrices.stacked
        numbers, scales = stacked.numbers.view(torch.uint8), stacked.scales
        zeros = scales if stacked.zeros is None else stacked.zeros
        group = _ONE_GROUP if scales.shape[1] == 1 else stacked.group_size
        return cls((numbers, scales, zeros), _KINDS[stacked.kind].value, group, stacked.zeros is not None)

    @property
    def is_plain(self) -> bool:
        return bool(self.kind == PLAIN.value)

    @property
    def constants(self) -> dict[str, int]:
        return {"KIND": self.kind, "GROUP": self.group, "HAS_ZEROS": self.has_zeros}

    def fitting(self, tiles: ProductTiles) -> ProductTiles:
        """Return tiles that have whole groups, or parts of one group. Tensor cores want 16 inputs or more of each half of a byte."""
        least = 32 if self.kind >= INT4.value else 16
        power = self.group & -self.group
        block_k = tiles.block_k if power == self.group else min(tiles.block_k, power)
        return replace(tiles, block_k=max(least, block_k))


def multiply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    tiles: ExpertGemmTiles | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts.

    x [tokens, hidden], ids i32 and factors f32 [tokens, top_k]. All tensors are contiguous. There must be tokens. Inputs of quantised
    weights are multiplied as they are.
    """
    results = multiply_choices(x, ids, factors, weights, tiles, pdl)
    return add_choices(results, len(x), pdl, OwnChoices.of(ids, weights), weights.num_shared_parts)


@dataclass(frozen=True, slots=True)
class OwnChoices:
    """Which choices of tokens have results on a rank that has some of the experts."""

    ids: torch.Tensor
    experts: range

    @classmethod
    def of(cls, ids: torch.Tensor, weights: ExpertWeights) -> OwnChoices | None:
        """Return None if the rank has all experts."""
        return None if weights.own is None else cls(ids, weights.own)


def add_choices(
    results: torch.Tensor, num_tokens: int, pdl: int = 0, own: OwnChoices | None = None, num_shared: int = 0
) -> torch.Tensor:
    """Return the sum of each token's results [tokens, hidden], for what `multiply_choices` returns. `own` has those that are there.

    `num_shared` is the number of the shared expert's parts among them.
    """
    hidden, block = results.shape[1], _SUM_BLOCK
    out = torch.empty((num_tokens, hidden), dtype=results.dtype, device=results.device)
    sum_choices_kernel[(num_tokens, triton.cdiv(hidden, block))](
        results, results if own is None else own.ids, out, out, out, out, 0.0, 0 if own is None else own.experts.start,
        NUM_OWN=0 if own is None else len(own.experts), TOP_K=len(results) // num_tokens - num_shared, SHARED=num_shared,
        HAS_NORM=False, HIDDEN=hidden, BLOCK=block, **pdl_options(pdl),
    )  # fmt: skip
    return out


def add_choices_and_norm(
    results: torch.Tensor,
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    pdl: int = 0,
    own: OwnChoices | None = None,
    num_shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of hidden + the sum of each token's results, that sum), for arguments as those of `add_choices`."""
    num_tokens, size = hidden.shape
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    sum_choices_kernel[(num_tokens, 1)](
        results, results if own is None else own.ids, hidden, norm_weight, total, normed, eps,
        0 if own is None else own.experts.start, NUM_OWN=0 if own is None else len(own.experts),
        TOP_K=len(results) // num_tokens - num_shared, SHARED=num_shared, HAS_NORM=True, HIDDEN=size, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **pdl_options(pdl),
    )  # fmt: skip
    return normed, total


def multiply_choices(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    tiles: ExpertGemmTiles | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """Return the weighted result of each choice of each token [tokens * top_k, hidden], for arguments as in `multiply_experts`.

    Results of experts that are not here are undefined. Behind them are those of the shared expert's parts [tokens * parts, hidden], if the
    weights have it.
    """
    assert weights.shared is None or weights.can_be_beside_shared, "products of its own compute this shared expert"
    num_experts, hidden, size = weights.down.shape
    has_room = isinstance(weights.gate_up, torch.Tensor) and is_hopper(x.device)
    tiles = tiles or ExpertGemmTiles.choose(expected_pairs(ids, weights), num_experts, x.itemsize, has_room)
    table = ExpertTiles.sort(ids, weights.num_routed, tiles.block_m, weights.load, pdl, weights.own)
    shared, num_shared = weights.shared, weights.num_shared_parts
    num_results = ids.numel() + len(x) * num_shared
    activated = torch.empty((num_results, size), dtype=x.dtype, device=x.device)
    results = torch.empty((num_results, hidden), dtype=x.dtype, device=x.device)
    rows = (table.pairs, table.experts, table.firsts, table.ends)
    shape: dict[str, Any] = {"SIZE": size, "HIDDEN": hidden, "BLOCK_M": tiles.block_m, "DOT": dot_dtype(x.dtype)}
    shape["HOPPER"] = x.dtype is torch.bfloat16 and is_hopper(x.device)
    shape |= {"TOP_K": ids.shape[1], "SHARED": num_shared, **pdl_options(pdl)}
    num_tiles = len(table.experts) + triton.cdiv(len(x), tiles.block_m) * num_shared
    gates, downs = StoredMatrices.of(weights.gate_up), StoredMatrices.of(weights.down)
    gate_tiles, down_tiles = gates.fitting(tiles.gates), downs.fitting(tiles.downs)
    expert_gates_kernel[(triton.cdiv(size, gate_tiles.block_n), num_tiles)](
        x,
        *gates.tensors,
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        x if shared is None else shared.gate_up,
        activated,
        *rows,
        len(x),
        HAS_BIAS=weights.gate_up_bias is not None,
        LIMIT=weights.limit or 0.0,
        **shape,
        **gates.constants,
        **_options(gate_tiles),
    )
    expert_downs_kernel[(triton.cdiv(hidden, down_tiles.block_n), num_tiles)](
        activated,
        *downs.tensors,
        x if weights.down_bias is None else weights.down_bias,
        x if shared is None else shared.down,
        results,
        factors,
        *rows,
        len(x),
        HAS_BIAS=weights.down_bias is not None,
        **shape,
        **downs.constants,
        **_options(down_tiles),
    )
    return results


def expected_pairs(ids: torch.Tensor, weights: ExpertWeights) -> int:
    """Return how many of the pairs are of the experts that are here, if all experts are chosen equally often."""
    return -(-ids.numel() * weights.down.shape[0] // weights.num_routed)


def _options(tiles: ProductTiles) -> dict[str, int]:
    return {
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SWAP": tiles.is_swapped,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
