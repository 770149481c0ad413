"""Turn a plan's section into the arrays of its step: changes to the tables, rows, sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
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
NO_LOGPROBS = LogprobPlan()  # shared by all steps that report none; must not be changed
LEAST_SHARING_ROWS = 16  # with fewer rows, reading weights takes most of the time, so attention reads row by row


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step, planned on the host."""

    rows: HostRows
    arrays: PlanArrays[HostArray]
    kind: SamplingKind  # of the rows that sample
    prompt_logprobs: LogprobPlan
    output_logprobs: LogprobPlan
    num_draws: Ints | None = None
    """Draws of each row that samples, if decode rows have drafts. These rows are among the extend rows then. None: one each."""


class DecodeStep(NamedTuple):
    """A step in which every row decodes, planned on the host. Its arrays must not be written to."""

    slots: Ints  # the same array object in consecutive steps of the same rows
    lengths: Ints  # when the rows were looked up
    num_steps: int  # steps since then, this one included
    longest: int  # largest of `seq_lens`
    new_pages: NewPages | None  # None: no row begins a page
    kind: SamplingKind
    output_logprobs: LogprobPlan
    reading: Reading  # the fastest for its rows

    @property
    def seq_lens(self) -> Ints:
        """Lengths of the rows after the step."""
        return self.lengths + self.num_steps


class VerifyStep(NamedTuple):
    """A step in which every row decodes and some bring drafts, planned on the host."""

    slots: Ints
    starts: Ints  # lengths of the rows before the step
    num_draws: Ints  # of each row: one, and one more for each draft
    kind: SamplingKind
    output_logprobs: LogprobPlan


@dataclass(slots=True)
class _Standing:
    """The rows of consecutive decode steps of the same rows, and what stays the same for them."""

    sent: bytes  # their slots, as in the plans
    rows: DecodeRows
    kind: SamplingKind
    wants_logprobs: bool
    reading: Reading
    longest: int
    total: int  # sum of their lengths

    def advance(self) -> None:
        """Advance each row by one position. Shared prefixes stay shared; uneven lengths become even in time, but not the reverse."""
        num_rows = len(self.rows.slots)
        self.longest += 1
        self.total += num_rows
        if self.reading is Reading.EVEN:
            self.reading = _reading_by_lengths(self.longest, self.total, num_rows)


