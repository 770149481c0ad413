"""The interface of drafters, which guess the next tokens of decoding rows, and the limits on how many they guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from srt.protocol.messages import Admission, PlanSection

Ints = NDArray[np.int64]
FIRST_REST = 8  # steps for which a row rests after its guesses were wrong
MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Decoding rows that may guess. The token at position `lengths[i]` of slot `slots[i]` is its last known one."""

    slots: Ints
    lengths: Ints
    most: Ints  # drafts that each row may have in this step


class Drafter(Protocol):
    """Guesses tokens. All ranks must guess the same, from the same tables."""

    def reset(self) -> None:
        """Forget all rows, whose tables were emptied."""

    def enter_changes(self, changes: PlanSection) -> None:
        """Note the admissions and pages of a step, which the tables have already. Its rows come afterwards."""

    def enter_pages(self, changes: PlanSection) -> None:
        """Note the pages of a step without admissions. The tables have them, or on a device will have them."""

    def read_prompts(self, section: PlanSection) -> None:
        """Compute what later guesses need of the step's chunks of prompts, for which the model has run. Its decodes are not meant."""

    def draft(self, rows: DraftRows) -> Ints:
        """Write up to `most` drafts of each row into the token table, behind its last known token. Return how many each has got."""

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Note how long these rows are after a step: the drafts up to there were right."""


class DeviceDrafter(Drafter, Protocol):
    """Guesses on the device, from the tables there. So it can guess before the host knows how long rows are."""

    def can_draft_ahead(self, slots: Ints) -> bool:
        """Return whether `draft_ahead` may be called for these rows now."""

    def draft_ahead(self, rows: DraftRows) -> Ints:
        """Do what `draft` does. The lengths of `rows` are too large, for all that this drafter knows."""


class DraftLimits:
    """How many drafts each row may have, by slot.

    A row never computes a position that its request cannot use. It drafts one token more after all its drafts were right, and as many
    as were right after one was wrong, but at least one. Where the first one is wrong twice in a row, the row rests, each time twice as
    long, until a first draft is right again. Rests of many rows end in the same steps, so that few steps have drafts of some rows alone.
    """

    def __init__(self, num_slots: int, most: int, *, may_rest: bool = True) -> None:
        """`may_rest` is False where a step that drafts costs about the same whether a row takes part or not."""
        self._most = most
        self._may_rest = may_rest
        self._num_steps = 0
        self._end: Ints = np.zeros(num_slots, np.int64)  # positions that the request computes at most
        self._now: Ints = np.zeros(num_slots, np.int64)  # drafts of the row's next step, when it does not rest
        self._rests_until: Ints = np.zeros(num_slots, np.int64)  # the first step that may have drafts again
        self._num_misses: Ints = np.zeros(num_slots, np.int64)  # latest steps in a row whose first draft was wrong

    def admit(self, admission: Admission) -> None:
        """Begin a slot anew. Rows that need a mask for each token do not draft, because masks are made one token at a time."""
        slot = admission.slot
        self._end[slot] = admission.prompt_len + admission.sampling.max_new_tokens - 1
        self._now[slot] = 0 if admission.resource else self._most
        self._rests_until[slot] = 0
        self._num_misses[slot] = 0

    def begin_step(self) -> None:
        """Count a step that may have drafts."""
        self._num_steps += 1

    def want(self, slots: Ints) -> NDArray[np.bool_]:
        """Return for each of these rows whether it would draft in this step, if it had room."""
        wants: NDArray[np.bool_] = (self._now[slots] > 0) & (self._rests_until[slots] <= self._num_steps)
        return wants

    def rows(self, slots: Ints, lengths: Ints, room: Ints, most: int) -> DraftRows:
        """Return how many drafts these rows may have in this step, `most` or fewer. `room` is the number of positions in their pages."""
        allowed = np.minimum(np.minimum(self._end[slots], room) - lengths - 1, np.minimum(self._now[slots], most)).clip(
            0
        )
        allowed[~self.want(slots)] = 0
        return DraftRows(slots, lengths, allowed)

    def note(self, slots: Ints, num_drafts: Ints, num_right: Ints) -> None:
        """Note how many drafts of each row were right, of rows that had some."""
        if not (num_right < num_drafts).any():
            self._now[slots] = np.minimum(num_drafts + 1, self._most)
            self._num_misses[slots] = self._rests_until[slots] = 0
            return
        now = np.where(num_right == num_drafts, num_drafts + 1, np.maximum(num_right, 1))
        self._now[slots] = np.minimum(now, self._most)
        misses = self._num_misses[slots] = np.where(num_right == 0, self._num_misses[slots] + 1, 0)
        if self._may_rest:
            rest = FIRST_REST << np.clip(misses - 2, 0, MOST_DOUBLINGS)
            until = -(-(self._num_steps + rest) // rest) * rest
            self._rests_until[slots] = np.where(misses > 1, until, 0)
