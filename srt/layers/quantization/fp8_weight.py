"""Weights of e4m3 numbers, with a scale for each output, or for each 128 inputs of an output.

A scale for a whole layer becomes one for each of its outputs, and those of blocks of 128 × 128 one for each output's part of the block.
So merged layers and any split over ranks are stored alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.quantization.cpu_products import from_e4m3
from srt.layers.quantization.weight import Float8Matrix, LinearWeight, NumberForm, Place
from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError
from srt.utils.quantization import FP8_BLOCK, WeightFormat

if TYPE_CHECKING:
    from srt.kernels.gemm.packed_matrix import PackedMatrix
    from srt.layers.quantization.gpu_products import PackedProduct

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(E4M3).max
LEAST_SCALE: Final = 1e-12
"""Keeps the scale of zeros from being zero."""


class Fp8Weight(LinearWeight):
    """A weight of e4m3 numbers; inputs are quantised likewise if the format says so."""

    def __init__(self, form: WeightFormat, num_outputs: int, num_inputs: int, places: Sequence[Place]) -> None:
        super().__init__()
        self.shape = num_outputs, num_inputs
        self._form = form
        self._path = places[0].path
        self.own_dtypes = {"values": E4M3, "scales": torch.float32, "input_scales": torch.float32}
        self.values = _empty(num_outputs, num_inputs, dtype=E4M3)
        self.scales = _empty(*self._scales_shape(places))
        """While loading as in the checkpoint, or [outputs, 1]; then [1, outputs], or [blocks of inputs, outputs]."""
        is_static = form.activations == "static"
        self.input_scales = _empty(len(places)) if is_static else None
        """While loading one of each merged layer; then the largest."""
        self._rows = [(at.start if at.dim == 0 else 0, at.size if at.dim == 0 else num_outputs) for at in places]
        """First row in the checkpoint and number of rows of each merged layer."""
        self._product: PackedProduct | None = None

    def _scales_shape(self, places: Sequence[Place]) -> tuple[int, ...]:
        match self._form.scales:
            case "tensor":
                return (len(places),)
            case "block":
                return sum(_blocks_of_outputs(at)[1] for at in places), -(-self.shape[1] // FP8_BLOCK)
            case _:
                return (self.shape[0], 1)

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        first_block = 0
        for index, at in enumerate(places):
            yield self._values_piece(at)
            if self._form.layout == "plain":
                continue
            name = f"{at.path}.{self._scales_name}"
            match self._form.scales:
                case "tensor":
                    yield WeightPiece(name, (1,), self, "scales", 0, 0, 1, index, is_scale=True)
                case "block":
                    yield self._block_piece(name, at, first_block)
                    first_block += _blocks_of_outputs(at)[1]
                case _:
                    start, size = (at.start, at.size) if at.dim == 0 else (0, at.num_outputs)
                    shape = (at.num_outputs, 1)
                    yield WeightPiece(name, shape, self, "scales", 0, start, size, at.target_start, is_scale=True)
            if self.input_scales is not None:
                name = f"{at.path}.input_scale"
                yield WeightPiece(name, (1,), self, "input_scales", 0, 0, 1, index, is_scale=True)

    def _values_piece(self, at: Place) -> WeightPiece:
        shape = at.stored_shape(at.num_outputs, at.num_inputs)
        place = (at.dim, at.start, at.size, at.target_start, None, at.stored_index)
        quantise = self._quantise if self._form.layout == "plain" else None
        return WeightPiece(f"{at.path}.weight", shape, self, "values", *place, quantise=quantise)

    def _quantise(self, first: int, rows: Tensor) -> None:
        """Store rows of an unquantised weight; `first` is the place of the first one."""
        values, scales = quantise_rows(rows)
        self.values.detach()[first : first + len(rows)] = values
        self.scales.detach()[first : first + len(rows)] = scales

    def dummy_scale(self) -> float:
        return float(self.shape[1] ** -0.5)

    @property
    def _scales_name(self) -> str:
        return "weight_scale_inv" if self._form.layout == "fp8" and self._form.scales == "block" else "weight_scale"

    def _block_piece(self, name: str, at: Place, first_block: int) -> WeightPiece:
        shape = (-(-at.num_outputs // FP8_BLOCK), -(-at.num_inputs // FP8_BLOCK))
        if at.dim == 0:
            start, size = _blocks_of_outputs(at)
            return WeightPiece(name, shape, self, "scales", 0, start, size, first_block, is_scale=True)
        if at.start % FP8_BLOCK or (at.size % FP8_BLOCK and at.size != at.num_inputs):
            raise ModelError(
                f"--tp cuts a block of {FP8_BLOCK} inputs of {at.path}, which share a scale: choose a --tp that divides its"
                f" {at.num_inputs} inputs into multiples of {FP8_BLOCK}."
            )
        start, size = at.start // FP8_BLOCK, -(-at.size // FP8_BLOCK)
        return WeightPiece(name, shape, self, "scales", 1, start, size, 0, is_scale=True)

    @property
    def factors(self) -> Mapping[str, Tensor]:
        loaded = {"scale": self.scales.detach()}
        return loaded if self.input_scales is None else {**loaded, "input_scale": self.input_scales.detach()}

    def arrange(self) -> None:
        scales = self.scales.detach()
        match self._form.scales:
            case "tensor":
                parts = [scales[part].expand(count, 1) for part, (_, count) in enumerate(self._rows)]
                scales = torch.cat(parts)
            case "block":
                scales = self._by_output(scales)
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)
        if self.input_scales is not None:
            self.input_scales = nn.Parameter(self.input_scales.detach().max().view(1, 1), requires_grad=False)

    def choose_product(self) -> None:
        if self.values.is_cuda:
            self._product = self._gpu_product()

    @property
    def scaled_matrix(self) -> tuple[Tensor, Tensor] | None:
        if self._product is None or not self._product.has_fp8_instructions or len(self.scales) > 1:
            return None
        return self._product.packed, self._product.scales

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        return None if self._product is None else self._product.matrix

    @property
    def float8_matrix(self) -> Float8Matrix:
        rounded = {"none": 0, "group": FP8_BLOCK}.get(self._form.activations, self.shape[1])
        input_scale = None if self.input_scales is None else self.input_scales.detach()
        return Float8Matrix(self.values.detach(), self.scales.detach(), self._group_size, rounded, input_scale)

    @property
    def number_form(self) -> NumberForm:
        rounds_inputs = self._form.activations != "none"
        return NumberForm("e4m3", "values", "scales", self._group_size, rounds_inputs=rounds_inputs)

    @property
    def _group_size(self) -> int:
        return FP8_BLOCK if self._form.scales == "block" else self.shape[1]

    def _gpu_product(self) -> PackedProduct:
        # Imported here because Triton is installed only with PyTorch for CUDA.
        from srt.kernels.gemm.block_gemm import suits
        from srt.layers.quantization.gpu_products import LARGE_SCALE, PackedProduct

        values, scales, rounds = self.values.detach(), self.scales.detach(), self._form.activations != "none"
        return PackedProduct(
            packed=values,
            scales=scales,
            zeros=None,
            group_size=self._group_size,
            quantises_inputs=rounds,
            input_scale=None if self.input_scales is None else self.input_scales.detach(),
            has_large_scales=len(scales) > 1 and bool(scales.max() >= LARGE_SCALE),
            suits_block_gemm=rounds and self._form.scales == "block" and suits(values, scales),
        )

    def _by_output(self, blocks: Tensor) -> Tensor:
        """Return the scales of all outputs; `blocks` has a row for each 128 outputs of each merged layer."""
        parts, first = [], 0
        for start, count in self._rows:
            offset = start % FP8_BLOCK
            num_blocks = -(-(offset + count) // FP8_BLOCK)
            rows = blocks[first : first + num_blocks].repeat_interleave(FP8_BLOCK, dim=0)
            parts.append(rows[offset : offset + count])
            first += num_blocks
        return torch.cat(parts)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a matrix."""
        values = from_e4m3(self.values, dtype)
        if len(self.scales) == 1:
            return values.mul_(self.scales.t())
        return values.mul_(self.scales.t().to(dtype).repeat_interleave(FP8_BLOCK, dim=1)[:, : self.shape[1]])

    def unpacked(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.dequantised(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = None if self._product is None else self._product(x, bias)
        return self._plain_product(x, bias) if product is None else product

    def _plain_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        match self._form.activations:
            case "none":
                return F.linear(x, self.dequantised(x.dtype), bias)
            case "group":
                return F.linear(rounded_groups(x), self.dequantised(x.dtype), bias)
        # e4m3 numbers are exact in every dtype, so both scales are applied to the product.
        scale = token_scales(x) if self.input_scales is None else self.input_scales
        product = F.linear(from_e4m3(quantised(x, scale), x.dtype), from_e4m3(self.values, x.dtype))
        product = (product * scale * self.scales).to(x.dtype)
        return product if bias is None else product + bias


def token_scales(x: Tensor) -> Tensor:
    """Return a scale [rows, 1] f32 for each row, by which its largest element becomes the largest e4m3 number."""
    return x.abs().amax(-1, keepdim=True).float().div_(LARGEST).clamp_min_(LEAST_SCALE)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale as e4m3 numbers; what is too large becomes the largest."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(E4M3)


def rounded_groups(x: Tensor) -> Tensor:
    """Return x after quantising each 128 inputs of a row by their largest, as the numbers that they stand for."""
    rows, width = x.shape
    groups = F.pad(x, (0, -width % FP8_BLOCK)).view(-1, FP8_BLOCK)
    scale = token_scales(groups)
    return (from_e4m3(quantised(groups, scale), torch.float32) * scale).to(x.dtype).view(rows, -1)[:, :width]


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 numbers, a scale [rows, 1] f32 for each row)."""
    scale = token_scales(rows)
    return quantised(rows, scale), scale


def _blocks_of_outputs(at: Place) -> tuple[int, int]:
    """Return the first block of outputs that this rank needs, and how many it needs."""
    if at.dim == 1:
        return 0, -(-at.num_outputs // FP8_BLOCK)
    first = at.start // FP8_BLOCK
    return first, -(-(at.start + at.size) // FP8_BLOCK) - first


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