class StepPlanner:
    """Plans steps from the host's record of the slots, which it owns. Must receive all plans in order."""

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        windows: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        self.slots = SlotMirror(num_slots, num_pages, page_size, windows, window_pages)
        self._num_groups = 1 + len(windows)
        self._sampling = SamplingTable(num_slots)
        self._standing: _Standing | None = None  # the rows of the last step, if all of them decoded

    def note_pages(self, deltas: list[PageDelta]) -> tuple[Ints, Ints, Ints, Ints]:
        """Add pages to the record of slots, and return them as `_append_pages` does. The caller, or somebody else, writes the tables."""
        self._standing = None
        self.slots.catch_up()
        return self._append_pages(deltas)

    def set_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Correct the lengths of slots whose step has computed positions that do not count."""
        self._standing = None
        self.slots.set_lengths(slots, lengths)

    def kind_of(self, slots: Ints) -> SamplingKind:
        """Return the most that these slots ask of the sampler, logprobs left aside."""
        return self._sampling.kind_of(slots)

    def plan_verification(self, section: PlanSection, num_drafts: Ints) -> VerifyStep:
        """Plan a section without changes in which every row decodes. Rows become as long as if all of their drafts were right."""
        self._standing = None
        slots, num_draws = section.decode_slots.astype(np.int64), 1 + num_drafts
        ends = self.slots.advance(section, num_draws)
        asked, kind, logprobs = self.slots.slot_logprobs, self._sampling.kind_of(slots), NO_LOGPROBS
        if wants_output_logprobs(asked, slots):
            kind, logprobs = SamplingKind.OTHER, plan_output_logprobs(asked, slots, ends, num_draws)
        return VerifyStep(slots, ends - num_draws, num_draws, kind, logprobs)

    def wants_logprobs(self, slots: Ints) -> bool:
        """Return whether requests in these slots want logprobs of their outputs."""
        return wants_output_logprobs(self.slots.slot_logprobs, slots)

    def draws_plainly(self, slots: Ints) -> bool:
        """Return whether these slots draw without filters, penalties, biases and logprobs."""
        is_plain = self._sampling.kind_of(slots) is SamplingKind.PLAIN
        return is_plain and not self.wants_logprobs(slots)

    def plan_decodes(self, section: PlanSection) -> DecodeStep | None:
        """Plan a section that admits no request and in which every row decodes. For any other section return None and change nothing."""
        if section.admissions or len(section.extend_slots) or not len(section.decode_slots):
            return None
        self._check_groups(section.pages)
        sent = section.decode_slots.tobytes()
        standing, self._standing = self._standing, None
        if standing is None or standing.sent != sent:
            standing = self._look_up(sent, section.decode_slots.astype(np.int64))
        if standing is None or not self.slots.advance_decodes(standing.rows, section.pages):
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
        """Return the way of reading for rows of these slots if their lengths are uneven."""
        if len(slots) < LEAST_SHARING_ROWS:
            return Reading.BY_ROW
        return Reading.SHARED if self.slots.most_shared(slots, BLOCK_ROWS) >= LEAST_SAVED else Reading.EVEN

    def sampling_of(self, step: DecodeStep) -> SamplingStep[HostArray]:
        """Return the sampling parameters of the step's rows for the eager sampler."""
        return SamplingStep(self._sampling.arrays(step.slots), step.output_logprobs.arrays())

    def sampling_of_drafts(self, step: VerifyStep) -> SamplingStep[HostArray]:
        """Return the sampling parameters of all draws of the step for the eager sampler."""
        return SamplingStep(self._sampling.arrays(np.repeat(step.slots, step.num_draws)), step.output_logprobs.arrays())

    def plan(self, section: PlanSection, num_drafts: Ints | None = None) -> HostStep:
        """Plan any section: apply its changes to the record of slots, then advance its rows.

        `num_drafts`, if given, are the drafts of its decode rows: their tokens are computed like those of a chunk, and each draws.
        """
        self._standing = None
        self.slots.catch_up()
        adjusted = []
        for admission in section.admissions:
            self.slots.admit(admission)
            if self._sampling.admit(admission):
                adjusted.append(admission.slot)
        page_groups, page_slots, page_columns, pages = self._append_pages(section.pages)
        rows, num_draws = self._advance(section, num_drafts)
        rows_of_device = row_arrays(rows)
        prompt_logprobs, output_logprobs = self._plan_logprobs(rows, rows_of_device.extend_first, num_draws)
        num_extends = len(rows.extend_lens)
        row_tokens = np.concatenate((rows.extend_lens, np.ones(len(rows.slots) - num_extends, np.int64)))
        last_tokens = np.cumsum(row_tokens) - 1
        sample_rows, sample_tokens = rows.sample_rows, last_tokens[rows.sample_rows]
        if num_draws is not None:
            sample_tokens = ranges(sample_tokens - num_draws + 1, num_draws)
            sample_rows = np.repeat(sample_rows, num_draws)
        sampling_slots = rows.slots[sample_rows]
        admitted = section.admissions
        admitted_slots = np.array([a.slot for a in admitted], np.int64)
        arrays: PlanArrays[HostArray] = PlanArrays(
            admitted_slots=admitted_slots,
            admitted_lens=np.array([a.cached for a in admitted], np.int64),
            admitted_draws=self._sampling.draws_of(admitted_slots),
            adjustments=self._sampling.adjustments_of(adjusted),
            **_ids_of(admitted),
            page_groups=page_groups,
            page_slots=page_slots,
            page_columns=page_columns,
            pages=pages,
            rows=rows_of_device,
            sample_rows=sample_rows,
            sample_tokens=sample_tokens,
            sampling=self._sampling.arrays(sampling_slots),
            prompt_logprobs=prompt_logprobs.arrays(),
            output_logprobs=output_logprobs.arrays(),
        )
        kind = SamplingKind.OTHER if output_logprobs.segments else self._sampling.kind_of(sampling_slots)
        return HostStep(rows, arrays, kind, prompt_logprobs, output_logprobs, num_draws)

    def _append_pages(self, deltas: list[PageDelta]) -> tuple[Ints, Ints, Ints, Ints]:
        """Add the new pages to the record, and return their groups, slots, columns and numbers. One group needs no groups."""
        none = np.zeros(0, np.int64)
        self._check_groups(deltas)
        if not deltas:
            return none, none, none, none
        slots, columns = self.slots.append_pages(deltas[0])
        if len(deltas) == 1:
            return none, slots, columns, deltas[0].pages.astype(np.int64)
        entries = [(slots, columns)]
        entries += [self.slots.append_window_pages(n, delta, deltas[0]) for n, delta in enumerate(deltas) if n]
        return (
            np.repeat(np.arange(len(deltas)), [len(delta.pages) for delta in deltas]),
            np.concatenate([slots for slots, _ in entries]),
            np.concatenate([columns for _, columns in entries]),
            np.concatenate([delta.pages for delta in deltas]).astype(np.int64),
        )

    def _check_groups(self, deltas: list[PageDelta]) -> None:
        is_right = len(deltas) in (0, self._num_groups)
        assert is_right, f"the plan has {len(deltas)} page groups, but the layers have {self._num_groups}"

    def _advance(self, section: PlanSection, num_drafts: Ints | None) -> tuple[HostRows, Ints | None]:
        """Advance all rows. Return them, and how often each row that samples draws; None: once each.

        Decode rows that may have drafts are computed like the next chunks of prompts.
        """
        counts: Ints | int = 1 if num_drafts is None else 1 + num_drafts
        seq_lens = self.slots.advance(section, counts)
        num_extends = len(section.extend_slots)
        sampling_extends = np.flatnonzero(section.extend_samples)
        starts, lens = section.extend_starts.astype(np.int64), section.extend_counts.astype(np.int64)
        num_draws = None
        if num_drafts is not None:
            starts = np.concatenate((starts, seq_lens[num_extends:] - counts))
            lens = np.concatenate((lens, 1 + num_drafts))
            num_draws = np.concatenate((np.ones(len(sampling_extends), np.int64), 1 + num_drafts))
        rows = HostRows(
            slots=np.concatenate((section.extend_slots, section.decode_slots)).astype(np.int64),
            seq_lens=seq_lens,
            prefix_lens=starts,
            extend_lens=lens,
            sample_rows=np.concatenate((sampling_extends, np.arange(num_extends, len(seq_lens)))),
        )
        return rows, num_draws

    def _plan_logprobs(
        self, rows: HostRows, first_tokens: Ints, num_draws: Ints | None
    ) -> tuple[LogprobPlan, LogprobPlan]:
        asked, num_extends = self.slots.slot_logprobs, len(rows.extend_lens)
        prompt = plan_prompt_logprobs(asked, rows.slots[:num_extends], rows.prefix_lens, rows.extend_lens, first_tokens)
        sampled = rows.sample_rows
        return prompt, plan_output_logprobs(asked, rows.slots[sampled], rows.seq_lens[sampled], num_draws)


