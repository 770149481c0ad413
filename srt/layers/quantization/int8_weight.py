"""Weights of signed 8-bit integers with a scale for each output, whose inputs may be quantised likewise by token (W8A8).

They are read from the checkpoint, or made of its plain weights while these are loaded (`--quantization int8`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.quantization.weight import IntegerMatrix, LinearWeight, NumberForm, Place
from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError
from srt.utils.quantization import WeightFormat

LARGEST: Final = 127
_LEAST_SCALE: Final = 1e-12
"""Keeps the scale of zeros from being zero."""
_LEAST_ROWS: Final = 32
"""PyTorch's integer product on GPUs wants more than 16 rows: fewer are filled up with zeros."""
_WIDTH: Final = 8
"""What it wants the widths of matrices to be multiples of."""
_DUMMY_SIZE: Final = 74.0
"""The usual size of a random 8-bit number."""


class Int8Weight(LinearWeight):
    """A weight of signed 8-bit integers; inputs are quantised by their largest if the format says so."""

    def __init__(self, form: WeightFormat, num_outputs: int, num_inputs: int, places: Sequence[Place]) -> None:
        super().__init__()
        self.shape = num_outputs, num_inputs
        self._form = form
        self._path = places[0].path
        self.own_dtypes = {"values": torch.int8, "scales": torch.float32}
        self.values = nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(num_outputs, 1), requires_grad=False)
        """While loading as in the checkpoint; then [1, outputs]."""

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        for at in places:
            shape = (at.num_outputs, at.num_inputs)
            if self._form.layout == "plain":
                place = (at.dim, at.start, at.size, at.target_start, None, at.stored_index)
                stored = at.stored_shape(*shape)
                yield WeightPiece(f"{at.path}.weight", stored, self, "values", *place, quantise=self._quantise)
                continue
            yield WeightPiece(f"{at.path}.weight", shape, self, "values", at.dim, at.start, at.size, at.target_start)
            start, size = (at.start, at.size) if at.dim == 0 else (0, at.num_outputs)
            yield WeightPiece(
                f"{at.path}.weight_scale",
                (at.num_outputs, 1),
                self,
                "scales",
                0,
                start,
                size,
                at.target_start,
                is_scale=True,
            )

    def _quantise(self, first: int, rows: Tensor) -> None:
        """Store rows of an unquantised weight; `first` is the place of the first one."""
        values, scales = quantise_tokens(rows)
        self.values.detach()[first : first + len(rows)] = values
        self.scales.detach()[first : first + len(rows)] = scales

    def arrange(self) -> None:
        scales = self.scales.detach()
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise ModelError(
                f"The checkpoint has a scale of {self._path} that is negative or not finite: quantise the model anew."
            )
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)

    @property
    def integer_matrix(self) -> IntegerMatrix:
        return IntegerMatrix(self.values.detach(), self.scales.detach().view(-1), self._form.activations != "none")

    @property
    def number_form(self) -> NumberForm:
        return NumberForm("signed8", "values", "scales", self.shape[1])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a matrix."""
        return self.values.to(dtype).mul_(self.scales.t())

    def dummy_scale(self) -> float:
        return float(self.shape[1] ** -0.5) / _DUMMY_SIZE

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._form.activations == "none":
            return F.linear(x, self.dequantised(x.dtype), bias)
        numbers, scale = quantise_tokens(x)
        product = (self._product(numbers, x.dtype) * scale * self.scales).to(x.dtype)
        return product if bias is None else product + bias

    def _product(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of 8-bit integers. A CPU is faster with floating-point numbers, which hold them exactly."""
        if not self.values.is_cuda or self.shape[0] % _WIDTH or self.shape[1] % _WIDTH:
            if dtype is torch.float16:
                dtype = torch.float32  # sums of a few products are already beyond float16's range
            return F.linear(numbers.to(dtype), self.values.to(dtype))
        rows = len(numbers)
        if rows < _LEAST_ROWS:
            numbers = F.pad(numbers, (0, 0, 0, _LEAST_ROWS - rows))
        return torch._int_mm(numbers, self.values.t())[:rows]


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as 8-bit integers, and the scale [rows, 1] f32 by which the largest element of a row becomes 127."""
    scale = x.abs().amax(-1, keepdim=True).float().div_(LARGEST).clamp_min_(_LEAST_SCALE)
    return (x.float() / scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale
