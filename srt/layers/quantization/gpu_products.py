"""Which kernel multiplies a quantised weight on a GPU, by the number of rows. Importing this module imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from srt.kernels.build.pdl import has_pdl, pdl_for
from srt.kernels.gemm import block_gemm, fp8_gemm
from srt.kernels.gemm.fp8_gemm import WIDTH_UNIT
from srt.kernels.gemm.packed_gemm import MOST_ROWS, dequantise, packed_gemm
from srt.kernels.gemm.packed_matrix import PackedMatrix

_MOST_TILED_ROWS: Final = 512
"""Limit for e4m3 weights whose inputs stay as they are. With more rows it is cheaper to dequantise the weight once; not measured yet."""
MOST_TILED_ROWS_OF_4_BITS: Final = 128
"""The same for 4-bit weights. On an H200, 128 rows took 0.71 to 0.92 of the time of dequantising first, and 192 rows 1.09 to 1.18 of it."""
LARGE_SCALE: Final = 128.0
_FIRST_WITH_FP8: Final = (8, 9)


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """The product with one weight of e4m3 or 4-bit numbers.

    One row is multiplied as it is, even if the format quantises inputs: then reading the weight takes most of the time, and quantising
    would only cost accuracy. More rows are quantised if the format says so, with scales by blocks from 65 rows on. The rest is left to
    the plain path. On Hopper the streaming kernels take few rows in its place.
    """

    packed: Tensor  # [outputs, inputs] e4m3, or [outputs, inputs / 2] bytes of two 4-bit numbers in the order of `order_operands`
    scales: Tensor  # [groups, outputs]
    zeros: Tensor | None  # [groups, outputs] int16
    group_size: int
    quantises_inputs: bool = False
    input_scale: Tensor | None = None
    has_large_scales: bool = False
    """Whether a scale is at least `LARGE_SCALE`, with which a streamed product of blocks would overflow."""
    suits_block_gemm: bool = False

    @property
    def has_fp8_instructions(self) -> bool:
        return torch.cuda.get_device_capability(self.packed.device) >= _FIRST_WITH_FP8

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return x Wᵀ + b; None if the weight is to be dequantised for it."""
        if x.dtype not in (torch.bfloat16, torch.float16) or not len(x):
            return None
        in_fp8 = self.quantises_inputs and x.dtype is torch.bfloat16 and self.has_fp8_instructions
        if len(x) <= self._most_unquantised_rows(in_fp8):
            pdl = has_pdl(x.device) and bool(pdl_for(len(x)))
            scales, zeros = self.scales, self.zeros
            return packed_gemm(x.contiguous(), self.packed, scales, zeros, self.group_size, bias=bias, pdl=pdl)
        if not in_fp8:
            return None
        if self.suits_block_gemm and block_gemm.takes(x):
            product = block_gemm.block_gemm(x, self.packed, self.scales)
            return product if bias is None else product.add_(bias)
        if len(self.scales) > 1:
            return fp8_gemm.block_gemm(x, self.packed, self.scales, bias)
        return fp8_gemm.fp8_gemm(x, self.packed, self.scales, bias, self.input_scale) if self._suits_cublas else None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of 4-bit numbers as a matrix [outputs, inputs]."""
        return dequantise(self.packed, self.scales, self.zeros, self.group_size, dtype)

    @property
    def matrix(self) -> PackedMatrix | None:
        """The weight as streamed products read it; None if they cannot."""
        group = self.group_size if len(self.scales) > 1 or self.packed.dtype is torch.uint8 else 0
        rounds = self.quantises_inputs and self.input_scale is None and not group and self.has_fp8_instructions
        matrix = PackedMatrix(self.packed, self.scales, self.zeros, group, rounds, self.suits_block_gemm)
        return matrix if matrix.is_readable and not (group and self.has_large_scales) else None

    @property
    def _suits_cublas(self) -> bool:
        return not (self.packed.shape[0] % WIDTH_UNIT or self.packed.shape[1] % WIDTH_UNIT)

    def _most_unquantised_rows(self, in_fp8: bool) -> int:
        if not in_fp8:
            return MOST_TILED_ROWS_OF_4_BITS if self.packed.dtype is torch.uint8 else _MOST_TILED_ROWS
        return 1 if len(self.scales) == 1 and self._suits_cublas else MOST_ROWS
