"""Weights of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs of an output.

Whatever the checkpoint's layout (pack-quantized, GPTQ, AWQ), the weight is stored in one way after loading. 8-bit numbers are bytes
[outputs, inputs]. 4-bit numbers are bytes [outputs, inputs / 2]: of each 32 inputs, byte i has input i in its low half and input
16 + i in its high half. Linear layers on a GPU have the same bytes in another order (`order_operands`); experts there do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.quantization.cpu_products import GROUP_SIZES, OUTPUT_UNIT, Int4Product
from srt.layers.quantization.weight import LinearWeight, NumberForm, Place
from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError
from srt.utils.quantization import LEAST_GROUP, WeightFormat

if TYPE_CHECKING:
    from srt.kernels.gemm.packed_matrix import PackedMatrix
    from srt.layers.quantization.gpu_products import PackedProduct

WORD_BITS: Final = 32
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which 4 bits of a word of an AWQ checkpoint hold output i of 8."""

Axis = Literal["outputs", "output_words", "inputs", "input_words", "groups"]
"""What a dimension of a checkpoint's tensor counts. A word is 32 bits with several outputs or inputs."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a checkpoint's layer."""

    name: str
    attribute: str
    axes: tuple[Axis, Axis]


_LAYOUTS: Final = {
    "compressed": (
        _Stored("weight_packed", "packed", ("outputs", "input_words")),
        _Stored("weight_scale", "scales", ("outputs", "groups")),
        _Stored("weight_zero_point", "zeros", ("output_words", "groups")),
    ),
    "gptq": (
        _Stored("qweight", "packed", ("input_words", "outputs")),
        _Stored("scales", "scales", ("groups", "outputs")),
        _Stored("qzeros", "zeros", ("groups", "output_words")),
    ),
    "awq": (
        _Stored("qweight", "packed", ("inputs", "output_words")),
        _Stored("scales", "scales", ("groups", "outputs")),
        _Stored("qzeros", "zeros", ("groups", "output_words")),
    ),
}
_ORDER_NAMES: Final = {"compressed": "weight_g_idx", "gptq": "g_idx"}


