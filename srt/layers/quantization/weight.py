"""The weight of a linear layer as an object that knows its checkpoint tensors and how to multiply, and the one of unpacked weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError

if TYPE_CHECKING:
    from srt.kernels.gemm.packed_matrix import PackedMatrix
    from srt.kernels.gemm.stream_arguments import Added


@dataclass(frozen=True, slots=True)
class Place:
    """One linear layer of the checkpoint, this rank's range of it, and the place of that range in a merged weight."""

    path: str
    """Path of the layer in the checkpoint: its tensors are named after it."""
    num_outputs: int
    num_inputs: int
    dim: int
    """What is split over the ranks: 0 the outputs, 1 the inputs."""
    start: int
    """First output or input of this rank."""
    size: int
    target_start: int = 0
    """First row of the range in this rank's weight; 0 if inputs are split."""
    stack: tuple[int, int] | None = None
    """(number of this layer, number of layers) if each tensor of the checkpoint stacks those of several layers."""
    takes_turns: bool = False
    """Whether the layer is two, of which one has the even outputs and the other the odd ones."""

    @property
    def stored_index(self) -> int | None:
        """Number of this layer in the checkpoint's tensors; None if they are this layer's alone."""
        return None if self.stack is None else self.stack[0]

    def stored_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor of which this layer has a part of the given shape."""
        return shape if self.stack is None else (self.stack[1], *shape)


class IntegerMatrix(NamedTuple):
    """A weight of signed 8-bit integers, and how its inputs are rounded."""

    numbers: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs] f32
    rounds_inputs: bool
    """Whether inputs become integers from -127 to 127 by the largest of their row. Else they stay as they are."""


class Float8Matrix(NamedTuple):
    """The weight as e4m3 numbers, and how its inputs are rounded to such numbers."""

    numbers: Tensor  # [outputs, inputs] e4m3
    scales: Tensor  # [groups, outputs] f32
    group_size: int
    """Inputs that share a scale."""
    rounded_inputs: int
    """Inputs that are rounded by the largest of them; 0: they stay as they are."""
    input_scale: Tensor | None
    """By which inputs are divided before they are rounded, [1, 1] f32; None: it is chosen by the largest."""


class ChangedMatrix(NamedTuple):
    """A plain matrix, and what LoRA adapters add to its products in the step that runs."""

    matrix: Tensor
    rank: int
    low: int
    """The rank times the number of merged layers."""
    added: Callable[[Tensor], Added]
    """Returns what is added to the products of these rows."""


NumberKind = Literal["e4m3", "mxfp4", "int4", "int8", "signed8"]


@dataclass(frozen=True, slots=True)
class NumberForm:
    """Where a quantised weight has what kernels read, as names of its parameters."""

    kind: NumberKind
    numbers: str
    """[outputs, inputs], or [outputs, inputs / 2] of two numbers a byte (int_weight.py)."""
    scales: str
    """[groups, outputs]."""
    group_size: int
    """Inputs that share a scale."""
    zeros: str | None = None
    """Zero points [groups, outputs] int16; None: all are the middle of the range."""
    rounds_inputs: bool = False
    """Whether inputs may be rounded to e4m3."""


class LinearWeight(nn.Module):
    """The weight [outputs, inputs] of a linear layer on this rank, stored in the form of one scheme."""

    shape: tuple[int, int]
    own_dtypes: Mapping[str, torch.dtype] = {}
    """Types of the parameters that do not have the model's."""
    _path: str
    """Path of the layer in the checkpoint, or of the first one that is merged."""

    @property
    def matrix(self) -> Tensor | None:
        """The weight as a plain matrix, which any kernel may read; None if it is stored in another form."""
        return None

    def multiply_gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return silu(first half) * second half of the product on a GPU; None if the caller is to do that with the product."""
        return None

    @property
    def changed(self) -> ChangedMatrix | None:
        """The weight as a plain matrix whose products adapters change in the step that runs; None if they do not."""
        return None

    @property
    def scaled_matrix(self) -> tuple[Tensor, Tensor] | None:
        """(e4m3 numbers, a factor f32 of each row), which kernels for one row may read; None if the weight is not stored so."""
        return None

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        """The numbers and their scales, which the streamed products on Hopper read; None if they cannot."""
        return None

    @property
    def integer_matrix(self) -> IntegerMatrix | None:
        """The weight as integers with a scale for each output, which a CPU's decode step reads; None if it is not stored so."""
        return None

    @property
    def float8_matrix(self) -> Float8Matrix | None:
        """The weight as e4m3 numbers with their scales, which a CPU's decode step reads; None if it is not stored so."""
        return None

    @property
    def number_form(self) -> NumberForm | None:
        """Where kernels find numbers and scales of the arranged weight; None if they cannot read it."""
        return None

    def dummy_scale(self) -> float:
        """Return the scale by which random stored numbers become weights of the usual size."""
        return 1.0

    @abstractmethod
    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        """Yield the parts of the checkpoint that fill this weight."""

    @property
    def factors(self) -> Mapping[str, Tensor]:
        """Loaded tensors that must be finite and not negative, by the end of their names. Loaders check those of all weights at once."""
        return {}

    def check_factors(self) -> None:
        """ModelError names the first tensor of `factors` that has a wrong number. Waits for the device."""
        for name, factors in self.factors.items():
            if not are_factors(factors):
                raise ModelError(
                    f"The checkpoint has a {name} of {self._path} that is negative or not finite: quantise the model anew."
                )

    def finish(self) -> None:
        """Make the weight ready to multiply. Called once, after loading."""
        self.arrange()
        self.choose_product()

    def restore(self) -> None:
        """Make the weight ready to multiply when its tensors were set to those of a weight that was ready already."""
        self.choose_product()

    def arrange(self) -> None:
        """Bring the loaded tensors into the form in which they are multiplied."""

    def choose_product(self) -> None:
        """Prepare a product that is faster than the plain path, if the device has one."""

    def unpacked(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the loaded and finished weight as a plain matrix: its product with ones on the diagonal."""
        ones = torch.eye(self.shape[1], dtype=dtype, device=device)
        return self.multiply(ones, None).t().contiguous()

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b."""


def are_factors(numbers: Tensor) -> bool:
    """Return whether all numbers are finite and not negative. Waits for the device once."""
    least, largest = torch.stack(numbers.aminmax()).tolist()
    return bool(least >= 0 and largest < math.inf)  # false if one of them is a NaN, too


class PlainWeight(LinearWeight):
    """A weight of the model's dtype."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.shape = num_outputs, num_inputs
        self.values = nn.Parameter(torch.empty(num_outputs, num_inputs), requires_grad=False)

    @classmethod
    def of(cls, matrix: Tensor) -> PlainWeight:
        """Return the weight whose matrix is given."""
        weight = cls(*matrix.shape)
        weight.values = nn.Parameter(matrix, requires_grad=False)
        return weight

    @property
    def matrix(self) -> Tensor:
        return self.values

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        for at in places:
            shape = (at.num_outputs, at.num_inputs)
            yield WeightPiece(f"{at.path}.weight", shape, self, "values", at.dim, at.start, at.size, at.target_start)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.values, bias)
