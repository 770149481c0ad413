"""The RMSNorm layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from srt.layers.ops import TORCH_OPS, LayerOps, Norm, Stream
from srt.layers.weights import WeightedModule, WeightPiece


class RMSNorm(WeightedModule):
    """RMSNorm: x / rms(x) * weight over the last dimension, with the root mean square in float32. The same on every rank."""

    def __init__(self, size: int, eps: float, ops: LayerOps = TORCH_OPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps
        self._ops = ops

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self._eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.norm)

    def of_stream(self, stream: Stream) -> Tensor:
        """Return the norm of the stream's sum."""
        return self._ops.norm_stream(stream, self.norm)[0]

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        size = self.weight.shape[0]
        yield WeightPiece(f"{path}.weight", (size,), self, "weight", 0, 0, size, 0)
