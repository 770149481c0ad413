"""From a plan's section to the arrays of its step: what the tables must be told, which rows there are, what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from srt.layers.attention.base import BLOCK_ROWS, LEAST_SAVED, UNEVEN, Reading
from srt.model_executor.forward_batch_info import HostRows, RowArrays
from srt.model_executor.step.logprob_plan import (
    LogprobPlan,
    plan_output_logprobs,
    plan_prompt_logprobs,
    wants_output_logprobs,
)
from srt.model_executor.step.plan_arrays import PlanArrays, SamplingStep
from srt.model_executor.step.slot_mirror import DecodeRows, Ints, NewPages, SlotMirror
from srt.protocol.messages import Admission, PageDelta, PlanSection
from srt.sampling.sampling_batch_info import SamplingKind, SamplingTable

HostArray = NDArray[Any]
NO_LOGPROBS = LogprobPlan()  # of all steps that report none: nobody adds to it
LEAST_SHARING_ROWS = 16  # with fewer, reading weights takes most of the time: the rest is read row by row


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step, planned on the host."""

    rows: HostRows
    arrays: PlanArrays[HostArray]
    kind: SamplingKind  # of the rows that sample
    prompt_logprobs: LogprobPlan
    output_logprobs: LogprobPlan


class DecodeStep(NamedTuple):
    """A step in which every row decodes, planned on the host. The arrays are not written to any more."""

    slots: Ints  # the same array in steps of the same rows that follow one another
    lengths: Ints  # when the rows were looked up
    num_steps: int  # that are done since then, when this one is
    longest: int  # of `seq_lens`
    new_pages: NewPages | None  # None: no row begins one
    kind: SamplingKind
    output_logprobs: LogprobPlan
    reading: Reading  # what suits its rows

    @property
    def seq_lens(self) -> Ints:
        """Once the step is done."""
        return self.lengths + self.num_steps


@dataclass(slots=True)
class _Standing:
    """Rows that are all that steps have, one after the other, and what does not change meanwhile."""

    sent: bytes  # their slots, as plans have them
    rows: DecodeRows
    kind: SamplingKind
    wants_logprobs: bool
    reading: Reading
    longest: int
    total: int  # of their lengths

    def advance(self) -> None:
        """By one position each. They go on sharing what they share; uneven lengths become even in time, and not the reverse."""
        num_rows = len(self.rows.slots)
        self.longest += 1
        self.total += num_rows
        if self.reading is Reading.EVEN:
            self.reading = _reading_by_lengths(self.longest, self.total, num_rows)


