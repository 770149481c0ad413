"""Map parts of checkpoint tensors to parameters: layers declare the mapping, loaders carry it out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """A checkpoint layer within a merged one: this rank holds `size` of its `total` outputs, from `start` on."""

    name: str
    total: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A range, along one dimension, of a matrix or vector of a checkpoint, and its place in a parameter of this rank."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, which the checkpoint must match."""
    owner: nn.Module
    attribute: str
    """Name of the parameter in `owner`. It is looked up when it is written, because until then it may be on the meta device."""
    dim: int
    start: int
    """First index of the range in the checkpoint's tensor."""
    size: int
    target_start: int
    """First index of the range in the parameter."""
    index: int | None = None
    """Which of the matrices that the parameter stacks the range belongs to. None: the parameter is one matrix or vector."""
    stored_index: int | None = None
    """Which of the matrices that the checkpoint's tensor stacks the range is read from. None: the tensor is one matrix or vector."""
    step: int = field(default=1, kw_only=True)
    """Distance of neighbours of the range in the checkpoint's tensor."""
    is_transposed: bool = field(default=False, kw_only=True)
    """Whether rows and columns are swapped in the checkpoint. `dim` is a dimension of the parameter."""
    is_scale: bool = field(default=False, kw_only=True)
    """Whether the checkpoint's tensor may lack dimensions of 1."""
    is_optional: bool = field(default=False, kw_only=True)
    """Whether the checkpoint may lack the tensor; the range is then zero."""
    quantise: Callable[[int, Tensor], None] | None = field(default=None, kw_only=True)
    """Stores rows that are read, given the row of the parameter where the first one belongs; None: they are stored as they are."""

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.owner, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the matrix or vector in the checkpoint that the range is read from. What has more dimensions is a matrix of rows."""
        shape = self.shape if self.stored_index is None else self.shape[1:]
        return shape if len(shape) <= 2 else (shape[0], math.prod(shape[1:]))

    @property
    def stored_dim(self) -> int:
        """The dimension of the matrix or vector in the checkpoint along which the range is cut."""
        return 1 - self.dim if self.is_transposed else self.dim

    @property
    def stored_range(self) -> slice:
        """The range along that dimension."""
        return slice(self.start, self.start + self.size * self.step, self.step)

    @property
    def num_elements(self) -> int:
        shape = self.parameter.shape if self.index is None else self.parameter.shape[1:]
        return math.prod(shape) // shape[self.dim] * self.size

    def target(self) -> Tensor:
        """Return the view of the parameter that the range fills, with rows and columns as in the checkpoint."""
        parameter = self.parameter.detach()
        matrix = parameter if self.index is None else parameter[self.index]
        part = matrix.narrow(self.dim, self.target_start, self.size)
        return part.t() if self.is_transposed else part


class WeightedModule(nn.Module):
    """A module with parameters of its own, which knows their checkpoint tensors."""

    @abstractmethod
    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        """Yield the parts of the checkpoint that this rank needs; `path` is the module's path in the model."""

    def finish(self, dtype: torch.dtype, device: torch.device) -> None:
        """Bring what was loaded into the form that is used. Called once, after loading, when the weights inside are finished."""

    def take_finished_form(self) -> None:
        """Become, without memory, what `finish` makes of this module. Called instead of it, before finished tensors are set."""


def model_weight_pieces(model: nn.Module) -> list[WeightPiece]:
    """Return the pieces of every parameter of the model, in the order of its modules."""
    pieces = [
        piece
        for path, module in model.named_modules()
        if isinstance(module, WeightedModule)
        for piece in module.weight_pieces(path)
    ]
    written = {id(piece.parameter) for piece in pieces}
    # What quantises rows while they are read writes their scales too.
    written |= {id(scales) for piece in pieces if piece.quantise is not None for scales in piece.owner.parameters()}
    orphans = [name for name, parameter in model.named_parameters() if id(parameter) not in written]
    assert not orphans, f"no checkpoint tensor is named for {orphans}"
    return pieces