def _reading_by_lengths(longest: int, total: int, num_rows: int) -> Reading:
    return Reading.EVEN if longest * num_rows > UNEVEN * total else Reading.BY_ROW


def _ids_of(admissions: list[Admission]) -> dict[str, Ints]:
    """Return all known ids of the admitted requests, each with its slot and position."""
    counts = np.array([len(a.ids) for a in admissions], np.int64)
    ids = np.concatenate([a.ids for a in admissions]).astype(np.int64) if admissions else np.zeros(0, np.int64)
    return {
        "id_slots": np.repeat(np.array([a.slot for a in admissions], np.int64), counts),
        "id_positions": ranges(np.zeros_like(counts), counts),
        "ids": ids,
    }


def row_arrays(host: HostRows) -> RowArrays[HostArray]:
    """Lay out the tokens of the extend rows, row after row."""
    token_positions, first_tokens = compute_position(host.prefix_lens, host.extend_lens)
    token_slots = np.repeat(host.slots[: len(host.extend_lens)], host.extend_lens)
    return RowArrays(host.slots, host.prefix_lens, host.extend_lens, first_tokens, token_slots, token_positions)


def compute_position(prefix_lens: Ints, extend_lens: Ints) -> tuple[Ints, Ints]:
    """Return the positions of all rows' tokens, row after row, and the index of each row's first token."""
    return ranges(prefix_lens, extend_lens), np.cumsum(extend_lens) - extend_lens


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate the ranges start … start + count - 1 of all pairs."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts - starts, counts)
