"""top_k, top_p and min_p as one threshold per row, found without sorting the vocabulary.

In practice a filter keeps few tokens. So the values near the best are gathered first: of a few distances from the best value, a row uses
the smallest that is certain to include the boundary. Then the boundary is found bit by bit. If the gathered values do not fit in the
room, the whole row is searched, which gives the same result but is slow.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs

BLOCK: Final = 2048  # token ids per program
ROOM: Final = 8192  # values near the best that a row can gather
_FILTERS = ("rows_ptr", "temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr")
_LEVELS = tl.constexpr(8)  # number of distances; the last includes everything
_ROUNDED = tl.constexpr(1e-12)  # bound of the relative difference between float64 sums in different orders


@jit
def _distance(level: tl.tensor) -> tl.tensor:
    """Return the level's distance from the best value: 1, 2, 4, 6, 8, 10, 13, infinity."""
    distance = tl.where(level == 0, 1.0, tl.where(level < 6, 2.0 * level, 13.0))
    return tl.where(level == _LEVELS - 1, float("inf"), distance)


@jit
def _scaled(
    logits_ptr: tl.tensor, row: tl.tensor, columns: tl.tensor, num_columns: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Return logit / T, rounded as in the sampler; -inf after the end of the vocabulary."""
    logits = tl.load(logits_ptr + row + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)


@jit
def _weight(values: tl.tensor, best: tl.tensor) -> tl.tensor:
    """Return probabilities relative to that of the best value."""
    return tl.exp(values.to(tl.float64) - best.to(tl.float64))


@jit
def _key(values: tl.tensor) -> tl.tensor:
    """Map values to integers with the same order."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _value(key: tl.tensor) -> tl.tensor:
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def _is_filtered(
    place: tl.tensor, num_columns: tl.tensor,
    temperatures_ptr: tl.tensor, top_ks_ptr: tl.tensor, top_ps_ptr: tl.tensor, min_ps_ptr: tl.tensor,
) -> tl.tensor:  # fmt: skip
    has_filter = 0
    if tl.load(top_ks_ptr + place) < num_columns:
        has_filter = 1
    if tl.load(top_ps_ptr + place) < 1:
        has_filter = 1
    if tl.load(min_ps_ptr + place) > 0:
        has_filter = 1
    if tl.load(temperatures_ptr + place) <= 0:
        has_filter = 0
    return has_filter == 1


@jit
def _best_of(best_ptr: tl.tensor, place: tl.tensor, num_blocks: tl.tensor, NUM_BLOCKS: tl.constexpr) -> tl.tensor:
    blocks = tl.arange(0, NUM_BLOCKS)
    bests = tl.load(best_ptr + place * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    return tl.max(bests, 0)


@kernel(one_variant_for=(*_FILTERS, "best_ptr", "num_blocks"))
def filter_best_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    best_ptr: tl.tensor,  # [F, blocks] float32
    row_stride: tl.tensor,
    num_columns: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, f) finds the largest value of the block."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    if not _is_filtered(place, num_columns, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr):
        return
    row = (tl.load(rows_ptr + place).to(tl.int64) if HAS_ROWS else place) * row_stride
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = _scaled(logits_ptr, row, columns, num_columns, tl.load(temperatures_ptr + place))
    tl.store(best_ptr + place * num_blocks + block, tl.max(values, 0))


@kernel(one_variant_for=(*_FILTERS, "best_ptr", "masses_ptr", "counts_ptr", "num_blocks"))
def filter_levels_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,  # [F, blocks, levels] float64: sum of weights within the level's distance; 0 if the row uses top_k
    counts_ptr: tl.tensor,  # [F, blocks, levels] int32: number of values within the level's distance
    row_stride: tl.tensor,
    num_columns: tl.tensor,
    num_blocks: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, f) computes weights and counts of its block for each level."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    if not _is_filtered(place, num_columns, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr):
        return
    row = (tl.load(rows_ptr + place).to(tl.int64) if HAS_ROWS else place) * row_stride
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = _scaled(logits_ptr, row, columns, num_columns, tl.load(temperatures_ptr + place))
    best = _best_of(best_ptr, place, num_blocks, NUM_BLOCKS)
    is_token = columns < num_columns
    levels = tl.arange(0, _LEVELS)
    masses = tl.zeros([_LEVELS], tl.float64)
    counts = tl.zeros([_LEVELS], tl.int32)
    for level in range(_LEVELS):
        is_near = is_token & (values >= best - _distance(level))
        counts += tl.where(levels == level, tl.sum(is_near.to(tl.int32), 0), 0)
    if tl.load(top_ks_ptr + place) >= num_columns:
        weights = tl.where(is_token, _weight(values, best), 0.0)
        for level in range(_LEVELS):
            is_near = values >= best - _distance(level)
            masses += tl.where(levels == level, tl.sum(tl.where(is_near, weights, 0.0), 0), 0.0)
    out = (place * num_blocks + block) * _LEVELS + levels
    tl.store(masses_ptr + out, masses)
    tl.store(counts_ptr + out, counts)


