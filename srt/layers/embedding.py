"""The token embedding and the output layer, split over the ranks by vocabulary.

Every rank holds the same number of rows, shard_size. If that does not divide the vocabulary, the last ranks hold zero rows beyond
it. Rank r has the ids from shard_start on, of which shard_size_valid are real (possibly 0).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, LayerOps
from srt.layers.quantization.int8_weight import quantise_tokens
from srt.layers.quantization.weight import IntegerMatrix
from srt.layers.weights import WeightedModule, WeightPiece
from srt.utils.layer_spec import NO_SCALES, Scales


class VocabShard:
    """The range of token ids of one rank."""

    def __init__(self, vocab_size: int, tp: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.size = -(-vocab_size // tp.size)
        self.start = min(tp.rank * self.size, vocab_size)
        self.size_valid = min(self.size, vocab_size - self.start)


class VocabParallelEmbedding(WeightedModule):
    """Embeds token ids. Each rank looks up its own ids, and the sum over ranks has the vectors of all."""

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
    """Maps hidden states to logits of this rank's ids, with a weight of its own or that of a tied embedding."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        tied: VocabParallelEmbedding | None = None,
        ops: LayerOps = TORCH_OPS,
        scales: Scales = NO_SCALES,
    ) -> None:
        super().__init__()
        self._scales = scales
        self._ops = ops
        self._shard = VocabShard(vocab_size, tp)
        self._is_tied = tied is not None
        own = torch.empty(self._shard.size, hidden_size) if tied is None else tied.weight
        self.weight = own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=False)

    @property
    def vocab_size(self) -> int:
        """Number of real ids over all ranks."""
        return self._shard.vocab_size

    @property
    def shard_start(self) -> int:
        """Token id of this rank's first row."""
        return self._shard.start

    @property
    def shard_size(self) -> int:
        """Number of rows on every rank, padding included."""
        return self._shard.size

    @property
    def shard_size_valid(self) -> int:
        """Number of this rank's rows with real ids; the logits after them are 0 and have no meaning."""
        return self._shard.size_valid

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, shard_size] f32 of hidden [rows, hidden_size]."""
        return self._scaled(self._ops.project(hidden, self.weight)).float()

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits to `out` in the model's dtype, in which they are computed before `logits` converts them."""
        self._ops.project_into(hidden, self.weight, out)
        self._scaled(out)

    def in_8_bits(self) -> IntegerMatrix:
        """Return a copy of this rank's weight as integers with a scale for each output."""
        numbers, scales = quantise_tokens(self.weight.detach())
        return IntegerMatrix(numbers, scales.view(-1), rounds_inputs=False)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Apply the model's factor and cap of logits in place."""
        if self._scales.logits != 1.0:
            logits.mul_(self._scales.logits)
        if self._scales.logit_softcap is not None:
            logits.div_(self._scales.logit_softcap).tanh_().mul_(self._scales.logit_softcap)
        return logits

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        if not self._is_tied:
            yield _vocab_piece(f"{path}.weight", self, self.weight, self._shard)


def _vocab_piece(name: str, owner: nn.Module, weight: Tensor, shard: VocabShard) -> WeightPiece:
    shape = (shard.vocab_size, weight.shape[1])
    return WeightPiece(name, shape, owner, "weight", 0, shard.start, shard.size_valid, 0)
