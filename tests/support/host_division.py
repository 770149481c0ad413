"""Two ranks of a test that divide the rows of a step, without GPUs. They send through their group, and what must not be read is NaN."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.row_division import RowDivision


class HostDivision:
    """Does what RowDivision does, but sums, norms and copies by PyTorch."""

    def __init__(self, tp: TensorParallel, num_rows: int, columns: int, dtype: torch.dtype) -> None:
        middle = num_rows * 3 // 5
        halves = slice(0, middle), slice(middle, num_rows)
        self.own, self.others = halves[tp.rank], halves[1 - tp.rank]
        self.num_sums = self.num_waits = 0
        self._tp = tp
        self._part_there = torch.empty(self.others.stop - self.others.start, columns, dtype=dtype)
        self._normed = torch.empty(num_rows, columns, dtype=dtype)
        self._arriving = self._normed

    def begin_sum(self) -> torch.Tensor:
        assert self.num_waits == self.num_sums, "norms of the last sum were not awaited"
        self.num_sums += 1
        return self._part_there.fill_(torch.nan)

    def send_part(self) -> None:
        self._sent = self._exchange(self._part_there, self.own)

    def finish_sum(self, part: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        total = hidden[self.own] + (part + self._sent)
        hidden.fill_(torch.nan)
        hidden[self.own] = total
        self._normed.fill_(torch.nan)
        self._normed[self.own] = F.rms_norm(total, weight.shape, weight, eps)
        self._arriving = self._exchange(self._normed[self.own], self.others)
        return self._normed

    def await_others(self) -> None:
        self.num_waits += 1
        self._normed[self.others] = self._arriving

    zero_others = RowDivision.zero_others

    def _exchange(self, sent: torch.Tensor, received: slice) -> torch.Tensor:
        """Send rows to the other rank, and return its rows."""
        room = max(self.own.stop - self.own.start, self.others.stop - self.others.start)
        padded = F.pad(sent, (0, 0, 0, room - len(sent)))
        both = self._tp._gather(padded)
        return both[1 - self._tp.rank, : received.stop - received.start].clone()


def divide_from(tp: TensorParallel, fewest: int) -> list[HostDivision]:
    """Let steps of so many rows or more be divided. Returns the divisions, which grow as steps run."""
    made: list[HostDivision] = []

    def divide(num_rows: int, columns: int, dtype: torch.dtype) -> Any:
        if num_rows < fewest:
            return None
        made.append(HostDivision(tp, num_rows, columns, dtype))
        return made[-1]

    cast("Any", tp).divide = divide
    return made
