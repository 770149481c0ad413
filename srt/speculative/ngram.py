"""Guess by repetition: what followed the last tokens of a request where they occurred before, in its prompt or output."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from srt.protocol.messages import PlanSection
from srt.speculative.drafter import DraftRows, Ints

Ids = NDArray[np.int32]


class NgramDrafter:
    """Looks only at the request's own tokens. Those of other requests would speed up answers that guess them, and so give them away."""

    def __init__(self, token_table: torch.Tensor, least: int, longest: int) -> None:
        """At least `least` tokens must occur again, and the places where the most do are preferred, up to `longest`."""
        self._tokens: Ids = token_table.numpy()
        self._least = least
        self._longest = longest

    def reset(self) -> None:
        """Do nothing: the token table is all that is read."""

    def enter_changes(self, changes: PlanSection) -> None:
        """Do nothing, for the same reason."""

    def enter_pages(self, changes: PlanSection) -> None:
        """Do nothing, for the same reason."""

    def read_prompts(self, section: PlanSection) -> None:
        """Do nothing: the token table has all ids of a prompt from its admission on."""

    def draft(self, rows: DraftRows) -> Ints:
        counts = np.zeros(len(rows.slots), np.int64)
        columns = zip(rows.slots.tolist(), rows.lengths.tolist(), rows.most.tolist(), strict=True)
        for row, (slot, length, most) in enumerate(columns):
            if not most:
                continue
            place = find_repetition(self._tokens[slot, : length + 1], self._least, self._longest)
            if place is None:
                continue
            # Where the text repeats with a shorter period than the draft, the draft goes on with itself.
            period = length - place
            behind = place + 1 + np.arange(most) % period
            self._tokens[slot, length + 1 : length + 1 + most] = self._tokens[slot, behind]
            counts[row] = most
        return counts

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Do nothing: what was drawn is in the token table."""


def find_repetition(ids: Ids, least: int, longest: int) -> int | None:
    """Return the index of the last token of an earlier occurrence of the sequence's end; None if fewer than `least` tokens repeat.

    The occurrence of the most tokens is chosen, counting up to `longest`, and of several the latest.
    """
    last = len(ids) - 1
    found = np.flatnonzero(ids[:last] == ids[last])
    length = 1
    while len(found) and length < longest:
        earlier = found[found >= length] - length
        longer = earlier[ids[earlier] == ids[last - length]] + length
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]) if len(found) and length >= least else None
