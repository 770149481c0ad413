"""The norm layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, LayerOps, Norm, Stream
from srt.layers.weights import ColumnPart, WeightedModule, WeightPiece
from srt.utils.layer_spec import NormSpec


class _WeightedNorm(WeightedModule):
    """A norm over the last dimension with a weight for each element, the same on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        size = self.weight.shape[0]
        yield WeightPiece(f"{path}.weight", (size,), self, "weight", 0, 0, size, 0)


class RMSNorm(_WeightedNorm):
    """RMSNorm: x / rms(x) * weight, or * (1 + weight), with the root mean square in float32."""

    def __init__(self, size: int, eps: float, ops: LayerOps = TORCH_OPS, is_plus_one: bool = False) -> None:
        super().__init__(size, eps)
        self._ops = ops
        self._is_plus_one = is_plus_one

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self._eps, self._is_plus_one)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.norm)

    def of_stream(self, stream: Stream) -> Tensor:
        """Return the norm of the stream's sum."""
        return self._ops.norm_stream(stream, self.norm)[0]


class LayerNorm(_WeightedNorm):
    """LayerNorm without a bias, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), None, self._eps).to(x.dtype)


class ShardedRMSNorm(WeightedModule):
    """RMSNorm over the outputs of all ranks, of which this rank holds `part`.

    If ranks hold the same outputs, as they do with fewer KV heads than ranks, each output is held equally often, so that the mean over
    what the ranks hold is the mean over all outputs.
    """

    def __init__(self, part: ColumnPart, eps: float, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(part.size), requires_grad=False)
        self._part = part
        self._eps = eps
        self._tp = tp
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._ops.norm(x, Norm(self.weight, self._eps))
        wide = x.float()
        squares = self._tp.all_reduce(wide.square().sum(-1, keepdim=True)) / (self._part.size * self._tp.size)
        return (wide * torch.rsqrt(squares + self._eps) * self.weight).to(x.dtype)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        part = self._part
        yield WeightPiece(f"{path}.weight", (part.total,), self, "weight", 0, part.start, part.size, 0)


def make_norm(spec: NormSpec, size: int, ops: LayerOps) -> nn.Module:
    """Return a norm of the model's kind."""
    match spec.kind:
        case "rms":
            return RMSNorm(size, spec.eps, ops)
        case "rms_plus_one":
            return RMSNorm(size, spec.eps, ops, is_plus_one=True)
        case "layer":
            return LayerNorm(size, spec.eps)
