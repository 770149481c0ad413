"""Pooling: one vector for each row of a step whose prompt ends, from the hidden states of the prompt's tokens.

A prompt may be computed in chunks over several steps. What a pooling must remember between them lies in a table with a line for each slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.weights import WeightedModule, WeightPiece
from srt.utils.pooling_config import PoolingSpec

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class ScoreHead(WeightedModule):
    """A classifier's output layer: a score for each label. Every rank holds all of it."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        rows = self.weight.shape[0]
        yield WeightPiece(f"{path}.weight", tuple(self.weight.shape), self, "weight", 0, 0, rows, 0)


class Pooler(ABC):
    """Pools the rows of one step after the other."""

    reads_all_tokens: ClassVar[bool] = True
    """Whether `pool` needs the hidden states of all tokens; False: of each sampling row's last token only."""

    @abstractmethod
    def pool(self, hidden: Tensor, batch: ForwardBatch, sample_rows: Tensor) -> Tensor:
        """Return the vectors [R, hidden size] float32 of the rows in `sample_rows` [R], whose prompts end with this step.

        Call it for every step, also if no row samples, with `hidden` [tokens, hidden size] as `reads_all_tokens` says.
        """


class LastTokenPooler(Pooler):
    """The hidden states of the last token."""

    reads_all_tokens = False

    def pool(self, hidden: Tensor, batch: ForwardBatch, sample_rows: Tensor) -> Tensor:
        return hidden[: len(sample_rows)].float()


class MeanPooler(Pooler):
    """The mean over all tokens. The table holds the sum over the tokens so far."""

    def __init__(self, num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._sums = torch.zeros((num_slots, hidden_size), dtype=torch.float32, device=device)

    def pool(self, hidden: Tensor, batch: ForwardBatch, sample_rows: Tensor) -> Tensor:
        counts, slots = _row_counts(batch), batch.req_pool_indices
        # Row by row, not as one product: a row that is not finite must not spoil the others.
        added = torch.segment_reduce(hidden.float(), "sum", lengths=counts, unsafe=True)
        sums = added + self._sums[slots].masked_fill(_begins(batch, counts), 0.0)
        self._sums[slots] = sums
        return sums[sample_rows] / batch.seq_lens[sample_rows].unsqueeze(1)


class FirstTokenPooler(Pooler):
    """The hidden states of the first token, which the table keeps until the prompt's end."""

    def __init__(self, num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._firsts = torch.zeros((num_slots, hidden_size), dtype=torch.float32, device=device)

    def pool(self, hidden: Tensor, batch: ForwardBatch, sample_rows: Tensor) -> Tensor:
        counts, slots = _row_counts(batch), batch.req_pool_indices
        first_of_row = hidden[counts.cumsum(0) - counts].float()
        firsts = torch.where(_begins(batch, counts), first_of_row, self._firsts[slots])
        self._firsts[slots] = firsts
        return firsts[sample_rows]


def make_pooler(spec: PoolingSpec, num_slots: int, hidden_size: int, device: torch.device) -> Pooler:
    match spec.pooling:
        case "last":
            return LastTokenPooler()
        case "mean":
            return MeanPooler(num_slots, hidden_size, device)
        case "cls":
            return FirstTokenPooler(num_slots, hidden_size, device)


def _row_counts(batch: ForwardBatch) -> Tensor:
    """Return the number of tokens of each row [B]; a decoding row has one."""
    return torch.cat((batch.extend_seq_lens, batch.extend_seq_lens.new_ones(batch.num_decode_rows)))


def _begins(batch: ForwardBatch, counts: Tensor) -> Tensor:
    """Return whether each row's text begins with this step [B, 1]."""
    return (batch.seq_lens == counts).unsqueeze(1)
