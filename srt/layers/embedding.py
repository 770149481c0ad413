"""The token embedding and the output layer, split over the ranks by vocabulary.

Every rank holds the same number of rows, shard_size; where that does not divide the vocabulary, the last ranks hold rows
beyond it, which are zero. Rank r has the ids from shard_start on, shard_size_valid of them real (it can be none).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, Affine, LayerOps
from srt.layers.weights import WeightedModule, WeightPiece


class VocabShard:
    """The token ids of one rank."""

    def __init__(self, vocab_size: int, tp: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.size = -(-vocab_size // tp.size)
        self.start = min(tp.rank * self.size, vocab_size)
        self.size_valid = min(self.size, vocab_size - self.start)


class VocabParallelEmbedding(WeightedModule):
    """Token ids → vectors. Each rank looks up its own ids, and the sum over ranks has them all."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self._tp = tp
        self.shard = VocabShard(vocab_size, tp)
        self.weight = nn.Parameter(torch.empty(self.shard.size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.shard.start
        foreign = (local < 0) | (local >= self.shard.size_valid)
        vectors = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._tp.all_reduce(vectors.masked_fill_(foreign.unsqueeze(-1), 0))

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        yield _vocab_piece(f"{path}.weight", self, self.weight, self.shard)


class ParallelLMHead(WeightedModule):
    """Hidden states → logits of this rank's ids. Its weight is its own, or that of a tied embedding."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        tied: VocabParallelEmbedding | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._shard = VocabShard(vocab_size, tp)
        self._is_tied = tied is not None
        own = torch.empty(self._shard.size, hidden_size) if tied is None else tied.weight
        self.weight = own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=False)

    @property
    def vocab_size(self) -> int:
        """Ids that exist, over all ranks."""
        return self._shard.vocab_size

    @property
    def shard_start(self) -> int:
        """The id of this rank's first row."""
        return self._shard.start

    @property
    def shard_size(self) -> int:
        """Rows of every rank, padding included."""
        return self._shard.size

    @property
    def shard_size_valid(self) -> int:
        """Rows of this rank that are real ids; the logits after them are 0 and mean nothing."""
        return self._shard.size_valid

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] → [rows, shard_size] f32."""
        return self._ops.linear(hidden, Affine(self.weight, None)).float()

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """The same into `out`, rounded to the model's dtype as they are before they become f32."""
        self._ops.linear_into(hidden, self.weight, out)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        if not self._is_tied:
            yield _vocab_piece(f"{path}.weight", self, self.weight, self._shard)


def _vocab_piece(name: str, owner: nn.Module, weight: Tensor, shard: VocabShard) -> WeightPiece:
    shape = (shard.vocab_size, weight.shape[1])
    return WeightPiece(name, shape, owner, "weight", 0, shard.start, shard.size_valid, 0)
