"""Draft several tokens of each row with a head, all of its steps in one graph.

The first step computes the entries of all tokens that the model has accepted since the row last drafted, which the device alone knows. So
each row has as many tokens in it as a step can accept, and those that are too many are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS, NO_ROWS, Staged
from srt.model_executor.graphs.sized_graphs import SizedGraphs
from srt.model_executor.head_steps import HeadSteps
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

SLOTS, MOST, STARTS = range(3)  # rows of the staged numbers, which have a column for each row
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
        parts[min(kind, SamplingKind.ADJUSTED)]()

    def stage_padding(self, size: int) -> None:
        self._stage(NO_ROWS, NO_ROWS, NO_ROWS)

    def _stage(self, slots: Ints, most: Ints, starts: Ints | int) -> None:
        host, num_rows = self._staged.begin(), len(slots)
        host[SLOTS, :num_rows], host[SLOTS, num_rows:] = slots, self._tables.dummy_slot
        host[MOST, :num_rows], host[MOST, num_rows:] = most, 0
        host[STARTS, :num_rows], host[STARTS, num_rows:] = starts, 1
        self._staged.send()

    def works(self, size: int) -> Sequence[Work]:
        return [partial(self._run, size, kind) for kind in CAPTURED_KINDS]

    def _run(self, size: int, kind: SamplingKind) -> None:
        steps, dummy = self._steps, self._tables.dummy_slot
        slots, most, told = (self._staged.tensor[row, :size] for row in (SLOTS, MOST, STARTS))
        lengths = self._tables.seq_lens[slots]
        hidden = self._catch_up(slots, lengths, most > 0, torch.where(told == ON_DEVICE, self._starts[slots], told))
        for step in range(self._num_steps):
            # Rows with fewer drafts are padding from then on.
            step_slots = torch.where(most > step, slots, dummy)
            positions = torch.where(most > step, lengths + step, 1)
            if step:
                hidden = steps.run_tokens(step_slots, positions, steps.next_features(hidden))
            draws = steps.draw(kind, hidden, step_slots, positions + 1)
            self._tables.write_tokens(step_slots, positions + 1, draws.ids)

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
