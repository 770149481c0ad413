"""Products of a step whose rows two ranks divide: this rank's rows are computed before the others have arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from srt.kernels.build.arrival import Arrival, LateRows
from srt.layers.kernel_ops import KernelOps
from srt.layers.ops import Affine, Norm, Stream
from srt.layers.quantization.weight import PlainWeight

ROWS, COLUMNS, OUTPUTS = 12, 16, 24


class Division:
    """Rows that arrive when they are awaited; until then they are NaN."""

    def __init__(self, x: torch.Tensor, own: slice, others: slice) -> None:
        self.own, self.others = own, others
        self.late = x[others].clone()
        self.normed = x.clone()
        self.normed[others] = torch.nan
        self.num_waits = 0

    def await_others(self) -> None:
        self.num_waits += 1
        self.normed[self.others] = self.late

    def late_rows(self) -> LateRows:
        self.num_waits += 1
        return LateRows(self.own, Arrival(number=7))


def divided(own: slice, others: slice) -> tuple[torch.Tensor, Division, Any]:
    x = torch.randn(ROWS, COLUMNS)
    division: Any = Division(x, own, others)
    return x, division, Stream(torch.zeros(ROWS, COLUMNS), normed=division.normed, division=division)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_waits_behind_this_ranks_rows(is_second: bool, has_bias: bool) -> None:
    halves = slice(0, 7), slice(7, ROWS)
    x, division, stream = divided(halves[is_second], halves[not is_second])
    weight, bias = torch.randn(OUTPUTS, COLUMNS), torch.randn(OUTPUTS) if has_bias else None
    norm = Norm(torch.ones(COLUMNS), 1e-5)
    product, hidden = KernelOps(torch.device("cpu")).linear_of_norm(stream, norm, Affine(PlainWeight.of(weight), bias))
    torch.testing.assert_close(product, torch.nn.functional.linear(x, weight, bias))
    assert hidden is stream.hidden and division.num_waits == 1


def test_the_kernel_of_gates_waits_by_itself() -> None:
    asked: list[LateRows] = []

    class Gemm:
        def tiles(self, x: torch.Tensor, weight: torch.Tensor) -> str:
            return "tiles"

        def multiply(self, x: torch.Tensor, weight: torch.Tensor, tiles: str, late: LateRows) -> torch.Tensor:
            asked.append(late)
            return x

    ops: Any = KernelOps(torch.device("cpu"))
    ops._gated_gemm = Gemm()
    _, division, stream = divided(slice(0, 7), slice(7, ROWS))
    affine = Affine(PlainWeight.of(torch.randn(2 * OUTPUTS, COLUMNS)), None)
    product, _ = ops.gated_linear_of_norm(stream, Norm(torch.ones(COLUMNS), 1e-5), affine)
    assert product is stream.normed and division.num_waits == 1
    assert [(late.own, late.arrival.number) for late in asked] == [(slice(0, 7), 7)]