@jit
def _choose_level(
    masses_ptr: tl.tensor, counts_ptr: tl.tensor, place: tl.tensor, num_blocks: tl.tensor,
    top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, NUM_BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return (the first level that includes the boundary, its number of values, the weight of all values)."""
    levels = tl.arange(0, _LEVELS)
    blocks = tl.arange(0, NUM_BLOCKS)
    offsets = (place * num_blocks + blocks)[:, None] * _LEVELS + levels[None, :]
    mask = (blocks < num_blocks)[:, None]
    masses = tl.sum(tl.load(masses_ptr + offsets, mask=mask, other=0.0), 0)
    counts = tl.sum(tl.load(counts_ptr + offsets, mask=mask, other=0), 0)
    is_last = levels == _LEVELS - 1
    total = tl.sum(tl.where(is_last, masses, 0.0), 0)
    everything = tl.sum(tl.where(is_last, counts, 0), 0)
    # With top_k, the other filters apply to the values that it keeps. Without, the strictest filter decides.
    holds_nucleus = masses > tl.where(top_p < 1, top_p * total * (1 + _ROUNDED), float("inf"))
    farthest = tl.exp(-_distance(levels).to(tl.float64))
    holds_likely = farthest < tl.where(min_p > 0, min_p * (1 - _ROUNDED), -1.0)
    holds = tl.where(top_k < everything, counts >= top_k, holds_nucleus | holds_likely) | is_last
    level = tl.min(tl.where(holds, levels, _LEVELS), 0)
    return level, tl.sum(tl.where(levels == level, counts, 0), 0), total


@kernel(one_variant_for=(*_FILTERS, "best_ptr", "masses_ptr", "counts_ptr", "num_blocks"))
def filter_gather_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    near_ptr: tl.tensor,  # [F, ROOM] float32, in the order of the vocabulary, so that sums of weights have one order
    row_stride: tl.tensor,
    num_columns: tl.tensor,
    num_blocks: tl.tensor,
    ROOM: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (b, f) gathers the block's values within the row's level, if there is room for all of the row."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    if not _is_filtered(place, num_columns, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr):
        return
    level, count, _ = _choose_level(
        masses_ptr, counts_ptr, place, num_blocks,
        tl.load(top_ks_ptr + place), tl.load(top_ps_ptr + place), tl.load(min_ps_ptr + place), NUM_BLOCKS,
    )  # fmt: skip
    if count <= ROOM:
        row = (tl.load(rows_ptr + place).to(tl.int64) if HAS_ROWS else place) * row_stride
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = _scaled(logits_ptr, row, columns, num_columns, tl.load(temperatures_ptr + place))
        best = _best_of(best_ptr, place, num_blocks, NUM_BLOCKS)
        is_near = (columns < num_columns) & (values >= best - _distance(level))
        ranks = tl.cumsum(is_near.to(tl.int32), 0)
        if tl.max(ranks, 0) > 0:
            blocks = tl.arange(0, NUM_BLOCKS)
            counts = counts_ptr + (place * num_blocks + blocks) * _LEVELS + level
            first = tl.sum(tl.load(counts, mask=blocks < block, other=0), 0)
            tl.store(near_ptr + place * ROOM + first + ranks - 1, values, mask=is_near)


@jit
def _part(
    logits_ptr: tl.tensor, row: tl.tensor, near_ptr: tl.tensor, start: tl.tensor, size: tl.tensor,
    temperature: tl.tensor, WHOLE: tl.constexpr, ROOM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return (values, mask of the valid ones) from `start` on: of the gathered values, or of the whole row."""
    columns = start + tl.arange(0, ROOM)
    is_real = columns < size
    if WHOLE:
        values = _scaled(logits_ptr, row, columns, size, temperature)
    else:
        values = tl.load(near_ptr + columns, mask=is_real, other=float("-inf"))
    return values, is_real


@jit
def _nucleus(
    keys: tl.tensor, weights: tl.tensor, above: tl.tensor, smallest: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """Return the largest key such that the weights from it on, plus `above`, reach `wanted`. Keys below `smallest` are ignored."""
    found = tl.zeros([], tl.uint32)
    for bit in range(32):
        higher = found | (tl.full([], 0x80000000, tl.uint32) >> bit)
        if above + tl.sum(tl.where(keys >= tl.maximum(higher, smallest), weights, 0.0), 0) >= wanted:
            found = higher
    return found


@jit
def _nucleus_of_row(
    logits_ptr: tl.tensor, row: tl.tensor, near_ptr: tl.tensor, size: tl.tensor, temperature: tl.tensor,
    best: tl.tensor, smallest: tl.tensor, wanted: tl.tensor, distance: tl.tensor, ROOM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Do what `_nucleus` does for a whole row: halve the range of values that contains the boundary until all of them fit in the room.

    `distance` is the expected distance of the boundary from the best value.
    """
    low = tl.zeros([], tl.float32) - float("inf")
    high = _value(_key(best) + 1)
    above = tl.zeros([], tl.float64)  # sum of weights from `high` on
    num_between = size
    num_above = tl.zeros([], tl.int32)
    tried = best - tl.where(distance < float("inf"), distance, 16.0)
    while num_between > ROOM and low < tried and tried < high:
        masses = tl.zeros([ROOM], tl.float64)
        counts = tl.zeros([ROOM], tl.int32)
        for start in range(0, size, ROOM):
            values, is_real = _part(logits_ptr, row, near_ptr, start, size, temperature, True, ROOM)
            is_from = is_real & (values >= tried) & (_key(values) >= smallest)
            masses += tl.where(is_from, _weight(values, best), 0.0)
            counts += is_from.to(tl.int32)
        mass = tl.sum(masses, 0)
        count = tl.sum(counts, 0)
        if mass >= wanted:
            low = tried
            num_between = count - num_above
        else:
            num_between -= count - num_above
            high = tried
            above = mass
            num_above = count
        tried = tl.where(low > float("-inf"), low + (high - low) * 0.5, best - (best - high) * 16)
    if num_between > ROOM:
        return _key(low)  # all values of the range are equal
    filled = tl.zeros([], tl.int32)
    for start in range(0, size, ROOM):
        values, is_real = _part(logits_ptr, row, near_ptr, start, size, temperature, True, ROOM)
        is_between = is_real & (values >= low) & (values < high) & (_key(values) >= smallest)
        ranks = tl.cumsum(is_between.to(tl.int32), 0)
        tl.store(near_ptr + filled + ranks - 1, values, mask=is_between)
        filled += tl.max(ranks, 0)
    tl.debug_barrier()
    values, is_real = _part(logits_ptr, row, near_ptr, 0, filled, temperature, False, ROOM)
    return _nucleus(_key(values), tl.where(is_real, _weight(values, best), 0.0), above, smallest, wanted)


@kernel(one_variant_for=(*_FILTERS, "best_ptr", "masses_ptr", "counts_ptr", "thresholds_ptr", "num_blocks"))
def filter_threshold_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    near_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,  # [rows] float32
    row_stride: tl.tensor,
    num_columns: tl.tensor,
    num_blocks: tl.tensor,
    WHOLE: tl.constexpr,  # True: process the rows whose values did not fit, False: the others
    ROOM: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program f computes the threshold of row `rows[f]`; -inf if the best value is not finite."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows_ptr + place).to(tl.int64) if HAS_ROWS else place
    if not _is_filtered(place, num_columns, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr):
        if not HAS_ROWS:
            tl.store(thresholds_ptr + row_index, float("-inf"))
        return
    row = row_index * row_stride
    temperature = tl.load(temperatures_ptr + place)
    top_k = tl.load(top_ks_ptr + place)
    top_p = tl.load(top_ps_ptr + place)
    min_p = tl.load(min_ps_ptr + place)
    best = _best_of(best_ptr, place, num_blocks, NUM_BLOCKS)
    level, count, total = _choose_level(masses_ptr, counts_ptr, place, num_blocks, top_k, top_p, min_p, NUM_BLOCKS)
    size = num_columns if WHOLE else count
    if (count <= ROOM) == WHOLE:
        return
    near = near_ptr + place * ROOM
    # If all values fit, they stay in registers; else each step of the search reads the row again, part by part.
    values, is_real = _part(logits_ptr, row, near, 0, size, temperature, WHOLE, ROOM)
    keys = _key(values)
    weights = tl.where(is_real, _weight(values, best), 0.0)

    threshold = tl.zeros([], tl.uint32)  # a key, below all values
    if top_k < num_columns:
        for bit in range(32):
            higher = threshold | (tl.full([], 0x80000000, tl.uint32) >> bit)
            reached = (is_real & (keys >= higher)).to(tl.int32)
            if WHOLE:
                for start in range(ROOM, size, ROOM):
                    others, are_real = _part(logits_ptr, row, near, start, size, temperature, WHOLE, ROOM)
                    reached += (are_real & (_key(others) >= higher)).to(tl.int32)
            if tl.sum(reached, 0) >= top_k:
                threshold = higher
        kept = tl.where(keys >= threshold, weights, 0.0)
        if WHOLE:
            for start in range(ROOM, size, ROOM):
                others, are_real = _part(logits_ptr, row, near, start, size, temperature, WHOLE, ROOM)
                kept += tl.where(are_real & (_key(others) >= threshold), _weight(others, best), 0.0)
        total = tl.sum(kept, 0)
    if top_p < 1:
        wanted = top_p * total
        if WHOLE:
            distance = _distance(level)
            nucleus = _nucleus_of_row(
                logits_ptr, row, near, size, temperature, best, threshold, wanted, distance, ROOM
            )  # fmt: skip
        else:
            nucleus = _nucleus(keys, weights, 0.0, threshold, wanted)
        threshold = tl.maximum(threshold, nucleus)
    if min_p > 0:
        likely = tl.where(weights >= min_p, values, float("inf"))
        if WHOLE:
            for start in range(ROOM, size, ROOM):
                others, are_real = _part(logits_ptr, row, near, start, size, temperature, WHOLE, ROOM)
                is_likely = are_real & (_weight(others, best) >= min_p)
                likely = tl.minimum(likely, tl.where(is_likely, others, float("inf")))
        threshold = tl.maximum(threshold, tl.minimum(_key(tl.min(likely, 0)), _key(best)))
    is_finite = (best - best) == 0
    tl.store(thresholds_ptr + row_index, tl.where(is_finite, _value(threshold), float("-inf")))


def filter_thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [R] float32: for each of the F `rows` of logits [R, vocabulary] the smallest logit / T that passes its filters; else -inf.

    `rows` and `top_ks` are int64, `temperatures` [F] float32, `top_ps` and `min_ps` float64. None as `rows` means all. A row of
    temperature 0 is greedy and is not filtered. A top_k of at least the vocabulary, a top_p of at least 1 and a min_p of 0 have no effect.
    """
    num_columns, num_filtered, device = logits.shape[1], len(temperatures), logits.device
    assert logits.stride(1) == 1, logits.stride()
    thresholds = torch.empty(len(logits), dtype=torch.float32, device=device)
    if rows is not None:
        thresholds.fill_(float("-inf"))
    if num_filtered == 0:
        return thresholds
    num_blocks = triton.cdiv(num_columns, BLOCK)
    width = triton.next_power_of_2(num_blocks)
    best = torch.empty((num_filtered, num_blocks), dtype=torch.float32, device=device)
    levels = (num_filtered, num_blocks, _LEVELS.value)
    masses = torch.empty(levels, dtype=torch.float64, device=device)
    counts = torch.empty(levels, dtype=torch.int32, device=device)
    near = torch.empty((num_filtered, ROOM), dtype=torch.float32, device=device)
    inputs = (logits, temperatures if rows is None else rows, temperatures, top_ks, top_ps, min_ps, best)
    sizes = (logits.stride(0), num_columns, num_blocks)
    options = {"HAS_ROWS": rows is not None, **pdl_options(pdl)}
    grid = (num_blocks, num_filtered)
    filter_best_kernel[grid](*inputs, *sizes, BLOCK=BLOCK, **options)
    filter_levels_kernel[grid](*inputs, masses, counts, *sizes, NUM_BLOCKS=width, BLOCK=BLOCK, **options)
    filter_gather_kernel[grid](
        *inputs, masses, counts, near, *sizes, ROOM=ROOM, NUM_BLOCKS=width, BLOCK=BLOCK, **options
    )
    for whole in (False, True):
        filter_threshold_kernel[(num_filtered,)](
            *inputs, masses, counts, near, thresholds, *sizes,
            WHOLE=whole, ROOM=ROOM, NUM_BLOCKS=width, num_warps=16, **options,
        )  # fmt: skip
    return thresholds
