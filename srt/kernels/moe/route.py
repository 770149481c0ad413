"""The router of a mixture of experts: its product, and the choice of each token's experts by it."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import dot_dtype, jit, kernel
from srt.kernels.build.pdl import let_next_start, let_next_start_late, pdl_options, wait_for_inputs
from srt.utils.layer_spec import Routing

_FEW_ROWS: Final = 16
_BLOCK_EXPERTS: Final = 16
_BLOCK_K: Final = 256
_ROWS_OF_A_CHOICE: Final = 4
MOST_OF_A_WARP = tl.constexpr(128)  # experts: each thread loads four logits
_LEAST_SUM = tl.constexpr(1e-20)  # added to a sum of weights, so that it can divide them
_LEAST = tl.constexpr(-(1 << 31))  # of 32 bits; no number but one kind of NaN has these bits when reordered


@kernel(one_variant_for=("num_rows",))
def router_logits_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_rows: int,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (e, t) computes the float32 logits of block e of the experts for block t of the rows."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    of_row, of_expert = (rows < num_rows)[:, None], (experts < NUM_EXPERTS)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for begin in range(0, HIDDEN, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < HIDDEN
        x_at = x_ptr + rows.to(tl.int64)[:, None] * HIDDEN + k[None, :]
        weight_at = weight_ptr + experts[None, :] * HIDDEN + k[:, None]
        x = tl.load(x_at, mask=of_row & inside[None, :], other=0.0)
        weight = tl.load(weight_at, mask=of_expert & inside[:, None], other=0.0)
        sums = tl.dot(x.to(DOT), weight.to(DOT), sums, input_precision="ieee")
    let_next_start_late(PDL)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    out_at = logits_ptr + rows.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(out_at, sums, mask=of_row & of_expert)


@jit
def _keep_best_groups(
    ranks: tl.tensor,
    experts: tl.tensor,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tensor:
    """Return the ranks without those of experts outside the best groups: those with the largest sums of one or two best ranks."""
    group = experts // GROUP
    sums = tl.full(ranks.shape, -float("inf"), dtype=tl.float32)  # of an expert's group
    for number in tl.static_range(NUM_GROUPS):
        own = tl.where(group == number, ranks, -float("inf"))
        best = tl.max(own, axis=1)
        if GROUP_SCORES == 2:
            first_id = tl.min(tl.where(own == best[:, None], experts, BLOCK_E), axis=1)
            best += tl.max(tl.where(experts == first_id[:, None], -float("inf"), own), axis=1)
        sums = tl.where(group == number, best[:, None], sums)
    is_kept = tl.zeros(ranks.shape, dtype=tl.int1)
    for _ in tl.static_range(CHOSEN_GROUPS):
        left = tl.where(is_kept, -float("inf"), sums)
        best = tl.max(left, axis=1)
        best_group = tl.min(tl.where((left == best[:, None]) & ~is_kept, group, BLOCK_E), axis=1)
        is_kept = is_kept | (group == best_group[:, None])
    return tl.where(is_kept, ranks, -float("inf"))


@jit
def _reorder(bits: tl.tensor) -> tl.tensor:
    """Map the bits of float32 numbers to integers in the same order, and such integers back to the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def choose_by_logits(
    logits: tl.tensor,
    of_row: tl.tensor,
    correction_ptr: tl.tensor,
    scale: float,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tuple:
    """Return (experts, weights) for logits [BLOCK_T, BLOCK_E]: the lower number among equals.

    Both are [BLOCK_T, BLOCK_E], with a choice in each of the first TOP_K columns: in the layout of the logits, so that choices do not
    pass through shared memory. If a warp has a whole row, no other warp is needed.
    """
    experts = tl.arange(0, BLOCK_E)[None, :]
    is_expert = experts < NUM_EXPERTS
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        largest = tl.max(tl.where(of_row, logits, 0.0), axis=1)
        powers = tl.where(of_row & is_expert, tl.exp(logits - largest[:, None]), 0.0)
        scores = powers / tl.where(of_row, tl.sum(powers, axis=1)[:, None], 1.0)
    ranks = scores
    if HAS_CORRECTION:
        # Loaded for every row, so that corrections come in the layout of the logits.
        of_all = experts + tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
        ranks += tl.load(correction_ptr + of_all, mask=of_all < NUM_EXPERTS, other=0.0)
    ranks = tl.where(is_expert, ranks, -float("inf"))
    if NUM_GROUPS > 1:
        size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        ranks = _keep_best_groups(ranks, experts, size, NUM_GROUPS, CHOSEN_GROUPS, GROUP_SCORES, BLOCK_E)
    # A warp has an instruction that finds the largest of 32 integers, but none for other numbers. Where several warps have parts of a row,
    # a rank and its expert are packed into one integer, so that one reduction finds the best.
    order = _reorder(ranks.to(tl.int32, bitcast=True))
    kept_ids = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    kept = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        if BLOCK_E <= MOST_OF_A_WARP:
            best = tl.max(order, axis=1)
            best_id = tl.min(tl.where(order == best[:, None], experts, NUM_EXPERTS - 1), axis=1)
        else:
            packed = tl.max((order.to(tl.int64) << 32) | (BLOCK_E - 1 - experts).to(tl.int64), axis=1)
            best = (packed >> 32).to(tl.int32)
            best_id = tl.minimum(BLOCK_E - 1 - (packed & 0xFFFFFFFF).to(tl.int32), NUM_EXPERTS - 1)
        is_best = experts == best_id[:, None]
        if HAS_CORRECTION:
            score = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        else:
            score = _reorder(best).to(tl.float32, bitcast=True)
        kept_ids = tl.where(experts == choice, best_id[:, None], kept_ids)
        kept = tl.where(experts == choice, score[:, None], kept)
        total += score
        order = tl.where(is_best, _LEAST, order)
    if RENORMALISE:
        kept = kept / tl.where(of_row, total[:, None] + _LEAST_SUM, 1.0)
    return kept_ids, kept * scale


@kernel(one_variant_for=("num_rows",))
def choose_experts_kernel(
    logits_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_rows: int,
    scale: float,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Each program chooses the experts of BLOCK_T rows, the lower number among equals."""
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)[None, :]
    of_row, is_expert = (rows < num_rows)[:, None], experts < NUM_EXPERTS
    wait_for_inputs(PDL)
    logits = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + experts, mask=of_row & is_expert, other=-float("inf"))
    let_next_start_late(PDL)
    ids, weights = choose_by_logits(
        logits, of_row, correction_ptr, scale, NUM_EXPERTS, TOP_K, NUM_GROUPS, CHOSEN_GROUPS, GROUP_SCORES,
        RENORMALISE, SIGMOID, HAS_CORRECTION, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    out_at = rows[:, None] * TOP_K + experts  # a column is a choice here
    inside = of_row & (experts < TOP_K)
    tl.store(ids_ptr + out_at, ids, mask=inside)
    tl.store(weights_ptr + out_at, weights, mask=inside)


def routing_constants(routing: Routing, num_experts: int, has_correction: bool) -> dict[str, Any]:
    """Return the constants of kernels that choose experts."""
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "NUM_GROUPS": routing.num_groups,
        "CHOSEN_GROUPS": routing.num_chosen_groups,
        "GROUP_SCORES": routing.num_group_scores,
        "RENORMALISE": routing.is_renormalised,
        "SIGMOID": routing.scoring == "sigmoid",
        "HAS_CORRECTION": has_correction,
        "BLOCK_E": triton.next_power_of_2(num_experts),
    }


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, pdl: int = 0
) -> torch.Tensor:
    """Return the float32 logits [rows, experts] for x [rows, hidden_size] and weight [experts, hidden_size], both contiguous."""
    num_rows, (num_experts, hidden_size) = len(x), weight.shape
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
    block_t = _FEW_ROWS if num_rows <= _FEW_ROWS else 32
    grid = (triton.cdiv(num_experts, _BLOCK_EXPERTS), triton.cdiv(num_rows, block_t))
    router_logits_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        logits,
        num_rows,
        HAS_BIAS=bias is not None,
        NUM_EXPERTS=num_experts,
        HIDDEN=hidden_size,
        BLOCK_T=block_t,
        BLOCK_E=_BLOCK_EXPERTS,
        BLOCK_K=_BLOCK_K * 2 // x.itemsize,
        DOT=dot_dtype(x.dtype),
        num_stages=3,
        **pdl_options(pdl),
    )
    return logits


def choose_experts(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None, pdl: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids [rows, top_k] i32, weights [rows, top_k] f32) of the best experts, the best first."""
    num_rows, num_experts = logits.shape
    ids = torch.empty((num_rows, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, routing.top_k), dtype=torch.float32, device=logits.device)
    choose_experts_kernel[(triton.cdiv(num_rows, _ROWS_OF_A_CHOICE),)](
        logits,
        logits if correction is None else correction,
        ids,
        weights,
        num_rows,
        routing.scale,
        BLOCK_T=_ROWS_OF_A_CHOICE,
        **routing_constants(routing, num_experts, correction is not None),
        **pdl_options(pdl),
    )
    return ids, weights
