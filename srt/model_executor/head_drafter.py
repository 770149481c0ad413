"""Guess with a head that reads the model's hidden states (EAGLE-3), in chains: each draft follows the one before.

It draws with the request's own noise, temperature, filters, penalties and biases, as a smaller model does (`model_drafter.py`). The first
draft of a step comes from hidden states of the model, which it has stored for all tokens that it computed; the others from the head's own.
"""

from __future__ import annotations

import numpy as np
import torch

from srt.kernels.cpu.sequence_steps import MOST_TOKENS
from srt.model_executor.head_steps import HeadSteps
from srt.protocol.messages import PlanSection
from srt.sampling.sampling_batch_info import SamplingKind, SamplingTable
from srt.speculative.drafter import DraftRows, Ints


class HeadDrafter:
    """Drafts on a CPU. Entries that rest on the head's own hidden states are computed anew when the model has run."""

    def __init__(self, steps: HeadSteps, num_slots: int, is_compiled: bool) -> None:
        """If the model's steps are compiled, so are those of the head, where they can be."""
        self._steps, self._compiled = steps, steps.compiled() if is_compiled else None
        self._sampling = SamplingTable(num_slots)
        self._computed: Ints = np.zeros(
            num_slots, np.int64
        )  # positions whose entries rest on the model's hidden states

    def reset(self) -> None:
        self._steps.tables.clear()

    def enter_changes(self, changes: PlanSection) -> None:
        for admission in changes.admissions:
            self._sampling.admit(admission)
            self._computed[admission.slot] = max(admission.cached, 1)  # the first position has no entry
            self._steps.tables.forget_pages(admission.slot)
        self.enter_pages(changes)

    def enter_pages(self, changes: PlanSection) -> None:
        if changes.pages:
            self._steps.tables.append_pages(changes.pages[0])

    def read_prompts(self, section: PlanSection) -> None:
        slots = section.extend_slots.astype(np.int64)
        self._extend(slots, (section.extend_starts + section.extend_counts).astype(np.int64))

    def _extend(self, slots: Ints, ends: Ints) -> None:
        late = self._computed[slots] < ends
        if late.any():
            self._steps.extend(slots[late], self._computed[slots[late]], ends[late], has_outputs=False)
            self._computed[slots[late]] = ends[late]

    def draft(self, rows: DraftRows) -> Ints:
        drafting, steps = rows.most > 0, self._steps
        slots, lengths, most = rows.slots[drafting], rows.lengths[drafting], rows.most[drafting]
        kind = min(self._sampling.kind_of(slots), SamplingKind.ADJUSTED)
        starts = self._computed[slots]
        self._computed[slots] = lengths + 1
        if self._compiled is not None and kind is SamplingKind.PLAIN:
            if int((lengths - starts).sum()) + len(slots) <= MOST_TOKENS:
                steps.tables.look_up()
                self._compiled.draft(slots, starts, lengths, most)
                return rows.most
        hidden = steps.extend(slots, starts, lengths + 1, has_outputs=True)
        for num_drafts in range(int(most.max())):
            going = most > num_drafts
            if num_drafts:
                kept = torch.from_numpy(going[most > num_drafts - 1])
                positions = torch.from_numpy(lengths[going] + num_drafts)
                hidden = steps.run_tokens(torch.from_numpy(slots[going]), positions, steps.next_features(hidden[kept]))
            at, behind = torch.from_numpy(slots[going]), torch.from_numpy(lengths[going] + num_drafts + 1)
            draws = steps.draw(kind, hidden, at, behind)
            steps.whole.write_tokens(at, behind, draws.ids)
        return rows.most

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Do nothing: entries that count rest on tokens that were known."""
