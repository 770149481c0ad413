"""Guess with a smaller model on a GPU, whose steps and draws are graphs. See `model_drafter.py` for what its guesses are worth."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from srt.model_executor.graphs.draft_runner import DraftRunner
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec, PlanSection, int32_array
from srt.speculative.drafter import DraftRows, Ints

NO_SLOTS = int32_array()


class GraphDrafter:
    """Runs the smaller model's chunks of prompts step by step, and the steps that draft in a graph."""

    def __init__(self, runner: ModelRunner, steps: DraftRunner) -> None:
        """`runner` has a state made by `drafting_state`, and `steps` drafts on the same state."""
        self._runner = runner
        self._steps = steps
        self._computed: Ints = np.zeros(
            runner.state.num_slots, np.int64
        )  # positions computed by the smaller model, at least
        self._drafted = np.zeros(runner.state.num_slots, np.bool_)  # rows that drafted in the last step with drafts

    def reset(self) -> None:
        self._runner.reset()
        self._computed[:] = 0
        self._drafted[:] = False

    def enter_changes(self, changes: PlanSection) -> None:
        admissions = [structs.replace(a, logprobs=LogprobSpec(), resource="") for a in changes.admissions]
        self._runner.write_changes(structs.replace(changes, admissions=admissions, pages=changes.pages[:1]))
        for admission in admissions:
            self._computed[admission.slot] = admission.cached
            self._drafted[admission.slot] = False

    def enter_pages(self, changes: PlanSection) -> None:
        self._runner.planner.note_pages(changes.pages[:1])

    def read_prompts(self, section: PlanSection) -> None:
        none = np.zeros_like(section.extend_samples)
        self._runner.launch(structs.replace(section, extend_samples=none, decode_slots=NO_SLOTS))
        self._computed[section.extend_slots] = section.extend_starts + section.extend_counts

    def draft(self, rows: DraftRows) -> Ints:
        drafting = rows.most > 0
        self._catch_up(rows.slots[drafting], rows.lengths[drafting])
        return self.draft_ahead(rows)

    def can_draft_ahead(self, slots: Ints) -> bool:
        """Return whether `draft_ahead` may be called for these rows: the step before drafted for each of them."""
        return bool(self._drafted[slots].all())

    def draft_ahead(self, rows: DraftRows) -> Ints:
        """Draft like `draft`, where the device alone knows the lengths. Rows that drafted lack one token at most, which is computed too."""
        drafting = rows.most > 0
        slots = rows.slots[drafting]
        self._steps.draft(slots, rows.most[drafting], self._runner.planner.kind_of(slots))
        self._drafted[rows.slots] = drafting
        return rows.most

    def _catch_up(self, slots: Ints, lengths: Ints) -> None:
        """Compute the tokens that rows lack before the last computed one, which the steps that draft compute again."""
        starts = self._computed[slots]
        counts = lengths - 1 - starts
        late = counts > 0
        if late.any():
            chunks = starts[late].astype(np.int32), counts[late].astype(np.int32), np.zeros(int(late.sum()), np.int32)
            self._runner.launch(PlanSection([], [], slots[late].astype(np.int32), *chunks, NO_SLOTS))

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        right = np.where(self._drafted[slots], lengths - 1, np.minimum(self._computed[slots], lengths))
        self._computed[slots] = right
        self._runner.planner.set_lengths(slots, right)
