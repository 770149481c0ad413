"""The links between stages on GPUs without a GPU: memory of this process, and what the kernels do, in Python, at once."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from srt.distributed.mapped_memory import HANDLE_BYTES, LOCATION_BYTES
from srt.distributed.pipeline import Pipeline
from srt.distributed.stage_memory import LinkSizes, StageCopies, StageMemory, open_stage_memory
from srt.kernels.collectives.stage_link import RECEIVE_IDS, SEND_IDS, SEND_ROWS, UNIT_BYTES, Ids, LinkKernel, Rows

PATIENCE_S = 60.0


class HostMemory:
    """Memory of this process that stands in for a GPU's."""

    def __init__(self, place: int = 0) -> None:
        self.location = bytes([1 + place]).ljust(LOCATION_BYTES, b"\0")
        self.reaches_others = True
        self._blocks: list[ctypes.Array[ctypes.c_char]] = []

    def reaches(self, location: bytes) -> bool:
        return self.reaches_others and location != self.location

    def allocate(self, num_bytes: int, value: int) -> int:
        assert value == 0
        self._blocks.append(ctypes.create_string_buffer(num_bytes))
        return ctypes.addressof(self._blocks[-1])

    def free(self, address: int) -> None:
        del address

    def handle_of(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def map(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def unmap(self, address: int) -> None:
        del address

    def register(self, address: int, num_bytes: int) -> int:
        del num_bytes
        return address

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)


def numbers_at(address: int, count: int) -> NDArray[np.uint64]:
    """`count` words of 64 bits in this memory."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


def wait_until(is_there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_there():
        assert time.monotonic() < end_s, "nothing was sent"
        time.sleep(0)


def copy_rows(kernel: LinkKernel, rows: Rows) -> None:
    numbers, num_bytes = numbers_at(rows.numbers, rows.count), rows.count * rows.units * UNIT_BYTES
    if kernel is SEND_ROWS:
        ctypes.memmove(rows.entry, rows.rows, num_bytes)
        numbers[:] = rows.number
    else:
        wait_until(lambda: bool((numbers == rows.number).all()))
        ctypes.memmove(rows.rows, rows.entry, num_bytes)


def copy_ids(kernel: LinkKernel, ids: Ids) -> None:
    words = numbers_at(ids.entry, ids.count)
    if kernel is SEND_IDS:
        values = numbers_at(ids.source, ids.count) & np.uint64(0xFFFFFFFF)
        words[:] = np.uint64(ids.number << 32) | values
        return
    assert kernel is RECEIVE_IDS
    places = numbers_at(ids.source, 2 * ids.width).view(np.int64).reshape(2, ids.width)[:, : ids.count]
    for row, (slot, position) in enumerate(places.T.tolist()):
        if slot >= 0:
            wait_until(lambda row=row: int(words[row]) >> 32 == ids.number)  # type: ignore[misc]
            value = ctypes.c_int32(int(words[row]) & 0xFFFFFFFF).value
            ctypes.c_int32.from_address(ids.tokens + 4 * (slot * ids.stride + position)).value = max(0, value)


COPIES = StageCopies(copy_rows, copy_ids)


def open_links(pipeline: Pipeline, sizes: LinkSizes, memory: HostMemory | None) -> StageMemory:
    """The links of this stage; all stages call this together."""
    return open_stage_memory(pipeline, lambda: memory, sizes, torch.device("cpu"), PATIENCE_S, COPIES)
