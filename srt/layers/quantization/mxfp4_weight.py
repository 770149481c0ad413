"""Weights of 4-bit floating-point numbers (e2m1) in groups of 32 inputs, with a power of two for each group: MXFP4.

After loading a weight is bytes [outputs, inputs / 2] of two numbers, in the places that `pack_halves` (int_weight.py) gives them,
and the biased exponents of the groups' factors, [groups, outputs]: an exponent of 127 stands for the factor 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.quantization.int_weight import pack_halves, unpack_halves
from srt.layers.quantization.weight import LinearWeight, NumberForm, Place
from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError
from srt.utils.quantization import MXFP4_GROUP, WeightFormat

EXPONENT_BIAS: Final = 127
NOT_A_NUMBER: Final = 255
"""The exponent that stands for no factor."""
_BYTES: Final = MXFP4_GROUP // 2
_LARGEST: Final = 6.0  # of the 4-bit numbers
_MOVED_BIAS: Final = 2.0**126  # what the exponents of 4-bit numbers lack in the places of bfloat16's


class Mxfp4Weight(LinearWeight):
    """A weight in MXFP4. Inputs stay as they are."""

    def __init__(self, form: WeightFormat, num_outputs: int, num_inputs: int, places: Sequence[Place]) -> None:
        super().__init__()
        assert form.layout == "mxfp4" and len(places) == 1, (form, places)
        self.shape = num_outputs, num_inputs
        self._at = places[0]
        _check_cut(self._at)
        self.own_dtypes = {"packed": torch.uint8, "exponents": torch.uint8}
        self.packed = _parameter(torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8))
        """While loading as in the checkpoint, neighbours in one byte; then bytes as described above."""
        self.exponents = _parameter(torch.empty(num_outputs, num_inputs // MXFP4_GROUP, dtype=torch.uint8))
        """While loading as in the checkpoint; then [groups, outputs]."""

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        for at in places:
            groups = at.num_inputs // MXFP4_GROUP
            blocks = at.stored_shape(at.num_outputs, groups, _BYTES)
            scales = at.stored_shape(at.num_outputs, groups)
            start, size = at.start, at.size
            for name, shape, attribute, unit in (
                ("blocks", blocks, "packed", 2),
                ("scales", scales, "exponents", MXFP4_GROUP),
            ):
                place = (start, size) if at.dim == 0 else (start // unit, size // unit)
                yield WeightPiece(
                    f"{at.path}_{name}",
                    shape,
                    self,
                    attribute,
                    at.dim,
                    *place,
                    at.target_start,
                    None,
                    at.stored_index,
                    is_scale=name == "scales",
                )

    def arrange(self) -> None:
        packed, exponents = self.packed.detach(), self.exponents.detach()
        if bool((exponents == NOT_A_NUMBER).any()):
            raise ModelError(
                f"The checkpoint has a scale of {self._at.path} that is not a number: download or quantise the model anew."
            )
        if self._at.takes_turns:
            packed, exponents = (torch.cat((rows[::2], rows[1::2])) for rows in (packed, exponents))
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        self.packed = _parameter(pack_halves(numbers))
        self.exponents = _parameter(exponents.t().contiguous())

    @property
    def number_form(self) -> NumberForm:
        return NumberForm("mxfp4", "packed", "exponents", MXFP4_GROUP)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a matrix."""
        # A number's bits are the sign, two of the exponent and one of the fraction: each moves to its place in bfloat16.
        numbers = unpack_halves(self.packed).to(torch.int16)
        bits = ((numbers & 8) << 12) | ((numbers & 7) << 6)
        values = bits.view(torch.bfloat16).mul_(_MOVED_BIAS).to(dtype)
        factors = (
            self.exponents.int().bitwise_left_shift_(23).view(torch.float32)
        )  # an exponent of 0 stands for no more than 2**-127
        grouped = values.view(self.shape[0], -1, MXFP4_GROUP)
        return grouped.mul_(factors.t().to(dtype)[:, :, None]).view(self.shape)

    def dummy_scale(self) -> float:
        return float(EXPONENT_BIAS - round(torch.tensor(_LARGEST * self.shape[1] ** 0.5).log2().item()))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantised(x.dtype), bias)


def _check_cut(at: Place) -> None:
    if at.num_inputs % MXFP4_GROUP:
        raise ModelError(
            f"Groups of {MXFP4_GROUP} weights do not divide the {at.num_inputs} inputs of {at.path}: choose a checkpoint in"
            " another format."
        )
    if at.dim == 1 and (at.start % MXFP4_GROUP or at.size % MXFP4_GROUP):
        raise ModelError(
            f"--tp cuts a group of {MXFP4_GROUP} weights of {at.path}, which share a scale: choose a smaller --tp."
        )


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