class IntWeight(LinearWeight):
    """A weight of unsigned integers: (integer - zero point) * scale."""

    def __init__(self, form: WeightFormat, num_outputs: int, num_inputs: int, places: Sequence[Place]) -> None:
        super().__init__()
        self.shape = num_outputs, num_inputs
        self.num_bits = form.num_bits
        self._form, self._path, self._num_parts = form, places[0].path, len(places)
        self._all_inputs = places[0].num_inputs
        self._first_input = places[0].start if places[0].dim == 1 else 0
        self.group_size = form.group_size or self._all_inputs
        """Inputs that share a scale."""
        self._per_word = WORD_BITS // form.num_bits
        self._check_cuts(places)
        stored = [one for one in _LAYOUTS[form.layout] if form.has_zeros or one.attribute != "zeros"]
        self._stored = stored
        shapes = {
            one.attribute: tuple(self._length(axis, num_outputs, num_inputs, self._has_all_groups) for axis in one.axes)
            for one in stored
        }
        self.own_dtypes = {"packed": torch.int32, "zeros": torch.int32, "group_of": torch.int32}
        self.packed = _empty(shapes["packed"], torch.int32)
        """While loading as in the checkpoint; then bytes as described above."""
        self.scales = _empty(shapes["scales"], torch.float32)
        """While loading as in the checkpoint; then [groups, outputs]. Of the model's dtype."""
        self.zeros = _empty(shapes["zeros"], torch.int32) if form.has_zeros else None
        """While loading as in the checkpoint; then [groups, outputs] int16. None: every zero point is the middle of the range."""
        self.group_of: nn.Parameter | None = (
            _empty((len(places) * num_inputs,), torch.int32) if form.has_order else None
        )
        """While loading the group of each input, for each merged layer; then [inputs], or None if groups follow each other."""
        self.order: nn.Parameter | None = None
        """Which input stands at each place [inputs] int64, if inputs were sorted by group."""
        self._product: PackedProduct | Int4Product | None = None

    @property
    def _has_all_groups(self) -> bool:
        """Whether this rank has the scales of all groups, even if it has only some inputs."""
        return self._form.has_order or self._form.group_size is None

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << (self.num_bits - 1)

    def _length(self, axis: Axis, num_outputs: int, num_inputs: int, has_all_groups: bool = False) -> int:
        if axis == "groups":
            return -(-(self._all_inputs if has_all_groups else num_inputs) // self.group_size)
        count = num_outputs if axis.startswith("output") else num_inputs
        return count // self._per_word if axis.endswith("words") else count

    def _check_cuts(self, places: Sequence[Place]) -> None:
        group = self.group_size
        for at in places:
            if at.num_inputs % group or at.num_inputs % LEAST_GROUP or at.num_outputs % self._per_word:
                raise ModelError(
                    f"Groups of {group} weights do not divide the {at.num_inputs} inputs of {at.path}, or words of"
                    f" {self._per_word} its {at.num_outputs} outputs: choose a checkpoint with another group_size."
                )
            unit = self._per_word if at.dim == 0 else LEAST_GROUP if self._has_all_groups else group
            if at.start % unit or at.size % unit:
                raise ModelError(
                    f"--tp cuts a group of {unit} weights of {at.path}, which are stored together: choose a smaller --tp."
                )

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        for index, at in enumerate(places):
            for one in self._stored:
                shape = tuple(self._length(axis, at.num_outputs, at.num_inputs) for axis in one.axes)
                is_split = [axis.startswith("output") == (at.dim == 0) for axis in one.axes]
                dim = is_split.index(True)
                start, size, target_start = (
                    self._count(one.axes[dim], n) for n in (at.start, at.size, at.target_start)
                )
                if one.axes[dim] == "groups" and self._has_all_groups:
                    start, size = 0, shape[dim]
                yield WeightPiece(
                    f"{at.path}.{one.name}",
                    shape,
                    self,
                    one.attribute,
                    dim,
                    start,
                    size,
                    target_start,
                    is_scale=one.attribute == "scales",
                )
            if self.group_of is not None:
                start, size = (at.start, at.size) if at.dim == 1 else (0, at.num_inputs)
                name = f"{at.path}.{_ORDER_NAMES[self._form.layout]}"
                yield WeightPiece(
                    name, (at.num_inputs,), self, "group_of", 0, start, size, index * size, is_optional=True
                )

    def _count(self, axis: Axis, number: int) -> int:
        """Return in units of the axis a number of outputs or inputs."""
        return number // self.group_size if axis == "groups" else self._length(axis, number, number)

    def arrange(self) -> None:
        self._check_scales()
        is_transposed = self._form.layout != "compressed"
        scales = self.scales.detach().t() if is_transposed else self.scales.detach()
        numbers = self._unpacked()
        zeros = None if self.zeros is None else self._unpacked_zeros()
        group_of = self._group_of()
        if group_of is not None:
            order = torch.argsort(group_of, stable=True)
            counts = torch.bincount(group_of, minlength=scales.shape[1])
            present = counts > 0
            if bool((counts[present] == self.group_size).all()):
                in_order = torch.arange(len(order), device=order.device)
                if not torch.equal(order, in_order):
                    numbers, self.order = numbers[:, order], _parameter(order)
                scales, zeros = scales[:, present], None if zeros is None else zeros[:, present]
                group_of = None
        self.packed = _parameter((pack_halves(numbers) if self.num_bits == 4 else numbers).contiguous())
        self.scales = _parameter(scales.t().contiguous())
        is_symmetric = zeros is None or bool((zeros == self.middle).all())
        self.zeros = None if is_symmetric or zeros is None else _parameter(zeros.t().to(torch.int16).contiguous())
        self.group_of = None if group_of is None else _parameter(group_of)

    def finish(self) -> None:
        self.arrange()
        if self._runs_on_gpu_as_packed:
            self.packed = _parameter(order_operands(self.packed.detach()))
        self.choose_product()

    def choose_product(self) -> None:
        if self._runs_on_gpu_as_packed:
            self._product = self._gpu_product()
        if self._runs_on_cpu_as_packed:
            self._product = self._cpu_product()

    def restore(self) -> None:
        if self.is_repacked:
            self._product = Int4Product(self.packed.detach(), self.scales.detach(), self.group_size)
        else:
            self.choose_product()

    @property
    def is_repacked(self) -> bool:
        """Whether the weight exists only in PyTorch's layout, which depends on the CPU."""
        return self.scales.dim() > 2

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        if self.order is not None or self._product is None or isinstance(self._product, Int4Product):
            return None
        return self._product.matrix

    @property
    def number_form(self) -> NumberForm | None:
        if self.group_of is not None or self.order is not None:
            return None  # inputs of a group are not neighbours
        zeros = None if self.zeros is None else "zeros"
        return NumberForm(
            "int4" if self.num_bits == 4 else "int8", "packed", "scales", self._num_inputs_of_group, zeros
        )

    @property
    def _num_inputs_of_group(self) -> int:
        return self.shape[1] // len(self.scales)

    @property
    def _runs_on_gpu_as_packed(self) -> bool:
        """Whether a GPU's kernels read this weight, in the order of operands."""
        return self.packed.is_cuda and self.num_bits == 4 and self.group_of is None

    @property
    def _runs_on_cpu_as_packed(self) -> bool:
        """Whether PyTorch has a product for this weight."""
        is_cpu_bf16 = self.packed.device.type == "cpu" and self.scales.dtype is torch.bfloat16
        is_regular = self.num_bits == 4 and self.group_of is None and self.group_size in GROUP_SIZES
        return is_cpu_bf16 and is_regular and self.shape[0] % OUTPUT_UNIT == 0

    def _cpu_product(self) -> Int4Product:
        """Repack the weight, which then exists in PyTorch's layout only."""
        zeros = None if self.zeros is None else self.zeros.detach()
        numbers = unpack_halves(self.packed.detach())
        product = Int4Product.of(numbers, self.scales.detach(), zeros, self.group_size)
        self.packed, self.scales = _parameter(product.packed), _parameter(product.scales_and_zeros)
        self.zeros = None
        return product

    def _gpu_product(self) -> PackedProduct:
        # Imported here because Triton is installed only with PyTorch for CUDA.
        from srt.layers.quantization.gpu_products import PackedProduct

        zeros = None if self.zeros is None else self.zeros.detach()
        group_size = min(self.group_size, self.shape[1])
        return PackedProduct(self.packed.detach(), self.scales.detach(), zeros, group_size)

    def _check_scales(self) -> None:
        if not bool(torch.isfinite(self.scales).all()):
            raise ModelError(f"The checkpoint has a scale of {self._path} that is not finite: quantise the model anew.")

    def _unpacked(self) -> Tensor:
        """Return the numbers [outputs, inputs] uint8."""
        words = self.packed.detach()
        match self._form.layout:
            case "compressed":
                return unpack_words(words, self.num_bits)
            case "gptq":
                return unpack_words(words.t(), self.num_bits)
            case _:
                return unpack_words(words, self.num_bits, AWQ_ORDER).t()

    def _unpacked_zeros(self) -> Tensor:
        """Return the zero points [outputs, groups]."""
        assert self.zeros is not None
        words = self.zeros.detach()
        order = AWQ_ORDER if self._form.layout == "awq" else None
        words = words.t() if self._form.layout == "compressed" else words
        return unpack_words(words, self.num_bits, order).t().to(torch.int32) + self._form.zero_offset

    def _group_of(self) -> Tensor | None:
        """Return the group of each input [inputs] int64; None if all scales are for this rank's inputs, in their order."""
        if self.group_of is None or self.group_size == self._all_inputs:
            return None
        of_parts = self.group_of.detach().view(self._num_parts, -1).long()
        if not bool((of_parts == of_parts[0]).all()):
            raise ModelError(
                f"{self._path} and the layers beside it order their inputs differently (act-order): choose a checkpoint"
                " without desc_act."
            )
        found = of_parts[0]
        if not bool(((found >= 0) & (found < self._all_inputs // self.group_size)).all()):
            raise ModelError(f"The checkpoint has an input of {self._path} in a group that does not exist.")
        if bool(found.any()):
            return found
        # The checkpoint does not have the tensor, so the groups follow each other.
        return (torch.arange(self.shape[1], device=found.device) + self._first_input) // self.group_size

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a matrix; its columns are in the stored order of inputs."""
        if self._product is not None and not isinstance(self._product, Int4Product):
            return self._product.dequantised(dtype)
        numbers = unpack_halves(self.packed) if self.num_bits == 4 else self.packed
        values = numbers.to(dtype)
        if self.group_of is not None:
            groups = self.group_of
            values -= self.middle if self.zeros is None else self.zeros[groups].t().to(dtype)
            return values.mul_(self.scales[groups].t().to(dtype))
        grouped = values.view(self.shape[0], len(self.scales), -1)
        grouped -= self.middle if self.zeros is None else self.zeros.t()[:, :, None].to(dtype)
        return grouped.mul_(self.scales.t()[:, :, None].to(dtype)).view(self.shape)

    def dummy_scale(self) -> float:
        return 0.2 * float(self._all_inputs**-0.5)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self.ordered(x)
        product = None if self._product is None else self._product(x, bias)
        return F.linear(x, self.dequantised(x.dtype), bias) if product is None else product

    def ordered(self, x: Tensor) -> Tensor:
        """Return x with its columns in the stored order of inputs."""
        return x if self.order is None else x[:, self.order]


def unpack_words(words: Tensor, num_bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the numbers [rows, columns] uint8 in words [rows, columns / numbers in a word] int32.

    `order` says which bits of a word hold number i; without it the lowest bits hold the first number.
    """
    places = range(WORD_BITS // num_bits) if order is None else order
    parts = [(words >> (num_bits * place)).bitwise_and_((1 << num_bits) - 1).to(torch.uint8) for place in places]
    return torch.stack(parts, dim=-1).flatten(-2)


def pack_halves(numbers: Tensor) -> Tensor:
    """Return 4-bit numbers [rows, columns] as bytes [rows, columns / 2], in the layout described above."""
    rows, columns = numbers.shape
    halves = numbers.reshape(rows, columns // LEAST_GROUP, 2, LEAST_GROUP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, -1)


def unpack_halves(packed: Tensor) -> Tensor:
    """Return the numbers [rows, columns] of bytes that `pack_halves` has packed."""
    halves = packed.view(len(packed), -1, 1, LEAST_GROUP // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).view(len(packed), -1)


def order_operands(packed: Tensor) -> Tensor:
    """Return the bytes that `pack_halves` has packed in the order in which tensor cores need them.

    A lane of the tensor cores multiplies columns c and c + 1, and 8 + c and 9 + c, of each 16. So bytes i and 8 + i of each 16 are put
    beside each other, and what a lane needs of 32 columns is one word: the same four bits of its halves are a pair of neighbours.
    """
    return packed.view(len(packed), -1, 2, LEAST_GROUP // 4).transpose(2, 3).reshape(packed.shape)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype), requires_grad=False)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
