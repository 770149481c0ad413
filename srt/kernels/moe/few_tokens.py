"""The experts of a step of one token, in three kernels that each read their weights into registers and multiply without tensor cores.

`route_rows` norms each token, computes the router's logits and chooses. The first product then computes the activations of each pair of
a token and an expert, whose weights it finds by the choice, without a table. The second product also adds the results of a token's
choices, always in the same order, so a step gives the same bits every time. All take several tokens, for which only `route_rows` is faster
than other kernels. The products also read e4m3 numbers with a scale for each output or for each 128 inputs of an output.

A program of the second product requests its weights before the first product has ended: the choice is known since the kernel before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import LATE, let_next_start, let_next_start_late, pdl_options, wait_for_inputs
from srt.kernels.gemm.packed_gemm import is_hopper
from srt.kernels.moe.expert_gemm import StoredMatrices, activate
from srt.kernels.moe.expert_tiles import add_step_to_load
from srt.kernels.moe.packed_tiles import E4M3, values_of
from srt.kernels.moe.route import MOST_OF_A_WARP, choose_by_logits, routing_constants

if TYPE_CHECKING:
    from srt.layers.moe.expert_ops import ExpertWeights, Router

MOST_TOKENS: Final = 1
"""With more tokens, tiles with tensor cores are faster (measured on an H200 for Qwen3-30B-A3B)."""
MOST_ROUTED_ROWS: Final = 32
"""With more rows, the router's weights are read more often than it pays (measured as above)."""
MOST_PAIRS: Final = 64  # that can be counted
_GATE_BYTES: Final = 16 << 10  # of the weights in a program
_DOWN_BYTES: Final = 48 << 10
_E4M3_DOWN_BYTES: Final = 24 << 10
_DOWN_REGISTERS: Final = 128  # of a thread, so that four programs fit on a processor
_DOWN_PROGRAMS: Final = 528  # that an H200 has at once then
_MOST_REGISTERS: Final = 192  # of weights and sums of a thread
_ROUTER_BYTES: Final = 16 << 10  # of the router's weights in a program
_ROUTER_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class FewTiles:
    """The outputs that one program computes, and how."""

    block_n: int
    block_k: int
    num_warps: int = 4

    @classmethod
    def choose(cls, num_inputs: int, num_matrices: int, item_size: int, most_bytes: int) -> FewTiles | None:
        """Return tiles for a program that reads rows of so many inputs from each of several matrices; None if they are too long."""
        row_bytes = num_inputs * num_matrices * item_size
        if row_bytes > _DOWN_BYTES:
            return None
        block_n = min(16, 1 << ((most_bytes // row_bytes) | 1).bit_length() - 1)
        widths = [min(width, triton.next_power_of_2(num_inputs)) for width in (2048, 1024, 512, 256)]
        return cls(block_n, min(widths, key=lambda width: -num_inputs % width))  # the widest of those that pad least

    @classmethod
    def of_gates(cls, hidden: int, item_size: int) -> FewTiles | None:
        return cls.choose(hidden, 2, item_size, _GATE_BYTES)

    @classmethod
    def of_downs(cls, size: int, num_results: int, item_size: int, has_groups: bool = False) -> FewTiles | None:
        """Return tiles for programs that each add up a token's results: those of its choices, and of the shared expert's parts.

        `has_groups` says that groups of inputs have scales of their own.
        """
        is_converted = item_size == 1 and not has_groups
        tiles = cls.choose(size, num_results, item_size, _E4M3_DOWN_BYTES if is_converted else _DOWN_BYTES)
        while (
            tiles is not None
            and tiles.block_n > 1
            and tiles._down_registers(size, num_results, item_size, has_groups) > _MOST_REGISTERS
        ):
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        return tiles

    def choices(self, num_results: int) -> int:
        """Return the number of choices of a tile of downs."""
        return math.gcd(num_results, self.num_warps)

    def _down_registers(self, size: int, num_results: int, item_size: int, has_groups: bool) -> int:
        """Return how many registers of a thread hold weights of downs and, without scales of groups, sums."""
        weights = num_results * -(-size // self.block_k) * self.block_k * item_size // 4
        sums = 0 if has_groups else self.choices(num_results) * self.block_k
        return self.block_n * (weights + sums) // (32 * self.num_warps)


@jit
def _own_expert(expert: tl.tensor, first_own: int, NUM_OWN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (the number of an expert among those of this rank, 1 if it is one of them, else 0). NUM_OWN is 0 if all are."""
    if NUM_OWN == 0:
        return expert.to(tl.int64), tl.full((), 1, tl.int32)
    else:
        own = expert.to(tl.int64) - first_own
        return own, tl.where((own >= 0) & (own < NUM_OWN), 1, 0)


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
def _products(
    numbers: tl.tensor,  # [BLOCK_N, BLOCK_K]
    x: tl.tensor,  # [BLOCK_K] f32
    scales_at: tl.tensor,  # [BLOCK_N] pointers to the scales of the first group
    is_output: tl.tensor,  # [BLOCK_N]
    first: int,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOPPER: tl.constexpr,
) -> tl.tensor:
    """Return the products of weights and inputs, or the scaled sum of those of each group if groups of inputs have scales."""
    values = values_of(numbers, KIND, HOPPER)
    if GROUP > K:
        return values * x[None, :]
    else:
        groups = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
        inside = is_output[:, None] & (groups * GROUP < K)[None, :]
        scales = tl.load(scales_at[:, None] + groups[None, :] * N, mask=inside, other=0.0)
        return tl.sum(tl.reshape(values * x[None, :], (BLOCK_N, BLOCK_K // GROUP, GROUP)), 2) * scales


@kernel(one_variant_for=())
def route_rows_kernel(
    x_ptr: tl.tensor,  # [rows, HIDDEN]
    norm_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    logits_ptr: tl.tensor,  # [rows, NUM_EXPERTS]
    arrived_ptr: tl.tensor,  # [rows] i32: programs of the row that have stored their logits; 0 before and after
    normed_ptr: tl.tensor,  # [rows, HIDDEN]
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    eps: float,
    scale: float,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COPIES: tl.constexpr,  # of the logits: as many as there are warps, or 1 if a warp cannot have all
    PDL: tl.constexpr,
) -> None:
    """Program (n, r) computes block n of the logits of row r; the last program of a row chooses its experts."""
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    let_next_start(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    outputs, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    of_expert = weight_ptr + outputs[:, None] * HIDDEN
    weights, norms, inputs = _none(), _none(), _none()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + columns
        is_weight = (outputs < NUM_EXPERTS)[:, None] & (k < HIDDEN)[None, :]
        weights = _with(weights, tl.load(of_expert + k[None, :], mask=is_weight, other=0.0))
        if HAS_NORM:
            norms = _with(norms, tl.load(norm_weight_ptr + k, mask=k < HIDDEN, other=0.0))
    wait_for_inputs(PDL)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + columns
        x = tl.load(x_ptr + row * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        inputs = _with(inputs, x)
        squares += x * x
    let_next_start_late(PDL)
    factor = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps) if HAS_NORM else 1.0
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        x = inputs[step]
        if HAS_NORM:
            rounded = (x * factor * norms[step].to(tl.float32)).to(normed_ptr.dtype.element_ty)
            if block == 0:
                k = step * BLOCK_K + columns
                tl.store(normed_ptr + row * HIDDEN + k, rounded, mask=k < HIDDEN)
            x = rounded.to(tl.float32)
        sums += weights[step].to(tl.float32) * x[None, :]
    logits = tl.sum(sums, 1)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + outputs, mask=outputs < NUM_EXPERTS, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * NUM_EXPERTS + outputs, logits, mask=outputs < NUM_EXPERTS)
    tl.debug_barrier()  # all threads have stored their logits before the program counts as arrived
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(arrived_ptr + row, 0)
    # With copies each warp chooses by itself, from all logits, so that none waits for another.
    # Read past the L1 cache (.cg), which may hold old values.
    experts, copies = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, COPIES)[:, None]
    all_logits = tl.load(
        logits_ptr + row * NUM_EXPERTS + experts + copies * 0,
        mask=(experts < NUM_EXPERTS) & (copies < COPIES),
        other=-float("inf"),
        cache_modifier=".cg",
    )
    ids, factors = choose_by_logits(
        all_logits, copies < COPIES, correction_ptr, scale, NUM_EXPERTS, TOP_K, NUM_GROUPS, CHOSEN_GROUPS, GROUP_SCORES,
        RENORMALISE, SIGMOID, HAS_CORRECTION, COPIES, BLOCK_E,
    )  # fmt: skip
    out_at, inside = row * TOP_K + experts + copies * 0, (experts < TOP_K) & (copies == 0)
    tl.store(ids_ptr + out_at, ids, mask=inside)
    tl.store(weights_ptr + out_at, factors, mask=inside)


@kernel(one_variant_for=("num_pairs", "first_own"))
def pair_gates_kernel(
    x_ptr: tl.tensor,  # [tokens, HIDDEN]
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [experts, groups of inputs, 2 * SIZE] f32, if the weights are e4m3 numbers
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,  # [2 * SHARED * SIZE, HIDDEN]: gates, then ups
    out_ptr: tl.tensor,  # [pairs + tokens * SHARED, SIZE]
    ids_ptr: tl.tensor,
    load_ptr: tl.tensor,
    num_pairs: int,
    first_own: int,
    SHARED: tl.constexpr,  # parts of the shared expert, which are pairs of each token behind all others; 0: it is not computed here
    KIND: tl.constexpr,  # of the weights' numbers (packed_tiles.py): PLAIN or E4M3
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_OWN: tl.constexpr,  # 0: all experts are here
    BLOCK_E: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,  # 0 or LATE: the next kernel may only start when the choice, which it reads at once, is there
) -> None:
    """Program (p, n) computes block n of the activated gates and ups of pair p, if its expert is here.

    Behind the last block is a program for the load.
    """
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    pair, block = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    if block * BLOCK_N >= SIZE:
        if HAS_LOAD:
            if pair == 0:
                pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
                ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
                counts = tl.sum((ids == tl.arange(0, BLOCK_E)[:, None]).to(tl.int32), axis=1)
                counts = tl.where(tl.arange(0, BLOCK_E) < NUM_EXPERTS, counts, 0)
                add_step_to_load(counts, load_ptr, NUM_EXPERTS, BLOCK_E)
    else:
        token, to_ups = pair // TOP_K, SIZE * HIDDEN
        if SHARED == 0:
            expert, is_own = _own_expert(tl.load(ids_ptr + pair), first_own, NUM_OWN)
            of_expert = weight_ptr + expert * (2 * SIZE * HIDDEN)
        else:
            is_shared, behind = pair >= num_pairs, pair - num_pairs
            chosen = tl.load(ids_ptr + pair, mask=behind < 0, other=0)
            expert, is_own = _own_expert(chosen, first_own, NUM_OWN)
            is_own = tl.where(is_shared, 1, is_own)
            token = tl.where(is_shared, behind // SHARED, token)
            of_part = shared_ptr + behind % SHARED * (SIZE * HIDDEN)
            of_expert = tl.where(is_shared, of_part, weight_ptr + expert * (2 * SIZE * HIDDEN))
            to_ups = tl.where(is_shared, SHARED * SIZE * HIDDEN, to_ups)
        outputs, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        is_output = outputs < SIZE * is_own
        rows = of_expert + outputs[:, None] * HIDDEN
        gates, ups = _none(), _none()
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            is_weight = is_output[:, None] & (k < HIDDEN)[None, :]
            gates = _with(gates, _stream(rows + k[None, :], is_weight))
            ups = _with(ups, _stream(rows + to_ups + k[None, :], is_weight))
        tl.debug_barrier()  # without it the compiler requests some weights only after it has multiplied others
        scales_at = scales_ptr + expert * (2 * SIZE * ((HIDDEN + GROUP - 1) // GROUP)) + outputs
        SUMS: tl.constexpr = BLOCK_K if GROUP > HIDDEN else BLOCK_K // GROUP
        gate_sums = tl.zeros([BLOCK_N, SUMS], tl.float32)
        up_sums = tl.zeros([BLOCK_N, SUMS], tl.float32)
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            x = tl.load(x_ptr + token * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
            gate_sums += _products(
                gates[step], x, scales_at, is_output, step * BLOCK_K,
                KIND, GROUP, HIDDEN, 2 * SIZE, BLOCK_N, BLOCK_K, HOPPER,
            )  # fmt: skip
            up_sums += _products(
                ups[step], x, scales_at + SIZE, is_output, step * BLOCK_K,
                KIND, GROUP, HIDDEN, 2 * SIZE, BLOCK_N, BLOCK_K, HOPPER,
            )  # fmt: skip
        gate, up = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
        if KIND == E4M3 and GROUP > HIDDEN:
            gate *= tl.load(scales_at, mask=is_output, other=0.0)
            up *= tl.load(scales_at + SIZE, mask=is_output, other=0.0)
        if HAS_BIAS:
            bias_at = bias_ptr + expert * (2 * SIZE) + outputs
            gate += tl.load(bias_at, mask=is_output, other=0.0).to(tl.float32)
            up += tl.load(bias_at + SIZE, mask=is_output, other=0.0).to(tl.float32)
        activated = activate(gate, up, LIMIT)
        tl.store(out_ptr + pair * SIZE + outputs, activated.to(out_ptr.dtype.element_ty), mask=is_output)


@kernel(one_variant_for=("first_own",))
def token_downs_kernel(
    x_ptr: tl.tensor,  # [pairs + tokens * SHARED, SIZE]
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [experts, 1, HIDDEN] f32, if the weights are e4m3 numbers
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,  # [HIDDEN, SHARED * SIZE]
    out_ptr: tl.tensor,  # [tokens, HIDDEN]
    ids_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    first_own: int,
    KIND: tl.constexpr,  # of the weights' numbers (packed_tiles.py): PLAIN, or E4M3 without a shared expert
    SHARED: tl.constexpr,  # parts of the shared expert, which are choices of each token behind all others
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_OWN: tl.constexpr,  # 0: all experts are here
    CHOICES: tl.constexpr,  # of a tile of weights
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (t, n) computes block n of the weighted sum of the results of token t's choices of experts that are here.

    The shared expert is one of them, if it is computed here.

    In a tile of CHOICES choices a warp has choices of its own, with all outputs of the program. So it reads only their inputs, and the
    warps exchange their sums once.
    """
    STEPS: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    let_next_start(PDL)
    token, block = tl.program_id(0), tl.program_id(1)
    # The order of these dimensions decides that warps divide choices.
    choices = tl.arange(0, CHOICES)[:, None, None]
    outputs = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    # A thread reads 8 numbers at once, also if 16 would fit, so that it has as many of the inputs.
    columns = tl.max_contiguous(tl.arange(0, BLOCK_K), 8)[None, None, :]
    weights, factors, owns, scales = _none(), _none(), _none(), _none()
    bias = tl.zeros([1, BLOCK_N, 1], tl.float32)
    for first in tl.static_range(0, TOP_K + SHARED, CHOICES):
        experts = tl.zeros([CHOICES, 1, 1], tl.int32)
        of_tile = tl.zeros([CHOICES, 1, 1], tl.float32)
        for place in tl.static_range(CHOICES):
            if first + place < TOP_K:
                # The choice is there once this kernel has started. Read past the L1 cache (.cg), which may hold old values.
                chosen = tl.load(ids_ptr + token * TOP_K + first + place, cache_modifier=".cg")
                factor = tl.load(factors_ptr + token * TOP_K + first + place, cache_modifier=".cg")
                # Not by `where`, for which the compiler would load the choices one after the other.
                experts += chosen * (choices == place).to(tl.int32)
                of_tile += factor * (choices == place).to(tl.float32)
                if HAS_BIAS:
                    expert, is_own = _own_expert(chosen, first_own, NUM_OWN)
                    of_expert = tl.load(bias_ptr + expert * HIDDEN + outputs, mask=outputs < HIDDEN * is_own, other=0.0)
                    bias += of_expert.to(tl.float32) * factor
            else:
                of_tile += (choices == place).to(tl.float32)
        expert, is_own = _own_expert(experts, first_own, NUM_OWN)
        rows = weight_ptr + expert * (HIDDEN * SIZE) + outputs * SIZE
        if KIND == E4M3:
            at = scales_ptr + expert * HIDDEN + outputs
            scales = _with(scales, tl.load(at, mask=outputs < HIDDEN * is_own, other=0.0) * of_tile)
        if first + CHOICES > TOP_K:
            part = first + choices - TOP_K
            rows = tl.where(part >= 0, shared_ptr + part * SIZE + outputs * (SHARED * SIZE), rows)
            is_own = tl.where(part >= 0, 1, is_own)
        owns, factors = _with(owns, is_own), _with(factors, of_tile)
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            weights = _with(weights, _stream(rows + k, (outputs < HIDDEN * is_own) & (k < SIZE)))
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    sums = tl.zeros([CHOICES, BLOCK_N, BLOCK_K], tl.float32)
    for tile in tl.static_range((TOP_K + SHARED) // CHOICES):
        x_row = token * TOP_K + tile * CHOICES + choices
        if tile * CHOICES + CHOICES > TOP_K:
            part = tile * CHOICES + choices - TOP_K
            x_row = tl.where(part >= 0, tl.num_programs(0) * TOP_K + token * SHARED + part, x_row)
        products = tl.zeros([CHOICES, BLOCK_N, BLOCK_K], tl.float32)
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            x_at = x_ptr + x_row * SIZE + k
            x = tl.load(x_at, mask=k < SIZE * owns[tile], other=0.0).to(tl.float32)
            values = values_of(weights[tile * STEPS + step], KIND, HOPPER)
            if KIND == E4M3:
                products += values * x
            else:
                sums += values * (x * factors[tile])
        if KIND == E4M3:
            sums += products * scales[tile]
    total = tl.sum(tl.sum(sums, 2, keep_dims=True), 0, keep_dims=True) + bias
    tl.store(out_ptr + token * HIDDEN + outputs, total.to(out_ptr.dtype.element_ty), mask=outputs < HIDDEN)


@kernel(one_variant_for=("first_own",))
def packed_downs_kernel(
    x_ptr: tl.tensor,  # [pairs, SIZE]
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [experts, groups of inputs, HIDDEN] f32
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [tokens, HIDDEN]
    ids_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    first_own: int,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_OWN: tl.constexpr,  # 0: all experts are here
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOPPER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Do what `token_downs_kernel` does, with e4m3 numbers that have a scale for each GROUP inputs of an output."""
    STEPS: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    let_next_start(PDL)
    token, block = tl.program_id(0), tl.program_id(1)
    outputs, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weights, factors, scales, owns = _none(), _none(), _none(), _none()
    bias = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(TOP_K):
        # The choice is there once this kernel has started. Read past the L1 cache (.cg), which may hold old values.
        chosen = tl.load(ids_ptr + token * TOP_K + choice, cache_modifier=".cg")
        expert, is_own = _own_expert(chosen, first_own, NUM_OWN)
        owns = _with(owns, is_own)
        factor = tl.load(factors_ptr + token * TOP_K + choice, cache_modifier=".cg")
        factors = _with(factors, factor)
        scales_at = scales_ptr + expert * (HIDDEN * ((SIZE + GROUP - 1) // GROUP)) + outputs
        scales = _with(scales, scales_at)
        rows = weight_ptr + expert * (HIDDEN * SIZE) + outputs[:, None] * SIZE
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            is_weight = (outputs < HIDDEN * is_own)[:, None] & (k < SIZE)[None, :]
            weights = _with(weights, _stream(rows + k[None, :], is_weight))
        if HAS_BIAS:
            of_expert = tl.load(bias_ptr + expert * HIDDEN + outputs, mask=outputs < HIDDEN * is_own, other=0.0)
            bias += of_expert.to(tl.float32) * factor
    wait_for_inputs(PDL)
    let_next_start_late(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_K // GROUP], tl.float32)
    for choice in tl.static_range(TOP_K):
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + columns
            is_x = k < SIZE * owns[choice]
            x = tl.load(x_ptr + (token * TOP_K + choice) * SIZE + k, mask=is_x, other=0.0).to(tl.float32)
            sums += _products(
                weights[choice * STEPS + step], x * factors[choice], scales[choice], outputs < HIDDEN * owns[choice], step * BLOCK_K,
                E4M3, GROUP, SIZE, HIDDEN, BLOCK_N, BLOCK_K, HOPPER,
            )  # fmt: skip
    total = tl.sum(sums, 1) + bias
    tl.store(out_ptr + token * HIDDEN + outputs, total.to(out_ptr.dtype.element_ty), mask=outputs < HIDDEN)


def route_rows(
    x: torch.Tensor,
    router: Router,
    arrived: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: int = 0,
    block_n: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the normed rows, or x without a norm; ids [rows, top_k] i32; weights [rows, top_k] f32).

    x [rows, hidden_size] is contiguous. `arrived` has a zero for each row.
    """
    (num_rows, hidden_size), routing = x.shape, router.routing
    num_experts, device = len(router.weight), x.device
    block_n = block_n or max(1, _ROUTER_BYTES // (triton.next_power_of_2(hidden_size) * x.itemsize))
    normed = x if norm_weight is None else torch.empty_like(x)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, routing.top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_rows, routing.top_k), dtype=torch.float32, device=device)
    bias, correction = router.bias, router.correction
    copies = _ROUTER_WARPS if num_experts <= MOST_OF_A_WARP.value else 1
    route_rows_kernel[(triton.cdiv(num_experts, block_n), num_rows)](
        x, x if norm_weight is None else norm_weight, router.weight, x if bias is None else bias,
        logits if correction is None else correction, logits, arrived, normed, ids, weights, eps, routing.scale,
        HAS_NORM=norm_weight is not None, HAS_BIAS=bias is not None, HIDDEN=hidden_size, BLOCK_N=block_n,
        BLOCK_K=min(1024, triton.next_power_of_2(hidden_size)), COPIES=copies, num_warps=_ROUTER_WARPS,
        **routing_constants(routing, num_experts, correction is not None), **pdl_options(pdl),
    )  # fmt: skip
    return normed, ids, weights


def tiles_of_few(ids: torch.Tensor, weights: ExpertWeights, item_size: int) -> tuple[FewTiles, FewTiles] | None:
    """Return the tiles of both products for ids [tokens, top_k]; None if others are faster, or cannot read the weights' form."""
    if len(ids) > MOST_TOKENS or ids.numel() > MOST_PAIRS:
        return None
    stored = StoredMatrices.of(weights.gate_up), StoredMatrices.of(weights.down)
    if not all(one.kind == E4M3.value or one.is_plain for one in stored):
        return None
    sizes = [item_size if one.is_plain else 1 for one in stored]
    _, hidden, size = weights.down.shape
    num_results = ids.shape[1] + weights.num_shared_parts
    gates = FewTiles.of_gates(hidden, sizes[0])
    downs = FewTiles.of_downs(size, num_results, sizes[1], stored[1].group <= size)
    return None if gates is None or downs is None else (gates, downs)


def keeps_warps_busy(top_k: int, num_parts: int) -> bool:
    """Return whether parts of a shared expert leave as many warps of `token_downs` at work as a token's choices alone.

    Warps divide choices and parts evenly: as many warps work as the greatest common divisor of their number and that of choices and parts.
    """
    tiles = FewTiles(1, 1)
    return tiles.choices(top_k + num_parts) >= tiles.choices(top_k)


def multiply_few(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    tiles: tuple[FewTiles, FewTiles],
    pdl: int = 0,
) -> torch.Tensor:
    """Do what `multiply_experts` does, for few tokens. `ids` and `factors` are those of `route_rows` just before."""
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    gate_up, down = StoredMatrices.of(weights.gate_up), StoredMatrices.of(weights.down)
    size, num_experts, (gates, downs) = weights.down.shape[2], weights.num_routed, tiles
    num_own = 0 if weights.own is None else len(weights.own)
    assert ids.numel() <= MOST_PAIRS, ids.shape
    assert weights.shared is None or weights.can_be_beside_shared, "products of its own compute this shared expert"
    shared, num_shared, is_on_hopper = weights.shared, weights.num_shared_parts, is_hopper(x.device)
    num_pairs = num_tokens * top_k
    num_results = num_pairs + num_tokens * num_shared
    activated = torch.empty((num_results, size), dtype=x.dtype, device=x.device)
    pair_gates_kernel[(num_results, triton.cdiv(size, gates.block_n) + (weights.load is not None))](
        x, *gate_up.tensors[:2], x if weights.gate_up_bias is None else weights.gate_up_bias,
        x if shared is None else shared.gate_up, activated, ids, ids if weights.load is None else weights.load,
        num_pairs, weights.first, SHARED=num_shared, KIND=gate_up.kind, GROUP=gate_up.group,
        HAS_BIAS=weights.gate_up_bias is not None, HAS_LOAD=weights.load is not None,
        LIMIT=weights.limit or 0.0, TOP_K=top_k, SIZE=size, HIDDEN=hidden, NUM_EXPERTS=num_experts, NUM_OWN=num_own,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK_N=gates.block_n, BLOCK_K=gates.block_k, HOPPER=is_on_hopper, num_warps=gates.num_warps,
        **pdl_options(LATE.value if pdl else 0),
    )  # fmt: skip
    out = torch.empty_like(x)
    bias = x if weights.down_bias is None else weights.down_bias
    grid = (num_tokens, triton.cdiv(hidden, downs.block_n))
    sizes = {"HAS_BIAS": weights.down_bias is not None, "TOP_K": top_k, "SIZE": size, "HIDDEN": hidden}
    sizes |= {"NUM_OWN": num_own, "BLOCK_N": downs.block_n, "BLOCK_K": downs.block_k, "num_warps": downs.num_warps}
    if down.group > size:
        token_downs_kernel[grid](
            activated, *down.tensors[:2], bias, x if shared is None else shared.down, out, ids, factors, weights.first,
            KIND=down.kind, SHARED=num_shared, CHOICES=downs.choices(top_k + num_shared), HOPPER=is_on_hopper,
            maxnreg=_DOWN_REGISTERS if math.prod(grid) <= _DOWN_PROGRAMS else None, **sizes, **pdl_options(pdl),
        )  # fmt: skip
    else:
        packed_downs_kernel[grid](
            activated, *down.tensors[:2], bias, out, ids, factors, weights.first, GROUP=down.group, HOPPER=is_on_hopper,
            **sizes, **pdl_options(pdl),
        )  # fmt: skip
    return out
