"""Weights of e4m3 or 4-bit numbers as `stream_gemm.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from srt.kernels.build.hopper import BLOCK_K


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the numbers of W are stored."""

    bits: int = 16  # 16: bfloat16; 8: e4m3
    group: int = 0  # inputs that share a scale; 0 if all of an output do (then bfloat16 has none)
    has_zeros: bool = False
    is_rounded: bool = False  # x has e4m3 numbers as well

    @property
    def is_converted(self) -> bool:
        """Whether numbers become bfloat16 in registers."""
        return self.bits < 16 and not self.is_rounded

    @property
    def x_blocks(self) -> int:
        """Number of lines of 128 bytes of x in a stage."""
        return 1 if self.is_rounded else self.stage_k // BLOCK_K

    @property
    def groups_of_stage(self) -> int:
        """Number of scales of an output in a stage."""
        return -(-self.stage_k // self.group) if self.group else 0

    def suits(self, k: int) -> bool:
        """Return whether k columns are whole stages, of which each begins and ends with a group of inputs or is within one."""
        has_whole_groups = not self.group or not self.stage_k % self.group or not self.group % self.stage_k
        return k % self.stage_k == 0 and self.group % 32 == 0 and has_whole_groups

    @property
    def stage_k(self) -> int:
        """Number of columns of W in a line of 128 bytes, which are a stage."""
        return BLOCK_K * 16 // self.bits

    def scale_bytes(self, w_rows: int, width: int) -> int:
        """Return the shared memory for the scales and zero points of a stage."""
        if not self.group:
            return 0
        items = self.groups_of_stage * width
        boxes = [items * (4 if self.bits == 8 else 2), items * 2 if self.has_zeros else 0]
        return -(-(w_rows // width) * sum(-(-box // 128) * 128 for box in boxes) // 1024) * 1024


BF16: Final = Numbers()
E4M3: Final = Numbers(8)
ROUNDED: Final = Numbers(8, is_rounded=True)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight of e4m3 or 4-bit numbers."""

    numbers: torch.Tensor  # [n, k] e4m3, or [n, k / 2] bytes in the order of `order_operands` (int_weight.py)
    scales: torch.Tensor  # [groups, n]: float32 beside e4m3, bfloat16 beside 4 bits
    zeros: torch.Tensor | None  # [groups, n] int16; None: all are 8
    group: int  # inputs that share a scale; 0 if all of an output do
    rounds_inputs: bool = False
    """Whether rows of x may be rounded to e4m3 by the largest of each."""
    rounds_groups: bool = False
    """Whether each 128 inputs of a row may be rounded to e4m3, and `block_gemm.py` knows the scales' layout."""

    @property
    def form(self) -> Numbers:
        return Numbers(8 if self.numbers.dtype is torch.float8_e4m3fn else 4, self.group, self.zeros is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        rows, line = self.numbers.shape
        return rows, line * 8 // self.form.bits

    @property
    def is_readable(self) -> bool:
        """Whether types and sizes are those that the kernel knows."""
        form = self.form
        has_types = self.scales.dtype is (torch.float32 if form.bits == 8 else torch.bfloat16)
        return has_types and self.shape[0] % 8 == 0 and form.suits(self.shape[1])
