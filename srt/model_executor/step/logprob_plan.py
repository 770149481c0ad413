"""Plan the logprobs that a step reports, and split its rows into messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from srt.layers.logits_processor import LogprobArrays
from srt.model_executor.step.slot_mirror import SlotLogprobs
from srt.protocol.messages import Float32Array, RowLogprobs

HostArray = NDArray[Any]
Ints = NDArray[np.int64]
NO_VECTORS: Float32Array = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class LogprobSegment:
    """Computed rows `begin` … `end - 1`, which become one message."""

    slot: int
    is_prompt: bool
    first: int  # index of the first token reported, in the prompt or in the output
    begin: int
    end: int
    top: int
    num_ids: int
    has_first_token: bool = False  # whether the prompt's token 0, which nothing predicts, is prepended
    sample: int = -1  # for an output: index among the rows that sample

    def of_count(self, count: int) -> LogprobSegment:
        """Return the segment of an output with only its first `count` draws."""
        end = min(self.end, self.begin + count)
        return self if end == self.end else replace(self, end=end)


@dataclass(slots=True)
class LogprobPlan:
    """The rows of one kind, prompt or output, in the order of their segments."""

    segments: list[LogprobSegment] = field(default_factory=list)
    _rows: list[Ints] = field(default_factory=list)
    _of_ids: list[HostArray] = field(default_factory=list)
    _num_rows: int = 0

    @property
    def top(self) -> int:
        """Largest number of best tokens that a segment reports."""
        return max((segment.top for segment in self.segments), default=0)

    def add_prompt(self, slot: int, wanted: SlotLogprobs, rows: Ints, first: int, has_first_token: bool) -> None:
        begin, end = self._add_rows(wanted, rows)
        self.segments.append(
            LogprobSegment(slot, True, first, begin, end, wanted.spec.top, len(wanted.spec.ids), has_first_token)
        )

    def add_output(self, slot: int, wanted: SlotLogprobs, sample: int, index: int, draws: Ints) -> None:
        begin, end = self._add_rows(wanted, draws)
        self.segments.append(
            LogprobSegment(slot, False, index, begin, end, wanted.spec.top, len(wanted.spec.ids), sample=sample)
        )

    def _add_rows(self, wanted: SlotLogprobs, rows: Ints) -> tuple[int, int]:
        begin, self._num_rows = self._num_rows, self._num_rows + len(rows)
        self._rows.append(rows)
        self._of_ids.append(wanted.spec.ids)
        return begin, self._num_rows

    def arrays(self) -> LogprobArrays[HostArray]:
        most = max((len(ids) for ids in self._of_ids), default=0)
        of_ids = np.zeros((self._num_rows, most), np.int64)
        for segment, ids in zip(self.segments, self._of_ids, strict=True):
            of_ids[segment.begin : segment.end, : len(ids)] = ids
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, np.int64)
        return LogprobArrays(rows.astype(np.int64), of_ids)


def plan_prompt_logprobs(
    asked: dict[int, SlotLogprobs], slots: Ints, starts: Ints, counts: Ints, first_tokens: Ints
) -> LogprobPlan:
    """Plan the prompt logprobs. Positions `start` … `start + count - 1` of a chunk predict prompt tokens `start + 1` … `start + count`.

    Nothing predicts the prompt's token 0; it is reported as NaN with the first chunk.
    """
    plan = LogprobPlan()
    if not asked:
        return plan
    for slot, start, count, token in zip(
        slots.tolist(), starts.tolist(), counts.tolist(), first_tokens.tolist(), strict=True
    ):
        wanted = asked.get(slot)
        if wanted is None or wanted.spec.prompt_start < 0:
            continue
        begin = max(start + 1, wanted.spec.prompt_start)
        end = min(start + count + 1, wanted.prompt_len)
        rows = token + np.arange(begin, max(begin, end)) - 1 - start
        has_first_token = start == 0 and wanted.spec.prompt_start == 0
        if len(rows) or has_first_token:
            plan.add_prompt(slot, wanted, rows, 0 if has_first_token else begin, has_first_token)
    return plan


def plan_output_logprobs(
    asked: dict[int, SlotLogprobs], slots: Ints, positions: Ints, num_draws: Ints | None = None
) -> LogprobPlan:
    """Plan the logprobs of each row that samples and wants them. `positions` are those of the last tokens that the rows draw.

    `num_draws` are the numbers of draws of the rows; None: one each.
    """
    plan = LogprobPlan()
    if not asked:
        return plan
    counts = np.ones(len(slots), np.int64) if num_draws is None else num_draws
    columns = zip(slots.tolist(), positions.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True)
    for row, (slot, position, count, end) in enumerate(columns):
        wanted = asked.get(slot)
        if wanted is not None and wanted.spec.output:
            first = position - count + 1 - wanted.prompt_len
            plan.add_output(slot, wanted, row, first, np.arange(end - count, end))
    return plan


def wants_output_logprobs(asked: dict[int, SlotLogprobs], slots: Ints) -> bool:
    """Return whether `plan_output_logprobs` would find anything to report."""
    return bool(asked) and any(slot in asked and asked[slot].spec.output for slot in slots.tolist())


def row_logprobs(
    segment: LogprobSegment,
    chosen: Float32Array,
    top_ids: HostArray,
    top: Float32Array,
    of_ids: Float32Array,
    vectors: Float32Array = NO_VECTORS,
) -> RowLogprobs:
    """Build the message of a segment from the arrays of all segments. For token 0 the logprobs are NaN and the best tokens 0."""
    rows = slice(segment.begin, segment.end)
    blank = int(segment.has_first_token)
    nan = np.float32(np.nan)
    return RowLogprobs(
        slot=segment.slot,
        is_prompt=segment.is_prompt,
        first=segment.first,
        chosen=np.concatenate((np.full(blank, nan), chosen[rows])).astype(np.float32),
        top_ids=np.concatenate((np.zeros(blank * segment.top), top_ids[rows, : segment.top].reshape(-1))).astype(
            np.int32
        ),
        top=np.concatenate((np.full(blank * segment.top, nan), top[rows, : segment.top].reshape(-1))).astype(
            np.float32
        ),
        of_ids=np.concatenate(
            (np.full(blank * segment.num_ids, nan), of_ids[rows, : segment.num_ids].reshape(-1))
        ).astype(np.float32),
        vector=vectors[rows].reshape(-1),
    )
