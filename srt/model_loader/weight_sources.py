"""Where the weights of an update come from: the files of a folder, or tensors that a trainer has sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from srt.layers.weights import WeightPiece
from srt.model_loader.weight_copy import DTYPES, copy_weights, read_weights
from srt.utils.checkpoint import TensorHeader, read_headers

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class WeightSource(Protocol):
    """Tensors under their names in the checkpoint."""

    @property
    def place(self) -> Path:
        """What errors name."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]: ...

    def check(self, pieces: Sequence[WeightPiece], report: Callable[[], None]) -> None:
        """Read all that fills the pieces, and keep nothing of it; ModelError if it cannot be read."""

    def copy(self, pieces: Sequence[WeightPiece], device: torch.device, report: Callable[[], None]) -> None:
        """Fill the pieces, which are on `device`, and return when all are complete."""


class FolderSource:
    """The files of a folder; ModelError if they cannot be read."""

    def __init__(self, folder: str) -> None:
        self.place = Path(folder)
        self.headers: Mapping[str, TensorHeader] = read_headers(folder)

    def check(self, pieces: Sequence[WeightPiece], report: Callable[[], None]) -> None:
        read_weights(self.headers, pieces, lambda done, total: report())

    def copy(self, pieces: Sequence[WeightPiece], device: torch.device, report: Callable[[], None]) -> None:
        if device.type == "cuda":  # copies run on other streams, and must not meet what is still under way on this one
            torch.cuda.current_stream(device).synchronize()
        copy_weights(self.headers, pieces, device, lambda done, total: report())


class TensorSource:
    """Tensors in memory, on any device."""

    def __init__(self, tensors: Mapping[str, Tensor], place: str) -> None:
        self.place = Path(place)
        self._tensors = tensors
        self.headers: Mapping[str, TensorHeader] = {
            name: TensorHeader(name, _CODES[one.dtype], tuple(one.shape), self.place, 0, one.nbytes)
            for name, one in tensors.items()
        }

    def check(self, pieces: Sequence[WeightPiece], report: Callable[[], None]) -> None:
        """All of it is here."""

    def copy(self, pieces: Sequence[WeightPiece], device: torch.device, report: Callable[[], None]) -> None:
        for piece in pieces:
            if piece.size:
                _copy_piece(piece, self._tensors[piece.name], device)
                report()


def _copy_piece(piece: WeightPiece, stored: Tensor, device: torch.device) -> None:
    """Fill a piece from the whole tensor of the checkpoint. A vector or a number is treated as a matrix of one row."""
    shape = piece.stored_shape
    if piece.stored_index is not None:
        stored = stored[piece.stored_index]
    matrix = stored.reshape(shape if len(shape) == 2 else (1, math.prod(shape)))
    cuts_columns = len(shape) < 2 or piece.stored_dim == 1
    rows = matrix[:, piece.stored_range] if cuts_columns else matrix[piece.stored_range]
    rows = rows.to(device)
    if piece.quantise is not None:
        piece.quantise(0 if piece.dim == 1 else piece.target_start, rows)
        return
    target = piece.target()
    (target.view(1, -1) if len(shape) < 2 else target).copy_(rows)