class StepPlanner:
    """Owns what the host knows of the slots, and follows the plans in their order."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
        self.slots = SlotMirror(num_slots, num_pages, page_size)
        self._sampling = SamplingTable(num_slots)
        self._standing: _Standing | None = None  # of the last step, if it had decodes alone

    def plan_decodes(self, section: PlanSection) -> DecodeStep | None:
        """As `plan`, for a section whose rows all decode and which admits nobody; None, changing nothing, for any other."""
        if section.admissions or len(section.extend_slots) or not len(section.decode_slots):
            return None
        assert len(section.pages) <= 1, f"{len(section.pages)} page groups, but all layers share one"
        sent = section.decode_slots.tobytes()
        standing, self._standing = self._standing, None
        if standing is None or standing.sent != sent:
            standing = self._look_up(sent, section.decode_slots.astype(np.int64))
        delta = section.pages[0] if section.pages else None
        if standing is None or not self.slots.advance_decodes(standing.rows, delta):
            return None
        standing.advance()
        self._standing = standing
        rows, logprobs = standing.rows, NO_LOGPROBS
        if standing.wants_logprobs:
            logprobs = plan_output_logprobs(self.slots.slot_logprobs, rows.slots, rows.lengths + rows.num_steps)
        return DecodeStep(
            rows.slots,
            rows.lengths,
            rows.num_steps,
            standing.longest,
            rows.new_pages,
            standing.kind,
            logprobs,
            standing.reading,
        )

    def _look_up(self, sent: bytes, slots: Ints) -> _Standing | None:
        rows = self.slots.decode_rows(slots)
        if rows is None:
            return None
        wants_logprobs = wants_output_logprobs(self.slots.slot_logprobs, slots)
        kind = SamplingKind.OTHER if wants_logprobs else self._sampling.kind_of(slots)
        longest, total = int(rows.lengths.max()), int(rows.lengths.sum())
        return _Standing(sent, rows, kind, wants_logprobs, self._reading_of(slots), longest, total)

    def _reading_of(self, slots: Ints) -> Reading:
        """How rows of these slots read the memory, if they are uneven."""
        if len(slots) < LEAST_SHARING_ROWS:
            return Reading.BY_ROW
        return Reading.SHARED if self.slots.most_shared(slots, BLOCK_ROWS) >= LEAST_SAVED else Reading.EVEN

    def sampling_of(self, step: DecodeStep) -> SamplingStep[HostArray]:
        """What the eager sampler must know of the step's rows."""
        return SamplingStep(self._sampling.arrays(step.slots), step.output_logprobs.arrays())

    def plan(self, section: PlanSection) -> HostStep:
        """Take over the delta, then the rows; both count as done from now on."""
        self._standing = None
        self.slots.catch_up()
        adjusted = []
        for admission in section.admissions:
            self.slots.admit(admission)
            if self._sampling.admit(admission):
                adjusted.append(admission.slot)
        page_slots, page_columns, pages = self._append_pages(section.pages)
        rows = self._advance(section)
        rows_of_device = row_arrays(rows)
        prompt_logprobs, output_logprobs = self._plan_logprobs(rows, rows_of_device.extend_first)
        num_extends = len(rows.extend_lens)
        row_tokens = np.concatenate((rows.extend_lens, np.ones(len(rows.slots) - num_extends, np.int64)))
        last_tokens = np.cumsum(row_tokens) - 1
        sampling_slots = rows.slots[rows.sample_rows]
        admitted = section.admissions
        admitted_slots = np.array([a.slot for a in admitted], np.int64)
        arrays: PlanArrays[HostArray] = PlanArrays(
            admitted_slots=admitted_slots,
            admitted_lens=np.array([a.cached for a in admitted], np.int64),
            admitted_draws=self._sampling.draws_of(admitted_slots),
            adjustments=self._sampling.adjustments_of(adjusted),
            **_ids_of(admitted),
            page_slots=page_slots,
            page_columns=page_columns,
            pages=pages,
            rows=rows_of_device,
            sample_rows=rows.sample_rows,
            sample_tokens=last_tokens[rows.sample_rows],
            sampling=self._sampling.arrays(sampling_slots),
            prompt_logprobs=prompt_logprobs.arrays(),
            output_logprobs=output_logprobs.arrays(),
        )
        kind = SamplingKind.OTHER if output_logprobs.segments else self._sampling.kind_of(sampling_slots)
        return HostStep(rows, arrays, kind, prompt_logprobs, output_logprobs)

    def _append_pages(self, deltas: list[PageDelta]) -> tuple[Ints, Ints, Ints]:
        if not deltas:
            return (np.zeros(0, np.int64),) * 3
        assert len(deltas) == 1, f"{len(deltas)} page groups, but all layers share one"
        slots, columns = self.slots.append_pages(deltas[0])
        return slots, columns, deltas[0].pages.astype(np.int64)

    def _advance(self, section: PlanSection) -> HostRows:
        seq_lens = self.slots.advance(section)
        num_extends = len(section.extend_slots)
        sampling_extends = np.flatnonzero(section.extend_samples)
        return HostRows(
            slots=np.concatenate((section.extend_slots, section.decode_slots)).astype(np.int64),
            seq_lens=seq_lens,
            prefix_lens=section.extend_starts.astype(np.int64),
            extend_lens=section.extend_counts.astype(np.int64),
            sample_rows=np.concatenate((sampling_extends, np.arange(num_extends, len(seq_lens)))),
        )

    def _plan_logprobs(self, rows: HostRows, first_tokens: Ints) -> tuple[LogprobPlan, LogprobPlan]:
        asked, num_extends = self.slots.slot_logprobs, len(rows.extend_lens)
        prompt = plan_prompt_logprobs(asked, rows.slots[:num_extends], rows.prefix_lens, rows.extend_lens, first_tokens)
        sampled = rows.sample_rows
        return prompt, plan_output_logprobs(asked, rows.slots[sampled], rows.seq_lens[sampled])


def _reading_by_lengths(longest: int, total: int, num_rows: int) -> Reading:
    return Reading.EVEN if longest * num_rows > UNEVEN * total else Reading.BY_ROW


def _ids_of(admissions: list[Admission]) -> dict[str, Ints]:
    """All known ids of the admitted, each with its slot and position."""
    counts = np.array([len(a.ids) for a in admissions], np.int64)
    ids = np.concatenate([a.ids for a in admissions]).astype(np.int64) if admissions else np.zeros(0, np.int64)
    return {
        "id_slots": np.repeat(np.array([a.slot for a in admissions], np.int64), counts),
        "id_positions": _ranges(np.zeros_like(counts), counts),
        "ids": ids,
    }


def row_arrays(host: HostRows) -> RowArrays[HostArray]:
    """Lay out the tokens of the extend rows, row after row."""
    token_positions, first_tokens = compute_position(host.prefix_lens, host.extend_lens)
    token_slots = np.repeat(host.slots[: len(host.extend_lens)], host.extend_lens)
    return RowArrays(host.slots, host.prefix_lens, host.extend_lens, first_tokens, token_slots, token_positions)


def compute_position(prefix_lens: Ints, extend_lens: Ints) -> tuple[Ints, Ints]:
    """The positions of all rows' tokens, row after row, and the index of each row's first token."""
    return _ranges(prefix_lens, extend_lens), np.cumsum(extend_lens) - extend_lens


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start … start + count - 1 of every pair, end to end."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts - starts, counts)
