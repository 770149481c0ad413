"""Draft several tokens of each row with a smaller model, all of its steps in one graph.

The smaller model may lack the last token that is computed: after drafts that were all right it has not seen the last of them. So its first
step computes that token as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS, NO_ROWS, RowTokens, Staged, TableDraws
from srt.model_executor.graphs.sized_graphs import SizedGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

SLOTS, MOST = range(2)  # rows of the staged numbers, which have a column for each row


class DraftRunner(SizedGraphs):
    """Draws up to `num_steps` tokens of each row, into the token table behind the row's last known token."""

    name = "draft"

    def __init__(
        self,
        small: LoadedModel,
        small_state: DeviceState,
        seq_lens: torch.Tensor,
        num_steps: int,
        sizes: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        """`seq_lens` are the lengths of the slots in the tables of the model that verifies."""
        super().__init__(sizes, small.device, capture)
        self._tokens = RowTokens(small, small_state)
        self._tables, self._draws = small_state.req_to_token_pool, TableDraws(small_state)
        self._seq_lens = seq_lens
        self._num_steps = num_steps
        max_rows = small_state.num_slots
        self._staged = Staged(2, max_rows, small.device)
        head = small.model.lm_head
        self._logits = torch.zeros((max_rows, head.shard_size), dtype=head.weight.dtype, device=small.device)
        self.stage_padding(max_rows)

    def draft(self, slots: Ints, most: Ints, kind: SamplingKind) -> None:
        """Draft `most[i]` tokens of row i."""
        self._stage(slots, most)
        _, parts = self.parts_for(len(slots))
        parts[min(kind, SamplingKind.ADJUSTED)]()

    def stage_padding(self, size: int) -> None:
        self._stage(NO_ROWS, NO_ROWS)

    def _stage(self, slots: Ints, most: Ints) -> None:
        host, num_rows = self._staged.begin(), len(slots)
        host[SLOTS, :num_rows], host[SLOTS, num_rows:] = slots, self._tables.dummy_slot
        host[MOST, :num_rows], host[MOST, num_rows:] = most, 0
        self._staged.send()

    def works(self, size: int) -> Sequence[Work]:
        return [partial(self._run, size, kind) for kind in CAPTURED_KINDS]

    def _run(self, size: int, kind: SamplingKind) -> None:
        dummy = self._tables.dummy_slot
        slots, most, logits = self._staged.tensor[SLOTS, :size], self._staged.tensor[MOST, :size], self._logits[:size]
        lengths = self._seq_lens[slots]
        for step in range(self._num_steps):
            # Rows with fewer drafts are padding from then on.
            step_slots = torch.where(most > step, slots, dummy)
            positions = torch.where(most > step, lengths + step, 0)
            first = [step_slots, step_slots] if step == 0 else [step_slots]
            at = [(positions - 1).clamp(min=0), positions] if step == 0 else [positions]
            token_slots, token_positions = torch.cat(first), torch.cat(at)
            ids = self._tables.tokens(token_slots, token_positions)
            hidden = self._tokens.hidden_of(ids, token_slots, token_positions)
            self._tokens.logits_into(hidden[-size:], logits)
            draws = self._draws.draw(kind, logits, step_slots, positions + 1)
            self._tables.write_tokens(step_slots, positions + 1, draws.ids)
