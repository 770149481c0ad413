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

    So any slice of a tensor can be written by copying, without drawing the rest. Matrices are scaled by the root of
    their inputs, norms are ones.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(PERIOD, generator=generator, dtype=torch.float32)

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
        if len(piece.shape) == 1:
            if piece.name.endswith("norm.weight"):
                target.fill_(1.0)
            else:
                target.copy_(self._stream(piece.name, piece.start, piece.size, 0.02, target))
            return
        rows, columns = piece.shape
        scale = columns**-0.5
        if piece.dim == 0:
            start, count = piece.start * columns, piece.size * columns
            target.copy_(self._stream(piece.name, start, count, scale, target).view(-1, columns))
            return
        whole = self._stream(piece.name, 0, rows * columns, scale, target).view(rows, columns)
        target.copy_(whole[:, piece.start : piece.start + piece.size])

    def _stream(self, name: str, start: int, count: int, scale: float, like: Tensor) -> Tensor:
        """`count` elements of the tensor from element `start` on, with the type and device of `like`."""
        offset = (zlib.crc32(name.encode()) + start) % PERIOD
        noise = (self._noise * scale).to(like.dtype).to(like.device).roll(-offset)
        return noise.repeat(-(-count // PERIOD))[:count]
