"""Linear layers split over the ranks of a tensor-parallel group.

A column-parallel layer holds some rows of its weight [out, in] and computes this rank's part of the output. A row-parallel layer
takes that part as its input and sums the ranks' results. Layers that read the same input are merged into one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.norm import RMSNorm
from srt.layers.ops import TORCH_OPS, Affine, LayerOps, Stream
from srt.layers.quantization.weight import LinearWeight, Place, PlainWeight
from srt.layers.weights import ColumnPart, WeightedModule, WeightPiece

if TYPE_CHECKING:
    from srt.distributed.row_division import RowDivision


class LinearLayer(WeightedModule):
    """What all linear layers have: a weight, which the scheme of a quantised checkpoint may replace before loading, and a bias."""

    weight: LinearWeight
    bias: nn.Parameter | None
    _ops: LayerOps

    @property
    def ops(self) -> LayerOps:
        """The operations that the layer runs on."""
        return self._ops

    @property
    def affine(self) -> Affine:
        return Affine(self.weight, self.bias)

    @abstractmethod
    def places(self, path: str) -> list[Place]:
        """Return the checkpoint's layers that make up this one; `path` is the module's path in the model."""


class ColumnParallelLinear(LinearLayer):
    """Linear layer y = x Wᵀ + b for this rank's outputs: those of its parts, in order."""

    def __init__(self, in_features: int, parts: Sequence[ColumnPart], bias: bool, ops: LayerOps = TORCH_OPS) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        self.sizes = tuple(part.size for part in parts)
        """Widths of the parts within the output."""
        rows = sum(self.sizes)
        self.weight = PlainWeight(rows, in_features)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.affine)

    def places(self, path: str) -> list[Place]:
        parent = path.rpartition(".")[0]
        places, target_start = [], 0
        for part in self.parts:
            name = f"{parent}.{part.name}" if parent else part.name
            places.append(Place(name, part.total, self.in_features, 0, part.start, part.size, target_start))
            target_start += part.size
        return places

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        places = self.places(path)
        yield from self.weight.pieces(places)
        if self.bias is not None:
            for at in places:
                shape = (at.num_outputs,)
                yield WeightPiece(f"{at.path}.bias", shape, self, "bias", 0, at.start, at.size, at.target_start)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Merged layers with the same input, such as gate_proj and up_proj, each split evenly over the ranks."""

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, int]],
        bias: bool,
        tp: TensorParallel,
        ops: LayerOps = TORCH_OPS,
        stored_as: str | None = None,
    ) -> None:
        """`stored_as` is the name of the checkpoint's layer, if it holds the merged layers as one."""
        parts = [_even_part(name, total, tp) for name, total in outputs]
        super().__init__(in_features, parts if stored_as is None else _within_one(stored_as, parts), bias, ops)

    def gated(self, x: Tensor, is_gelu: bool = False) -> Tensor:
        """Return silu(first) * second of the two layers' outputs, or gelu(first) by its approximation with tanh."""
        return self._ops.gated_linear(x, self.affine, is_gelu)

    def gated_of_norm(self, stream: Stream, norm: RMSNorm, is_gelu: bool = False) -> tuple[Tensor, Tensor]:
        """Return (`gated` of the normed stream, the stream's sum)."""
        return self._ops.gated_linear_of_norm(stream, norm.norm, self.affine, is_gelu)


