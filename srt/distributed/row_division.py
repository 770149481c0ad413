"""Divide the rows of a large step between two ranks of one host, so that they exchange data while products run. Imports Triton.

Of a row-parallel product each rank first computes the other's rows. A copy engine sends them while it computes its own. Then it finishes
the sums of its own rows, adds the residual stream and norms them (divided_sum.cu). The copy engine sends these norms while the next
product computes the same rows; that product waits for the other's norms before it computes their rows. So every byte is sent while
products run, and each rank norms half of the rows and keeps the residual stream of these alone.

The memory of a rank, which the other one writes:

    numbers    two words: the number of the last sum whose parts have arrived, and of the last one whose norms have
    box        the other's parts of this rank's rows
    norms      of all rows: this rank writes its own, the other the rest, in whose place are this rank's parts until they arrive

Every sum uses the same memory, and no place is written before what it had was read and copied. For ranks r and q and sum n of a step:

    r sends parts of sum n + 1 to q's box behind its wait for q's norms of sum n, which q sent after it had read the box
    r computes these parts, in place of q's norms of sum n, behind the products that read the norms
    q sends norms of sum n to that place after it has received r's parts of sum n, whose copy has then ended
    r norms sum n + 1 behind its wait for q's parts of that sum, which q computed behind its wait for r's norms of sum n, whose copy has
    then ended

The next step may have other halves, so a step begins behind all copies of the one before.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from srt.distributed.mapped_memory import view_of
from srt.kernels.build.arrival import Arrival, LateRows
from srt.kernels.build.cuda_source import checked, cuda
from srt.kernels.build.hopper import runs_on
from srt.kernels.build.precompile import is_precompiling
from srt.kernels.collectives.divided_sum import (
    MOST_ROW_BYTES,
    DividedKernel,
    await_arrival,
    finish_rows,
    is_divisible,
)

FEWEST_ROWS: Final = 2048
"""With fewer rows halves have few tiles. Models may ask for more."""
ROW_UNIT: Final = 256
"""Rows of the highest tile of a product: a rank has whole tiles, but for the last rows."""
_PARTS, _NORMS, _BOX = 0, 128, 256  # offsets in a rank's memory


def box_bytes(most_bytes: int) -> int:
    """Return the size of the box for parts of hidden states of up to `most_bytes`: for half of the rows, rounded up."""
    return -(-most_bytes // 2) + ROW_UNIT * MOST_ROW_BYTES


def memory_bytes(most_bytes: int) -> int:
    """Return the size of a rank's memory for hidden states of up to `most_bytes`."""
    return _BOX + box_bytes(most_bytes) + most_bytes if most_bytes else 0


def can_divide(device: torch.device) -> bool:
    """Return whether the kernels run on the device, and its streams can write numbers of 64 bits."""
    if not runs_on(device, DividedKernel(torch.bfloat16)):
        return False
    driver, _ = cuda()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    return bool(checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(device.index)))))


class RowDivisions:
    """The memory of two ranks for divided steps, and the number of their sums. Both ranks must divide the same steps."""

    def __init__(
        self,
        address: int,
        peer_address: int,
        most_bytes: int,
        rank: int,
        missing: int,
        patience_ns: int,
        device: torch.device,
    ) -> None:
        """Use the memory of this rank and of the other one at these addresses. `missing` is where the host finds a lost rank's number."""
        self.address, self.peer_address, self.rank = address, peer_address, rank
        self.device = device
        self.norms_place = _BOX + box_bytes(most_bytes)
        self.number = 0
        """The number of the last sum that has begun."""
        self.is_awaited = True
        """Whether a launch that waits for the other rank's norms of that sum has been asked for. Until then no other sum may begin."""
        self._most_bytes = most_bytes
        self._waits = missing, patience_ns, 1 - rank

    @cached_property
    def _copies(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def divide(self, num_rows: int, columns: int, dtype: torch.dtype, is_alone: bool) -> RowDivision | None:
        """Return how a step's hidden states are divided; None if they are too few or too many.

        A rank that is alone divides nothing, except for compiling the kernels. No graph may capture the step: it would repeat its numbers.
        """
        if is_alone and not is_precompiling():
            return None
        num_bytes = num_rows * columns * dtype.itemsize
        if num_rows < FEWEST_ROWS or num_bytes > self._most_bytes or not is_divisible(dtype, columns * dtype.itemsize):
            return None
        if not is_precompiling():
            self.begin_step()
        middle = -(-num_rows // 2 // ROW_UNIT) * ROW_UNIT
        halves = slice(0, middle), slice(middle, num_rows)
        return RowDivision(self, halves[self.rank], halves[1 - self.rank], columns, dtype)

    def begin_step(self) -> None:
        """Let what is launched from now on wait for all copies of the step before."""
        torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def arrival(self, place: int) -> Arrival:
        return Arrival(self.address + place, self.number, *self._waits)

    def send(self, rows: Tensor, place: int, number_place: int) -> None:
        """Copy the rows, once they are computed, to a place in the other rank's memory, and write the number of the sum behind them."""
        if is_precompiling():
            return
        driver, _ = cuda()
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        stream, there = self._copies.cuda_stream, self.peer_address
        with torch.cuda.device(self.device):
            checked(driver.cuMemcpyDtoDAsync(there + place, rows.data_ptr(), rows.nbytes, stream))
            checked(driver.cuStreamWriteValue64(stream, there + number_place, self.number, 0))


class RowDivision:
    """How the rows of one step are divided: `own` are this rank's rows, `others` the other's."""

    def __init__(self, divisions: RowDivisions, own: slice, others: slice, columns: int, dtype: torch.dtype) -> None:
        self.own, self.others = own, others
        self._divisions = divisions
        num_own, num_rows, device = own.stop - own.start, max(own.stop, others.stop), divisions.device
        self._sent = view_of(divisions.address + _BOX, (num_own, columns), dtype, device)
        self._norms = view_of(divisions.address + divisions.norms_place, (num_rows, columns), dtype, device)

    def begin_sum(self) -> Tensor:
        """Return the place for this rank's part of the others' rows; `send_part` sends it."""
        divisions = self._divisions
        assert divisions.is_awaited, "norms of the last sum may still arrive there"
        divisions.number += not is_precompiling()
        return self._norms[self.others]

    def send_part(self) -> None:
        """Send the part to the other rank."""
        self._divisions.send(self._norms[self.others], _BOX, _PARTS)

    def finish_sum(self, part: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum to own rows of `hidden` [rows, columns], and return the norm of all rows.

        `part` is this rank's part of its own rows. The others' norms arrive later: `late_rows` or `await_others` waits for them.
        """
        divisions = self._divisions
        divisions.is_awaited = is_precompiling()  # which may fail before anything waits
        normed = self._norms[self.own]
        finish_rows(part, self._sent, divisions.arrival(_PARTS), hidden[self.own], weight, eps, normed)
        divisions.send(normed, divisions.norms_place + self.own.start * normed.stride(0) * normed.itemsize, _NORMS)
        return self._norms

    def late_rows(self) -> LateRows:
        """Return what a kernel must wait for before it reads the others' norms. The caller launches such a kernel."""
        self._divisions.is_awaited = True
        return LateRows(self.own, self._divisions.arrival(_NORMS))

    def await_others(self) -> None:
        """Let what is launched from now on wait for the others' norms."""
        await_arrival(self.late_rows().arrival, self._divisions.device)

    def zero_others(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return `rows`, which have these places in the step, with zeros in the place of the other rank's."""
        is_own = (places >= self.own.start) & (places < self.own.stop)
        return torch.where(is_own.unsqueeze(-1), rows, 0)
