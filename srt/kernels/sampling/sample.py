"""The draw: argmax over logit / T + Gumbel noise, equal to the bit to `srt.layers.sampler` and `srt.layers.philox`.

The noise is rounded from float64, which is too slow for a whole vocabulary. So the first kernel computes it in float32 and keeps the best
value of each block of the vocabulary. The second kernel computes exactly, but only for blocks that can contain the winner.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import IS_INTERPRETED, jit, kernel
from srt.kernels.build.pdl import let_next_start, pdl_options, wait_for_inputs
from srt.kernels.sampling.draw_rows import DrawRows

BLOCK: Final = 2048  # token ids per program; a multiple of 4
_SLACK = tl.constexpr(1e-3)  # bound of the error of float32 noise, with a wide margin
_RELATIVE_SLACK = tl.constexpr(
    2.0**-20
)  # relative bound of the rounding of large logits by scaling and by adding noise
_ROUNDS = tl.constexpr(10)
_LN_2 = tl.constexpr(math.log(2))
_CAN_APPROXIMATE = tl.constexpr(not IS_INTERPRETED)


@jit
def _random_words(seed: tl.tensor, position: tl.tensor, first_group: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return [BLOCK] uint32: the random words of the token ids from 4 * first_group on."""
    groups = (first_group + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c0 = groups
    c1 = tl.zeros_like(groups) + position.to(tl.uint32)
    c2 = tl.zeros_like(groups)
    c3 = tl.zeros_like(groups)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    pairs = tl.join(tl.join(c0, c1), tl.join(c2, c3))  # [groups, low bit of the lane, high bit]
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [BLOCK])


@jit
def _quick_log(x: tl.tensor) -> tl.tensor:
    """Return the hardware's approximation of the natural logarithm of normal numbers: its relative or absolute error is below 2**-22."""
    if _CAN_APPROXIMATE:
        log_2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return log_2 * _LN_2
    else:
        return tl.log(x)


@jit
def _quick_noise(words: tl.tensor) -> tl.tensor:
    """Return float32 noise with an error below _SLACK. Near 1 the uniform number is represented by its distance from 1, for precision."""
    uniform = (words.to(tl.float32) + 0.5) * 2.0**-32
    gap = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    series = gap * (1.0 + gap * (0.5 + gap * (1.0 / 3.0 + gap * (0.25 + gap * 0.2))))
    exponential = tl.where(gap < 0.0625, series, -_quick_log(uniform))
    return -_quick_log(exponential)


