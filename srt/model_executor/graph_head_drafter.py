"""Guess with a head on a GPU, whose steps and draws are graphs. See `head_drafter.py` for what its guesses are worth."""

from __future__ import annotations

import numpy as np

from srt.model_executor.graphs.head_runner import ON_DEVICE, HeadRunner
from srt.model_executor.head_steps import HeadSteps
from srt.protocol.messages import PlanSection
from srt.sampling.sampling_batch_info import SamplingTable
from srt.speculative.drafter import DraftRows, Ints


class GraphHeadDrafter:
    """Runs the head behind chunks of prompts, and the steps that draft in a graph."""

    def __init__(self, steps: HeadSteps, runner: HeadRunner, num_slots: int) -> None:
        self._steps, self._runner = steps, runner
        self._sampling = SamplingTable(num_slots)
        self._computed: Ints = np.ones(num_slots, np.int64)  # a position before which all entries are computed
        self._drafted = np.zeros(num_slots, np.bool_)  # rows that drafted in the last step with drafts

    def reset(self) -> None:
        self._steps.tables.clear()
        self._computed[:] = 1
        self._drafted[:] = False

    def enter_changes(self, changes: PlanSection) -> None:
        for admission in changes.admissions:
            self._sampling.admit(admission)
            self._computed[admission.slot] = max(admission.cached, 1)  # the first position has no entry
            self._drafted[admission.slot] = False
        self.enter_pages(changes)

    def enter_pages(self, changes: PlanSection) -> None:
        if changes.pages:
            self._steps.tables.note_pages(changes.pages[0].slots)

    def read_prompts(self, section: PlanSection) -> None:
        ends = (section.extend_starts + section.extend_counts).astype(np.int64)
        self._extend(section.extend_slots.astype(np.int64), ends)

    def _extend(self, slots: Ints, ends: Ints) -> None:
        late = self._computed[slots] < ends
        if late.any():
            self._steps.extend(slots[late], self._computed[slots[late]], ends[late], has_outputs=False)
            self._computed[slots[late]] = ends[late]

    def draft(self, rows: DraftRows) -> Ints:
        drafting = rows.most > 0
        slots, lengths = rows.slots[drafting], rows.lengths[drafting]
        is_far = lengths - self._computed[slots] >= self._runner.num_first_tokens
        self._extend(slots[is_far], lengths[is_far])
        return self._draft(rows, self._computed[slots])

    def can_draft_ahead(self, slots: Ints) -> bool:
        """Return whether `draft_ahead` may be called for these rows: the step before drafted for each of them."""
        return bool(self._drafted[slots].all())

    def draft_ahead(self, rows: DraftRows) -> Ints:
        """Draft like `draft`, where the device alone knows the lengths."""
        return self._draft(rows, ON_DEVICE)

    def _draft(self, rows: DraftRows, starts: Ints | int) -> Ints:
        drafting = rows.most > 0
        slots = rows.slots[drafting]
        self._steps.tables.look_up()
        self._runner.draft(slots, rows.most[drafting], starts, self._sampling.kind_of(slots))
        self._drafted[rows.slots] = drafting
        return rows.most

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Note the lengths of rows. Those that drafted lack no more entries than a step can accept tokens."""
        least = np.where(self._drafted[slots], lengths + 1 - self._runner.num_first_tokens, 0)
        self._computed[slots] = np.maximum(self._computed[slots], least)
