"""Run the tokens that decode rows bring, drafts included, and keep the draws that count, all on the device.

A step has some number of tokens, whatever the rows that they belong to. So graphs are captured by numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from srt.layers.attention.base import TokenRows
from srt.layers.sampler import Draws
from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS, RowTokens, Staged, TableDraws
from srt.model_executor.graphs.sized_graphs import SizedGraphs
from srt.model_executor.graphs.verified_tokens import (
    FIRSTS,
    LASTS,
    OFFSETS,
    ROW_FIRSTS,
    ROW_LENS,
    ROW_SLOTS,
    SLOTS,
    GatheredTokens,
    table_operations,
)
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

LEAST_TOGETHER = 48  # tokens from which on attention reads a row's keys once for all of its tokens


class VerifyRunner(SizedGraphs):
    """Call `stage`, then `forward`, then either `sample`, or draw from the logits and call `accept`.

    The tables say how long rows are when a step begins, and `accept` makes them as long as their draws that count.
    """

    name = "verify"

    def __init__(
        self,
        loaded: LoadedModel,
        state: DeviceState,
        max_tokens: int,
        most_of_row: int,
        sizes: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        super().__init__(sizes, loaded.device, capture)
        self.max_tokens = max_tokens
        self._most_of_row = most_of_row
        self._tokens = RowTokens(loaded, state)
        self._tables = state.req_to_token_pool
        self._draws = TableDraws(state)
        self._staged = Staged(7, max_tokens, loaded.device)
        self._gathered = GatheredTokens.allocate(self._tables, max_tokens, loaded.device)
        self._gather, self._accept = table_operations(loaded.device)
        head = loaded.model.lm_head
        self.logits = torch.zeros((max_tokens, head.shard_size), dtype=head.weight.dtype, device=loaded.device)
        self.outcome = torch.zeros(max_tokens, dtype=torch.int64, device=loaded.device)
        """The draw of each token of the last step if it counts, else -1."""
        self._parts: Sequence[Work] = ()
        self.stage_padding(max_tokens)

    def stage(self, slots: Ints, counts: Ints) -> None:
        """Send the rows' numbers of tokens, the first of which is a row's last known one. All are in the token table."""
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        firsts = np.repeat(ends - counts, counts)
        size, self._parts = self.parts_for(num_tokens)
        whole, num_rows = self._begin(num_tokens, len(slots), size), len(slots)
        whole[ROW_SLOTS, :num_rows], whole[ROW_LENS, :num_rows] = slots, counts
        whole[ROW_FIRSTS, :num_rows] = ends - counts
        host = whole[:, :num_tokens]
        host[SLOTS], host[OFFSETS] = np.repeat(slots, counts), np.arange(num_tokens) - firsts
        host[FIRSTS], host[LASTS] = firsts, 0
        host[LASTS, ends - 1] = 1
        self._staged.send()

    def stage_padding(self, size: int) -> None:
        self._begin(0, 0, size)
        self._staged.send()

    def _begin(self, num_tokens: int, num_rows: int, size: int) -> Ints:
        """Return the memory for the numbers of these tokens and rows. Tokens of the dummy slot follow, up to `size` a row each."""
        host = self._staged.begin()
        host[SLOTS, num_tokens:] = self._tables.dummy_slot
        host[OFFSETS, num_tokens:] = 0
        host[FIRSTS, num_tokens:] = np.arange(num_tokens, self.max_tokens)
        host[LASTS, num_tokens:] = 1
        end = num_rows + size - num_tokens
        host[ROW_SLOTS, num_rows:] = self._tables.dummy_slot
        host[ROW_LENS, num_rows:end], host[ROW_LENS, end:] = 1, 0
        host[ROW_FIRSTS, num_rows:end], host[ROW_FIRSTS, end:] = np.arange(num_tokens, size), 0
        return host

    def forward(self) -> None:
        """Compute the logits of the staged tokens."""
        self._parts[0]()

    def sample(self, kind: SamplingKind) -> None:
        """Draw behind each of the staged tokens, by the parameters in the tables, and keep what counts."""
        self._parts[1 + kind]()

    @property
    def token_slots(self) -> torch.Tensor:
        """The slot of each token, padding included."""
        return self._staged.tensor[SLOTS]

    def next_positions(self, size: int) -> torch.Tensor:
        """Return the positions of the draws behind the first `size` tokens of the step whose logits were computed last."""
        return self._gathered.seq_lens[:size]

    def shortened(self) -> AbstractContextManager[None]:
        return self._tokens.shortened()

    def works(self, size: int) -> Sequence[Work]:
        return [partial(self._run_forward, size), *(partial(self._run_sample, size, kind) for kind in CAPTURED_KINDS)]

    def _run_forward(self, size: int) -> None:
        gathered = self._gathered.first(size)
        self._gather(self._staged.tensor, self._tables, gathered)
        rows = self._rows_of(size) if size >= LEAST_TOGETHER else None
        inputs = gathered.inputs_of(self._staged.tensor[SLOTS, :size])
        hidden = self._tokens.hidden_of(inputs, rows, self._most_of_row)
        self._tokens.logits_into(hidden, self.logits[:size])

    def _rows_of(self, size: int) -> TokenRows:
        slots, lens, firsts = self._staged.tensor[ROW_SLOTS : ROW_FIRSTS + 1, :size]
        return TokenRows(slots, self._gathered.prefix_lens[:size], lens, firsts)

    def _run_sample(self, size: int, kind: SamplingKind) -> None:
        slots, rows = self._staged.tensor[SLOTS, :size], self._gathered.draws.first(size)
        self.accept(self._draws.draw_rows(kind, self.logits[:size], slots, rows, self.next_positions(size)))

    def accept(self, draws: Draws) -> None:
        """Keep each row's draws up to the first that differs from the draft behind its token, that one included.

        A draw that is not finite does not count. If it is a row's first, the row gets its id nevertheless, which nobody sees.
        """
        outcome = self.outcome[: len(draws.ids)]
        self._accept(self._staged.tensor, draws, self._tables, self._most_of_row, outcome)
