"""Penalties, biases and masked stop tokens on the device, equal to the bit to those of `srt.layers.logit_adjustments`.

Only a row's tokens are visited, not the vocabulary. One kernel counts them in scratch memory with one number per token id. The next kernel
exchanges each number for 0, and the thread that receives the number changes that logit. So the scratch memory is zero between two uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton.language as tl

from srt.kernels.build.jit import IS_INTERPRETED, jit, kernel

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Penalties, limits, bias ids, bias values and stop ids by slot: AdjustmentTables of `srt.mem_cache.memory_pool`."""
MOST_ROWS: Final = 256  # rows of the scratch memory; more rows are processed in several launches
BLOCK: Final = 256  # tokens at a time
_PARTS: Final = 8  # programs that share a row's tokens
_SEEN = tl.constexpr(1 << 30)  # bit: the prompt has the token; the lower bits count it in the output
# Without fused multiply-add a product is rounded before it is subtracted, as in the reference.
_OPTIONS: Final[dict[str, Any]] = {} if IS_INTERPRETED else {"enable_fp_fusion": False}


@jit
def _penalties(penalties_ptr: tl.tensor, slot: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (repetition, frequency, presence, whether any has an effect)."""
    repetition = tl.load(penalties_ptr + slot * 3)
    frequency = tl.load(penalties_ptr + slot * 3 + 1)
    presence = tl.load(penalties_ptr + slot * 3 + 2)
    return repetition, frequency, presence, (repetition != 1) | (frequency != 0) | (presence != 0)


@jit
def _columns(
    token_table_ptr: tl.tensor, slot: tl.tensor, token_table_stride: tl.tensor, at: tl.tensor, known: tl.tensor,
    shard_start: tl.tensor, num_columns: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return (columns of the tokens at these positions, whether each is known and in this shard)."""
    tokens = tl.load(token_table_ptr + slot * token_table_stride + at, mask=at < known, other=-1)
    columns = tl.where(at < known, tokens - shard_start, -1)
    return columns, (columns >= 0) & (columns < num_columns)


@kernel(
    one_variant_for=(
        "slots_ptr", "positions_ptr", "penalties_ptr", "limits_ptr", "token_table_ptr", "counts_ptr",
        "num_columns", "shard_start", "token_table_stride",
    )
)  # fmt: skip
def count_tokens_kernel(
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    counts_ptr: tl.tensor,  # [rows, columns] int32, all zero
    num_columns: tl.tensor,
    shard_start: tl.tensor,
    token_table_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (part, row) counts its share of a penalised row's tokens."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    _, _, _, is_penalised = _penalties(penalties_ptr, slot)
    if not is_penalised:
        return
    known = tl.load(positions_ptr + row).to(tl.int32)
    prompt_len = tl.load(limits_ptr + slot * 4).to(tl.int32)
    counts_ptr += row * num_columns
    for begin in range(tl.program_id(0) * BLOCK, known, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        columns, inside = _columns(token_table_ptr, slot, token_table_stride, at, known, shard_start, num_columns)
        is_output = at >= prompt_len
        tl.atomic_add(counts_ptr + columns, 1, mask=inside & is_output, sem="relaxed")
        tl.atomic_or(counts_ptr + columns, _SEEN, mask=inside & (at < prompt_len), sem="relaxed")


@kernel(
    one_variant_for=(
        "logits_ptr", "slots_ptr", "positions_ptr", "penalties_ptr", "token_table_ptr", "counts_ptr",
        "num_columns", "shard_start", "token_table_stride", "row_stride",
    )
)  # fmt: skip
def penalise_kernel(
    logits_ptr: tl.tensor,  # [rows, columns] float32
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    counts_ptr: tl.tensor,  # the counts; all zero afterwards
    num_columns: tl.tensor,
    shard_start: tl.tensor,
    token_table_stride: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (part, row) changes the logits of the tokens whose count it receives first."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    repetition, frequency, presence, is_penalised = _penalties(penalties_ptr, slot)
    if not is_penalised:
        return
    known = tl.load(positions_ptr + row).to(tl.int32)
    counts_ptr += row * num_columns
    logits_ptr += row * row_stride
    for begin in range(tl.program_id(0) * BLOCK, known, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        columns, inside = _columns(token_table_ptr, slot, token_table_stride, at, known, shard_start, num_columns)
        taken = tl.atomic_xchg(counts_ptr + columns, tl.zeros([BLOCK], tl.int32), mask=inside, sem="relaxed")
        is_mine = inside & (taken != 0)
        count = (taken & (_SEEN - 1)).to(tl.float32)
        values = tl.load(logits_ptr + columns, mask=is_mine, other=0.0)
        values = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
        values -= frequency * count
        values -= tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + columns, values, mask=is_mine)


@kernel(
    one_variant_for=(
        "logits_ptr", "slots_ptr", "positions_ptr", "limits_ptr", "bias_ids_ptr", "bias_values_ptr", "stop_ids_ptr",
        "num_columns", "shard_start", "bias_stride", "stop_stride", "row_stride",
    )
)  # fmt: skip
def bias_kernel(
    logits_ptr: tl.tensor,  # [rows, columns] float32
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    bias_ids_ptr: tl.tensor,
    bias_values_ptr: tl.tensor,
    stop_ids_ptr: tl.tensor,
    num_columns: tl.tensor,
    shard_start: tl.tensor,
    bias_stride: tl.tensor,
    stop_stride: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program r adds row r's biases, then -inf to stop tokens that would come too early."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    logits_ptr += row * row_stride
    num_biases = tl.load(limits_ptr + slot * 4 + 2).to(tl.int32)
    for begin in range(0, num_biases, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        columns = tl.load(bias_ids_ptr + slot * bias_stride + at, mask=at < num_biases, other=0) - shard_start
        inside = (at < num_biases) & (columns >= 0) & (columns < num_columns)
        biases = tl.load(bias_values_ptr + slot * bias_stride + at, mask=inside, other=0.0)
        values = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        tl.store(logits_ptr + columns, values + biases, mask=inside)
    num_stops = tl.load(limits_ptr + slot * 4 + 3).to(tl.int32)
    if tl.load(positions_ptr + row) < tl.load(limits_ptr + slot * 4 + 1):
        tl.debug_barrier()  # a stop token may have a bias too
        for begin in range(0, num_stops, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            columns = tl.load(stop_ids_ptr + slot * stop_stride + at, mask=at < num_stops, other=0) - shard_start
            inside = (at < num_stops) & (columns >= 0) & (columns < num_columns)
            values = tl.load(logits_ptr + columns, mask=inside, other=0.0)
            tl.store(logits_ptr + columns, values + float("-inf"), mask=inside)


@dataclass(frozen=True, slots=True)
class AdjustmentKernels:
    """The kernels and their scratch memory. Launches depend on the number of rows alone, so a graph can hold them."""

    counts: torch.Tensor  # [rows, columns] int32: zero between two uses

    @classmethod
    def allocate(cls, num_slots: int, num_columns: int, device: torch.device) -> AdjustmentKernels:
        return cls(torch.zeros((min(num_slots, MOST_ROWS), num_columns), dtype=torch.int32, device=device))

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        adjustments: Tables,
        shard_start: int,
    ) -> None:
        """Apply the adjustments of the rows' slots to `logits` [R, columns] float32, which start at token id `shard_start`."""
        num_columns = logits.shape[1]
        assert logits.dtype is torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
        assert self.counts.shape[1] == num_columns, (self.counts.shape, num_columns)
        _, limits, bias_ids, bias_values, stop_ids = adjustments
        most = len(self.counts)
        for begin in range(0, len(logits), most):
            rows = slice(begin, begin + most)
            self._penalise(logits[rows], slots[rows], positions[rows], token_table, adjustments, shard_start)
        if len(logits):
            bias_kernel[(len(logits),)](
                logits, slots, positions, limits, bias_ids, bias_values, stop_ids,
                num_columns, shard_start, bias_ids.stride(0), stop_ids.stride(0), logits.stride(0),
                BLOCK=BLOCK,
            )  # fmt: skip

    def _penalise(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        adjustments: Tables,
        shard_start: int,
    ) -> None:
        penalties, limits, *_ = adjustments
        sizes = (logits.shape[1], shard_start, token_table.stride(0))
        grid = (_PARTS, len(logits))
        count_tokens_kernel[grid](slots, positions, penalties, limits, token_table, self.counts, *sizes, BLOCK=BLOCK)
        penalise_kernel[grid](
            logits, slots, positions, penalties, token_table, self.counts, *sizes, logits.stride(0),
            BLOCK=BLOCK, **_OPTIONS,
        )  # fmt: skip