class QKVParallelLinear(ColumnParallelLinear):
    """Merged q_proj, k_proj and v_proj, split by heads. If there are more ranks than KV heads, neighbouring ranks hold the same head."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        tp: TensorParallel,
        ops: LayerOps = TORCH_OPS,
        stored_as: str | None = None,
    ) -> None:
        """`stored_as` is the name of the checkpoint's layer, if it holds the three as one."""
        q = _even_part("q_proj", num_heads * head_dim, tp)
        kv_heads = max(1, num_kv_heads // tp.size)
        first_kv_head = tp.rank * num_kv_heads // tp.size
        total, start, size = num_kv_heads * head_dim, first_kv_head * head_dim, kv_heads * head_dim
        parts = [q, ColumnPart("k_proj", total, start, size), ColumnPart("v_proj", total, start, size)]
        super().__init__(hidden_size, parts if stored_as is None else _within_one(stored_as, parts), bias, ops)
        self.num_heads = q.size // head_dim
        """Number of query heads on this rank."""
        self.num_kv_heads = kv_heads


class RowParallelLinear(LinearLayer):
    """Linear layer y = x Wᵀ + b of which each rank has a part of x: the ranks' products are summed, then the bias is added once."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, ops: LayerOps = TORCH_OPS
    ) -> None:
        super().__init__()
        self._tp = tp
        self._ops = ops
        self._columns = _even_part("", in_features, tp)
        self.weight = PlainWeight(out_features, self._columns.size)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._ops.linear(x, self.affine)
        total = self._tp.all_reduce(self.summand(x))
        return total if self.bias is None else total + self.bias

    def onto(self, hidden: Tensor, x: Tensor, next_norm: RMSNorm | None, division: RowDivision | None = None) -> Stream:
        """Return hidden + y, prepared for `next_norm` if given. May overwrite `hidden`.

        With `division`, two ranks divide the rows, and only this rank's rows of `hidden` are read and written.
        """
        if division is not None:
            assert next_norm is not None, "the other rank's rows would have no sum"
            return self._own_rows_onto(hidden, x, next_norm, division)
        if self._tp.size == 1:
            return self._ops.linear_onto(hidden, x, self.affine, None if next_norm is None else next_norm.norm)
        if self.bias is not None:
            return Stream(hidden, self(x))
        return sum_onto(self._tp, self._ops, hidden, self.summand(x), next_norm)

    @property
    def can_divide_rows(self) -> bool:
        """Whether two ranks may divide the rows of its sums: the weight is a plain matrix, and there is no bias."""
        return self.weight.matrix is not None and self.bias is None

    def _own_rows_onto(self, hidden: Tensor, x: Tensor, next_norm: RMSNorm, division: RowDivision) -> Stream:
        matrix, norm = self.weight.matrix, next_norm.norm
        assert matrix is not None and self.bias is None
        self._ops.project_into(x[division.others], matrix, division.begin_sum())
        division.send_part()
        part = self._ops.project(x[division.own], matrix)
        return Stream(hidden, normed=division.finish_sum(part, hidden, norm.weight, norm.eps), division=division)

    def summand(self, x: Tensor) -> Tensor:
        """Return what this rank adds to y, without the bias."""
        return self._ops.linear(x, Affine(self.weight, None))

    def summand_onto(self, total: Tensor, x: Tensor) -> Tensor:
        """Return `total` plus what this rank adds to y, without the bias. May overwrite `total`."""
        return self._ops.linear_onto(total, x, Affine(self.weight, None)).total

    def places(self, path: str) -> list[Place]:
        columns = self._columns
        return [Place(path, self.weight.shape[0], columns.total, 1, columns.start, columns.size)]

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        yield from self.weight.pieces(self.places(path))
        if self.bias is not None:
            rows = self.weight.shape[0]
            yield WeightPiece(f"{path}.bias", (rows,), self, "bias", 0, 0, rows, 0)


def sum_onto(tp: TensorParallel, ops: LayerOps, hidden: Tensor, summand: Tensor, next_norm: RMSNorm | None) -> Stream:
    """Return hidden plus the sum of all ranks' summands, prepared for `next_norm` if given."""
    if next_norm is None or tp.size == 1 or not ops.norms_while_summing:
        return Stream(hidden, tp.all_reduce(summand))
    formed = tp.all_reduce_and_norm(summand, hidden, next_norm.norm.weight, next_norm.norm.eps)
    if formed is None:
        return Stream(hidden, tp.all_reduce(summand))
    normed, total = formed
    return Stream(total, normed=normed)


def _within_one(name: str, parts: Sequence[ColumnPart]) -> list[ColumnPart]:
    """Return the parts as ranges of one layer of the checkpoint, in which their layers follow each other."""
    total, first = sum(part.total for part in parts), 0
    within = []
    for part in parts:
        within.append(ColumnPart(name, total, first + part.start, part.size))
        first += part.total
    return within


def _even_part(name: str, total: int, tp: TensorParallel) -> ColumnPart:
    # The configuration was checked (ModelConfig.check_tp) before any layer was built.
    assert total % tp.size == 0, f"{total} features of {name} over {tp.size} ranks"
    size = total // tp.size
    return ColumnPart(name, total, tp.rank * size, size)
