"""Random weights for trying and measuring without a checkpoint: quick to draw, and the same for any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from srt.layers.weights import WeightPiece

PERIOD = 1_048_573
"""A prime: rows of a matrix start at ever different places of the stream, so that none repeats another."""


class DummyWeights:
    """Element i of a tensor is element (offset + i) mod PERIOD of one stream of normal noise; the name gives the offset.

    So any slice of a tensor is written by copying, without drawing the rest. Matrices are scaled by the root of their
    inputs, norms are ones.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(PERIOD, generator=generator, dtype=torch.float32)
        # Twice over, so that every window of a period is in one piece.
        self._noise = torch.cat((noise, noise))
        self._scaled: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def fill(self, pieces: Sequence[WeightPiece], progress: Callable[[int, int], None]) -> None:
        sizes = [piece.num_elements * piece.parameter.element_size() for piece in pieces]
        done = 0
        progress(0, sum(sizes))
        for piece, size in zip(pieces, sizes, strict=True):
            self._fill_piece(piece)
            done += size
            progress(done, sum(sizes))

    def _fill_piece(self, piece: WeightPiece) -> None:
        target = piece.target()
        if piece.name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        # A vector is a matrix of one row.
        width = piece.shape[-1]
        columns = slice(piece.start, piece.start + piece.size) if piece.dim == len(piece.shape) - 1 else slice(0, width)
        first_row = piece.start if piece.dim < len(piece.shape) - 1 else 0
        scale = 0.02 if len(piece.shape) == 1 else width**-0.5
        offset = zlib.crc32(piece.name.encode()) + first_row * width
        self._fill_rows(target.view(-1, target.shape[-1]), offset, width, columns, self._noise_like(target, scale))

    def _fill_rows(self, target: Tensor, offset: int, width: int, columns: slice, noise: Tensor) -> None:
        """Rows of a matrix `width` wide, or some columns of them, from element `offset` of the stream on."""
        assert width <= PERIOD, f"rows of {width} elements"
        rows_at_once = PERIOD // width
        for begin in range(0, target.shape[0], rows_at_once):
            rows = target[begin : begin + rows_at_once]
            start = (offset + begin * width) % PERIOD
            window = noise[start : start + rows.shape[0] * width].view(-1, width)
            rows.copy_(window[:, columns])

    def _noise_like(self, target: Tensor, scale: float) -> Tensor:
        key = (scale, target.dtype, target.device)
        if key not in self._scaled:
            self._scaled[key] = (self._noise * scale).to(target.dtype).to(target.device)
        return self._scaled[key]
