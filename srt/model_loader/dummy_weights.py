"""Random weights for tests and measurements without a checkpoint: quick to draw, and the same for any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from srt.layers.quantization.weight import LinearWeight
from srt.layers.weights import WeightPiece

PERIOD = 1_048_573
"""A prime: each row of a matrix starts at a different place of the stream, so that no row repeats another."""


class DummyWeights:
    """Draws tensors from one stream of normal noise: element i of a tensor is element (offset + i) mod PERIOD of the stream.

    The offset is a hash of the tensor's name. So any slice of a tensor is filled by copying, without drawing the rest. Matrices are
    divided by the square root of their number of inputs; norms are ones.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(PERIOD, generator=generator, dtype=torch.float32)
        # The stream is repeated once, so that every window of a period is contiguous.
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
        if isinstance(piece.owner, LinearWeight) and piece.is_scale:
            target.fill_(piece.owner.dummy_scale())
            return
        if piece.quantise is not None:
            self._quantise(piece, target)
            return
        # A vector is treated as a matrix of one row.
        shape = piece.stored_shape
        width = shape[-1]
        columns = piece.stored_range if piece.stored_dim == len(shape) - 1 else slice(0, width)
        first_row = piece.start if piece.stored_dim < len(shape) - 1 else 0
        first_row += (piece.stored_index or 0) * (shape[0] if len(shape) == 2 else 1)
        scale = 0.02 if len(shape) == 1 else shape[0 if piece.is_transposed else 1] ** -0.5
        if target.dtype is torch.float8_e4m3fn:
            scale = 1.0  # there is a scale beside the weight
        offset = zlib.crc32(piece.name.encode()) + first_row * width
        self._fill_rows(target.view(-1, target.shape[-1]), offset, width, columns, self._noise_like(target, scale))

    def _quantise(self, piece: WeightPiece, target: Tensor) -> None:
        """Fill a weight that is quantised while it is loaded."""
        assert piece.quantise is not None
        rows, columns = target.shape
        plain = nn.Linear(columns, rows, bias=False, device=target.device, dtype=torch.bfloat16)
        same = WeightPiece(piece.name, piece.shape, plain, "weight", piece.dim, piece.start, piece.size, 0)
        self._fill_piece(same)
        piece.quantise(piece.target_start if piece.dim == 0 else 0, plain.weight.detach())

    def _fill_rows(self, target: Tensor, offset: int, width: int, columns: slice, noise: Tensor) -> None:
        """Fill `target` with `columns` of rows that are `width` wide, starting at element `offset` of the stream."""
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
            # Any bits are packed numbers: those of the noise, without signs and exponents.
            is_packed = target.dtype in (torch.int32, torch.uint8, torch.int8)
            noise = (self._noise * PERIOD).int() * -1640531535 if is_packed else self._noise * scale
            self._scaled[key] = noise.to(target.dtype).to(target.device)
        return self._scaled[key]
