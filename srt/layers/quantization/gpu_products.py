"""Which kernel multiplies a quantised weight on a GPU, by the number of rows. Importing this module imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from srt.kernels.build.pdl import has_pdl, pdl_for
from srt.kernels.gemm.fp8_gemm import block_gemm, fp8_gemm
from srt.kernels.gemm.packed_gemm import MOST_ROWS, packed_gemm

_MOST_TILED_ROWS: Final = 512
"""Limit for weights whose inputs stay as they are. With more rows it is cheaper to dequantise the weight once; not measured yet."""
_FIRST_WITH_FP8: Final = (8, 9)
_FP8_WIDTH: Final = 16
"""What cuBLASLt wants the widths of fp8 matrices to be multiples of."""


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """The product with one weight of e4m3 or 4-bit numbers.

    Few rows are multiplied as they are, even if the format quantises inputs: then reading the weight takes most of the time, and
    quantising would only cost accuracy. More rows are quantised if the format says so. The rest is left to the plain path.
    """

    packed: Tensor  # [outputs, inputs] e4m3, or [outputs, inputs / 2] bytes of two 4-bit numbers
    scales: Tensor  # [groups, outputs]
    zeros: Tensor | None  # [groups, outputs] int16
    group_size: int
    quantises_inputs: bool = False
    input_scale: Tensor | None = None

    @property
    def has_fp8_instructions(self) -> bool:
        return torch.cuda.get_device_capability(self.packed.device) >= _FIRST_WITH_FP8

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return x Wᵀ + b; None if the weight is to be dequantised for it."""
        if x.dtype not in (torch.bfloat16, torch.float16) or not len(x):
            return None
        in_fp8 = self.quantises_inputs and x.dtype is torch.bfloat16 and self.has_fp8_instructions
        if len(x) <= (MOST_ROWS if in_fp8 else _MOST_TILED_ROWS):
            pdl = has_pdl(x.device) and bool(pdl_for(len(x)))
            scales, zeros = self.scales, self.zeros
            return packed_gemm(x.contiguous(), self.packed, scales, zeros, self.group_size, bias=bias, pdl=pdl)
        if not in_fp8:
            return None
        if len(self.scales) > 1:
            return block_gemm(x, self.packed, self.scales, bias)
        if self.packed.shape[0] % _FP8_WIDTH or self.packed.shape[1] % _FP8_WIDTH:
            return None
        return fp8_gemm(x, self.packed, self.scales, bias, self.input_scale)
