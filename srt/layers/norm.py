"""RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.weights import WeightedModule, WeightPiece


class RMSNorm(WeightedModule):
    """x / rms(x) * weight over the last dimension; the root mean square is taken in float32. The same on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        size = self.weight.shape[0]
        yield WeightPiece(f"{path}.weight", (size,), self, "weight", 0, 0, size, 0)