@jit
def _exact_noise(words: tl.tensor) -> tl.tensor:
    uniform = (words.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@jit
def _scaled(
    logits_ptr: tl.tensor, row_start: tl.tensor, columns: tl.tensor, num_columns: tl.tensor,
    temperature: tl.tensor, threshold: tl.tensor, EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the row's logits / T; -inf outside the columns and below the threshold. A greedy row has T = 0 and is not divided.

    Unless EXACT, the last two bits of the quotient may be wrong.
    """
    inside = (columns >= 0) & (columns < num_columns)
    logits = tl.load(logits_ptr + row_start + columns, mask=inside, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        if EXACT:
            logits = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
        else:
            logits *= 1.0 / temperature
    return tl.where(logits < threshold, float("-inf"), logits)


@kernel(
    one_variant_for=(
        "temperatures_ptr", "seeds_ptr", "positions_ptr", "thresholds_ptr", "best_ptr", "first_group", "num_blocks",
    )
)  # fmt: skip
def block_best_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    best_ptr: tl.tensor,  # [rows, blocks] float32
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    first_group: tl.tensor,
    num_blocks: tl.tensor,
    HAS_THRESHOLD: tl.constexpr,
    SHIFT: tl.constexpr,  # offset of the shard's first id from a multiple of 4
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block, row) finds the best value of the block: exact for a greedy row, else within the slack; +inf for a NaN."""
    let_next_start(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    wait_for_inputs(PDL)
    temperature = tl.load(temperatures_ptr + row)
    threshold = tl.load(thresholds_ptr + row) if HAS_THRESHOLD else float("-inf")
    columns = block * BLOCK + tl.arange(0, BLOCK) - SHIFT
    # A value below the threshold must not become the best, so with a threshold the quotient is exact.
    values = _scaled(logits_ptr, row * row_stride, columns, num_columns, temperature, threshold, HAS_THRESHOLD)
    if temperature > 0:
        words = _random_words(
            tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first_group + block * (BLOCK // 4), BLOCK
        )
        values += _quick_noise(words)
    values = tl.where(values != values, float("inf"), values)
    tl.store(best_ptr + row * num_blocks + block, tl.max(values, 0))


@kernel(
    one_variant_for=(
        "temperatures_ptr", "seeds_ptr", "positions_ptr", "thresholds_ptr", "best_ptr", "ids_ptr", "values_ptr",
        "first_group", "num_blocks", "shard_start", "vocab_size",
    )
)  # fmt: skip
def draw_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,  # [rows] int64
    values_ptr: tl.tensor,  # [rows] float32
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    first_group: tl.tensor,
    num_blocks: tl.tensor,
    shard_start: tl.tensor,
    vocab_size: tl.tensor,
    HAS_THRESHOLD: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # a power of two, at least num_blocks
    PDL: tl.constexpr,
) -> None:
    """Program r finds the id with the largest value of row r, the lowest of equals, and that value, which is not finite for a void draw."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    wait_for_inputs(PDL)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    threshold = tl.load(thresholds_ptr + row) if HAS_THRESHOLD else float("-inf")
    bests = tl.load(best_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    peak = tl.max(bests, 0)
    slack = tl.where(temperature > 0, 2 * _SLACK + (tl.abs(peak) + 32) * _RELATIVE_SLACK, 0.0)
    # A filter may leave no token on one of several ranks: its value is -inf then, so that another rank's token is drawn.
    candidates = (bests >= peak - slack) & (bests > float("-inf"))
    best_value = tl.where(peak == float("inf"), float("nan"), float("-inf"))  # NaN: no comparison below succeeds
    best_column = tl.zeros([], tl.int32)
    block = tl.min(tl.where(candidates, blocks, NUM_BLOCKS), 0)
    while block < NUM_BLOCKS:
        columns = block * BLOCK + tl.arange(0, BLOCK) - SHIFT
        values = _scaled(logits_ptr, row * row_stride, columns, num_columns, temperature, threshold, True)
        if temperature > 0:
            values += _exact_noise(_random_words(seed, position, first_group + block * (BLOCK // 4), BLOCK))
        value = tl.max(values, 0)
        if value > best_value:
            best_value = value
            best_column = tl.min(tl.where(values == value, columns, num_columns), 0)
        block = tl.min(tl.where(candidates & (blocks > block), blocks, NUM_BLOCKS), 0)
    tl.store(ids_ptr + row, tl.minimum(best_column + shard_start, vocab_size - 1).to(tl.int64))
    tl.store(values_ptr + row, best_value)


def draw(
    logits: torch.Tensor, rows: DrawRows, shard_start: int, vocab_size: int, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids [R] int64, winning values [R] float32) of this shard's logits [R, columns], which start at token id `shard_start`.

    Ids from `vocab_size` on are never drawn. If a value is not finite, its id is within the vocabulary but has no meaning.
    """
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    num_columns = max(0, min(num_columns, vocab_size - shard_start))
    num_blocks = triton.cdiv(num_columns + shard_start % 4, BLOCK)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    values = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_columns == 0 or num_rows == 0:
        return ids.fill_(vocab_size - 1), values.fill_(float("-inf"))
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    thresholds = rows.temperatures if rows.thresholds is None else rows.thresholds
    inputs = (logits, rows.temperatures, rows.seeds, rows.positions, thresholds, best)
    has_threshold = rows.thresholds is not None
    block_best_kernel[(num_blocks, num_rows)](
        *inputs, num_columns, logits.stride(0), shard_start // 4, num_blocks,
        HAS_THRESHOLD=has_threshold, SHIFT=shard_start % 4, BLOCK=BLOCK, **pdl_options(pdl),
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        *inputs, ids, values, num_columns, logits.stride(0), shard_start // 4, num_blocks, shard_start, vocab_size,
        HAS_THRESHOLD=has_threshold, SHIFT=shard_start % 4, BLOCK=BLOCK, NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8,
        **pdl_options(pdl),
    )  # fmt: skip
    return ids, values
