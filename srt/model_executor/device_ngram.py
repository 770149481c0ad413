"""Guess by repetition where the tables are: on a GPU by a kernel, on a CPU as `srt.speculative.ngram` does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.model_executor.graphs.row_tokens import Staged
from srt.protocol.messages import PlanSection
from srt.speculative.drafter import DraftRows, Ints
from srt.speculative.ngram import NgramDrafter

DraftNgrams = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int], None]
SLOTS, MOST = range(2)  # rows of the staged numbers, which have a column for each row


class DeviceNgramDrafter:
    """Looks only at the request's own tokens. A row whose last tokens did not occur before repeats its last one."""

    def __init__(self, tables: ReqToTokenPool, least: int, longest: int, num_drafts: int) -> None:
        """`least` and `longest` are as in `NgramDrafter`."""
        self._tables = tables
        self._sizes = least, longest, num_drafts
        self._staged = Staged(2, tables.num_slots, tables.seq_lens.device)
        self._draft_ngrams = _draft_operation(tables.seq_lens.is_cuda)

    def reset(self) -> None:
        """Do nothing: the token table is all that is read."""

    def enter_changes(self, changes: PlanSection) -> None:
        """Do nothing, for the same reason."""

    def enter_pages(self, changes: PlanSection) -> None:
        """Do nothing, for the same reason."""

    def read_prompts(self, section: PlanSection) -> None:
        """Do nothing: the token table has all ids of a prompt from its admission on."""

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Do nothing: what was drawn is in the token table."""

    def can_draft_ahead(self, slots: Ints) -> bool:
        return True

    def draft(self, rows: DraftRows) -> Ints:
        return self.draft_ahead(rows)

    def draft_ahead(self, rows: DraftRows) -> Ints:
        host, num_rows, tables = self._staged.begin(), len(rows.slots), self._tables
        host[SLOTS, :num_rows], host[MOST, :num_rows] = rows.slots, rows.most
        self._staged.send()
        slots, most = self._staged.tensor[:, :num_rows]
        self._draft_ngrams(slots, most, tables.seq_lens, tables.token_table, *self._sizes)
        return rows.most

    def run_padding(self) -> None:
        """Run the kernel on no row, so that it is compiled."""
        host = self._staged.begin()
        host[SLOTS], host[MOST] = self._tables.dummy_slot, 0
        self._staged.send()
        slots, most = self._staged.tensor[:, :1]
        self._draft_ngrams(slots, most, self._tables.seq_lens, self._tables.token_table, *self._sizes)


def _draft_operation(is_cuda: bool) -> DraftNgrams:
    if not is_cuda:
        return draft_ngrams_reference
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.kernels.sampling.ngram import draft_ngrams

    return draft_ngrams


def draft_ngrams_reference(
    slots: torch.Tensor,
    most: torch.Tensor,
    seq_lens: torch.Tensor,
    token_table: torch.Tensor,
    least: int,
    longest: int,
    num_drafts: int,
) -> None:
    """Do what the kernel does, on the host."""
    del num_drafts
    rows, tokens = DraftRows(slots.numpy(), seq_lens[slots].numpy(), most.numpy()), token_table.numpy()
    for slot, length, count in zip(rows.slots.tolist(), rows.lengths.tolist(), rows.most.tolist(), strict=True):
        tokens[slot, length + 1 : length + 1 + count] = tokens[slot, length]
    NgramDrafter(token_table, least, longest).draft(rows)
