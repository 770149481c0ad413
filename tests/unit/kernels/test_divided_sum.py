"""That the kernel which finishes divided rows compiles, and which rows it takes. What it computes: tests/gpu."""

from __future__ import annotations

import ctypes

import pytest
import torch

from srt.kernels.build.arrival import Arrival
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.collectives.divided_sum import DividedKernel, _Rows, is_divisible


@pytest.mark.parametrize(
    "kernel",
    [
        DividedKernel(torch.bfloat16, 1),
        DividedKernel(torch.float16, 2),
        DividedKernel(torch.float32, 4),
        DividedKernel(torch.bfloat16, 1, only_waits=True),
    ],
)
def test_it_compiles_for_hopper(kernel: DividedKernel) -> None:
    assert compile_source(kernel.source, kernel.constants, ARCHITECTURE).startswith(b"\x7fELF")


def test_the_kernels_structures_have_no_holes_but_at_their_ends() -> None:
    assert ctypes.sizeof(Arrival) == 4 * 8 + 4 + 4
    assert ctypes.sizeof(_Rows) == 5 * 8 + 2 * 4 + 4 + 4


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "fits"),
    [
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 16384, True),
        (torch.bfloat16, 16400, False),
        (torch.float32, 4104, False),
        (torch.float64, 4096, False),
    ],
)
def test_rows_that_a_program_holds_are_divided(dtype: torch.dtype, row_bytes: int, fits: bool) -> None:
    assert is_divisible(dtype, row_bytes) is fits
