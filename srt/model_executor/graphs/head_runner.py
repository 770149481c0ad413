"""Draft several tokens of each row with a head. A graph has one of its steps, so a row's number of drafts may be any.

The first step computes the entries of all tokens that the model has accepted since the row last drafted, which the device alone knows. So
each row has as many tokens in it as a step can accept, and those that are too many are padding. It has a graph of its own. So have draws,
for each kind of sampling: one graph of all steps for each kind would launch each kernel of the layer as often as steps and kinds ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS, NO_ROWS, Staged
from srt.model_executor.graphs.sized_graphs import SizedGraphs, run_drafts
from srt.model_executor.head_steps import HeadSteps
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

SLOTS, MOST, STARTS = range(3)  # rows of the staged numbers, which have a column for each row
# Rows of the present step's numbers, behind SLOTS: positions of last tokens, and how many drafts each row still gets.
POSITIONS, LEFT = 1, 2
ON_DEVICE = -1  # the start of a row is what the device knows


class HeadRunner(SizedGraphs):
    """Draws up to `num_steps` tokens of each row, into the token table behind the row's last known token."""

    name = "head"

    def __init__(
        self,
        steps: HeadSteps,
        num_steps: int,
        device: torch.device,
        sizes: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        super().__init__(sizes, device, capture)
        self._steps, self._tables = steps, steps.whole
        self._num_steps = num_steps
        self._rows = torch.zeros((3, self._tables.num_slots), dtype=torch.int64, device=device)  # of the present step
        self._hidden = steps.new_hidden(self._tables.num_slots)  # of their last tokens
        self._starts = torch.ones_like(self._tables.seq_lens)  # first position of each slot whose entry is not computed
        self._staged = Staged(3, self._tables.num_slots, device)
        self.stage_padding(self._tables.num_slots)

    @property
    def num_first_tokens(self) -> int:
        """The most entries of a row that the first step computes."""
        return 1 + self._num_steps

    def draft(self, slots: Ints, most: Ints, starts: Ints | int, kind: SamplingKind) -> None:
        """Draft `most[i]` tokens of row i, whose entries from `starts[i]` on are not computed."""
        self._stage(slots, most, starts)
        _, parts = self.parts_for(len(slots))
        run_drafts(parts, int(most.max()), kind)

    def stage_padding(self, size: int) -> None:
        self._stage(NO_ROWS, NO_ROWS, NO_ROWS)

    def _stage(self, slots: Ints, most: Ints, starts: Ints | int) -> None:
        host, num_rows = self._staged.begin(), len(slots)
        host[SLOTS, :num_rows], host[SLOTS, num_rows:] = slots, self._tables.dummy_slot
        host[MOST, :num_rows], host[MOST, num_rows:] = most, 0
        host[STARTS, :num_rows], host[STARTS, num_rows:] = starts, 1
        self._staged.send()

    def works(self, size: int) -> Sequence[Work]:
        samples = [partial(self._sample, size, kind) for kind in CAPTURED_KINDS]
        return [partial(self._run_first, size), partial(self._run_following, size), *samples]

    def _run_first(self, size: int) -> None:
        slots, most, told = (self._staged.tensor[row, :size] for row in (SLOTS, MOST, STARTS))
        lengths = self._tables.seq_lens[slots]
        starts = torch.where(told == ON_DEVICE, self._starts[slots], told)
        self._hidden[:size].copy_(self._catch_up(slots, lengths, most > 0, starts))
        rows = self._rows[:, :size]
        rows[SLOTS].copy_(slots)
        rows[POSITIONS].copy_(lengths)
        rows[LEFT].copy_(most)
        self._pad(size)

    def _run_following(self, size: int) -> None:
        rows, hidden = self._rows[:, :size], self._hidden[:size]
        rows[POSITIONS].add_(1)
        rows[LEFT].sub_(1)
        self._pad(size)
        features = self._steps.next_features(hidden)
        hidden.copy_(self._steps.run_tokens(rows[SLOTS], rows[POSITIONS], features))

    def _pad(self, size: int) -> None:
        """Make padding of the rows that have all of their drafts."""
        slots, positions, left = self._rows[:, :size]
        is_done = left <= 0
        slots.masked_fill_(is_done, self._tables.dummy_slot)
        positions.masked_fill_(is_done, 1)

    def _sample(self, size: int, kind: SamplingKind) -> None:
        """Draw behind the rows' last tokens."""
        slots, positions, _ = self._rows[:, :size]
        places = positions + 1
        draws = self._steps.draw(kind, self._hidden[:size], slots, places)
        self._tables.write_tokens(slots, places, draws.ids)

    def _catch_up(
        self, slots: torch.Tensor, lengths: torch.Tensor, is_drafting: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Compute the entries of each row from its start to its last known token, and return the hidden states of the last."""
        width = self.num_first_tokens
        places = torch.arange(width, device=slots.device)
        positions = starts[:, None] + places
        is_real = is_drafting[:, None] & (positions <= lengths[:, None])
        token_slots = torch.where(is_real, slots[:, None], self._tables.dummy_slot)
        positions = torch.where(is_real, positions, 1)
        hidden = self._steps.run_tokens(token_slots.flatten(), positions.flatten())
        lasts = (lengths - starts).clamp(0, width - 1) + width * torch.arange(len(slots), device=slots.device)
        self._starts[slots] = torch.where(is_drafting, lengths + 1, starts)
        return hidden[lasts]
