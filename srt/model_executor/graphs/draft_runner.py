"""Draft several tokens of each row with a smaller model. A graph has one of its steps, so a row's number of drafts may be any.

The smaller model may lack the last token that is computed: after drafts that were all right it has not seen the last of them. So its first
step computes that token as well, and has a graph of its own. Draws have graphs of their own, one for each kind of sampling, which serve
behind both: a capture launches all kernels of the layers, so a graph of layers for each kind would take three times as long to capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS, NO_ROWS, RowTokens, Staged, TableDraws, TokenInputs
from srt.model_executor.graphs.sized_graphs import SizedGraphs, run_drafts
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

SLOTS, MOST = range(2)  # rows of the staged numbers, which have a column for each row


class DraftRunner(SizedGraphs):
    """Draws any number of tokens of each row, into the token table behind the row's last known token."""

    name = "draft"

    def __init__(
        self,
        small: LoadedModel,
        small_state: DeviceState,
        seq_lens: torch.Tensor,
        sizes: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        """`seq_lens` are the lengths of the slots in the tables of the model that verifies."""
        super().__init__(sizes, small.device, capture)
        self._tokens = RowTokens(small, small_state)
        self._tables, self._draws = small_state.req_to_token_pool, TableDraws(small_state)
        self._seq_lens = seq_lens
        self._num_drafted = torch.zeros(
            1, dtype=torch.int64, device=small.device
        )  # tokens of each row, of the present drafts
        max_rows = small_state.num_slots
        self._staged = Staged(2, max_rows, small.device)
        # Slots of the rows whose logits are computed, and positions of the draws behind them.
        self._drawn = torch.zeros((2, max_rows), dtype=torch.int64, device=small.device)
        head = small.model.lm_head
        self._logits = torch.zeros((max_rows, head.shard_size), dtype=head.weight.dtype, device=small.device)
        self.stage_padding(max_rows)

    def draft(self, slots: Ints, most: Ints, kind: SamplingKind) -> None:
        """Draft `most[i]` tokens of row i."""
        self._stage(slots, most)
        _, parts = self.parts_for(len(slots))
        run_drafts(parts, int(most.max()), kind)

    def stage_padding(self, size: int) -> None:
        self._stage(NO_ROWS, NO_ROWS)

    def _stage(self, slots: Ints, most: Ints) -> None:
        host, num_rows = self._staged.begin(), len(slots)
        host[SLOTS, :num_rows], host[SLOTS, num_rows:] = slots, self._tables.dummy_slot
        host[MOST, :num_rows], host[MOST, num_rows:] = most, 0
        self._staged.send()

    def shortened(self) -> AbstractContextManager[None]:
        return self._tokens.shortened()

    def works(self, size: int) -> Sequence[Work]:
        samples = [partial(self._sample, size, kind) for kind in CAPTURED_KINDS]
        return [partial(self._run_first, size), partial(self._run_following, size), *samples]

    def _run_first(self, size: int) -> None:
        self._num_drafted.zero_()
        slots, positions = self._rows(size)
        before = (positions - 1).clamp(min=0)
        self._run_tokens(size, torch.cat((slots, slots)), torch.cat((before, positions)))

    def _run_following(self, size: int) -> None:
        self._num_drafted.add_(1)
        self._run_tokens(size, *self._rows(size))

    def _rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots and positions of the rows' last tokens. Rows that have all of their drafts are padding."""
        slots, most = self._staged.tensor[SLOTS, :size], self._staged.tensor[MOST, :size]
        is_drafting = most > self._num_drafted
        positions = torch.where(is_drafting, self._seq_lens[slots] + self._num_drafted, 0)
        return torch.where(is_drafting, slots, self._tables.dummy_slot), positions

    def _run_tokens(self, size: int, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Compute these tokens, and the logits of the last `size` of them."""
        drawn_slots, drawn_positions = self._drawn[:, :size]
        drawn_slots.copy_(slots[-size:])
        torch.add(positions[-size:], 1, out=drawn_positions)
        hidden = self._tokens.hidden_of(TokenInputs.of(self._tables, slots, positions))
        self._tokens.logits_into(hidden[-size:], self._logits[:size])

    def _sample(self, size: int, kind: SamplingKind) -> None:
        """Draw behind the tokens whose logits were computed last."""
        slots, positions = self._drawn[:, :size]
        draws = self._draws.draw(kind, self._logits[:size], slots, positions)
        self._tables.write_tokens(slots, positions, draws.ids)
