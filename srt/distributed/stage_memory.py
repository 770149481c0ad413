"""Links between the stages of a pipeline on GPUs: copies into each other's memory, in the order of each stage's stream.

srt/kernels/collectives/stage_link.cu explains the protocol. No host takes part in a step: a stage's kernels wait on the device for what
other stages send. This file owns the memory, and makes the stages agree on it. Importing it imports Triton.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import BLOCK_BYTES, HANDLE_BYTES, LOCATION_BYTES, MappedMemory
from srt.distributed.peer_setup import Disagreement, agree
from srt.distributed.pipeline import DrawnIds, Ints, Pipeline
from srt.kernels.collectives.stage_link import (
    NUMBER_BYTES,
    RECEIVE_IDS,
    RECEIVE_ROWS,
    SEND_IDS,
    SEND_ROWS,
    UNIT_BYTES,
    Ids,
    LinkKernel,
    Rows,
    copy_ids,
    copy_rows,
)
from srt.utils.errors import StartError
from srt.utils.numbered_words import Pairs, pairs_of, read_values

_PROOF_BYTES: Final = 16
_RING_BYTES: Final = (
    HANDLE_BYTES + LOCATION_BYTES + _PROOF_BYTES
)  # of an offer; behind them come the process and file of the ids
_LOOKS: Final = 1024  # polls of the host between two readings of the clock


@dataclass(frozen=True, slots=True)
class LinkSizes:
    """What the links must hold; the same on all stages."""

    row_bytes: int  # of a token's hidden states
    most_rows: int  # tokens of a step
    most_ids: int  # rows of a step that sample
    most_in_flight: int  # steps that the first stage has launched and the last one has not ended

    @property
    def num_entries(self) -> int:
        """Entries of the ring of hidden states: one more than steps in flight."""
        return self.most_in_flight + 1

    @property
    def num_id_entries(self) -> int:
        """Entries of the ring of ids. A stage may write those of a step to its token table as many steps later as are in flight."""
        return max(8, 2 * self.most_in_flight + 2)

    @property
    def entry_bytes(self) -> int:
        """The rows of a step, with a number for each."""
        return self.most_rows * (self.row_bytes + NUMBER_BYTES)

    def entry(self, number: int) -> int:
        """Return the offset of a step's rows in the ring."""
        return number % self.num_entries * self.entry_bytes


class SharedIds:
    """The ids of a step that the last stage's GPU writes to memory of the host, where all stages poll for them."""

    must_be_awaited = False

    def __init__(
        self, pairs: Pairs, number: int, num_rows: int, timeout_s: float, lost: Callable[[], CollectiveError]
    ) -> None:
        """`lost` returns the error to raise if `wait` takes longer than `timeout_s`."""
        self.number = number
        self.num_rows = num_rows
        self._pairs = pairs
        self._timeout_s = timeout_s
        self._lost = lost
        self._ids: NDArray[np.int32] | None = None

    @property
    def has_ended(self) -> bool:
        if self._ids is None:
            self._ids = read_values(self._pairs, self.number, self.num_rows)
        return self._ids is not None

    def wait(self) -> Tensor:
        begun_s, num_looks = time.monotonic(), 0
        while not self.has_ended:
            time.sleep(0)  # other threads may run
            num_looks += 1
            if num_looks % _LOOKS == 0 and time.monotonic() - begun_s > self._timeout_s:
                raise self._lost()
        assert self._ids is not None
        return torch.from_numpy(self._ids.copy())


@dataclass(frozen=True, slots=True)
class StageCopies:
    """The functions that launch the kernels of stage_link.py."""

    rows: Callable[[LinkKernel, Rows], None] = copy_rows
    ids: Callable[[LinkKernel, Ids], None] = copy_ids


KERNEL_COPIES: Final = StageCopies()


class StageMemory:
    """A stage's links on a GPU. Its kernels run on the stream that is current when a method is called, which must be that of all steps."""

    def __init__(
        self, pipeline: Pipeline, boxes: StageBoxes, device: torch.device, timeout_s: float, copies: StageCopies
    ) -> None:
        is_cuda = device.type == "cuda"
        self._stage = pipeline.stage
        self._last = pipeline.num_stages - 1
        self._boxes = boxes
        self._copies = copies
        self._sizes = sizes = boxes.sizes
        self._timeout_s = timeout_s
        # Pinned memory that the device writes: it stays readable after the device has stopped working.
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        # Slots and positions of ids, which the device reads from the host's memory.
        places = (sizes.num_id_entries, 2, sizes.most_ids)
        self._places = torch.zeros(places, dtype=torch.int64, pin_memory=is_cuda)
        self._num_sent = self._num_received = self._num_ids = 0

    def send_hidden(self, hidden: Tensor) -> None:
        self._num_sent += 1
        self._copy_rows(SEND_ROWS, hidden, self._boxes.next_ring, self._num_sent, self._stage)

    def receive_hidden(self, out: Tensor) -> None:
        self._num_received += 1
        self._copy_rows(RECEIVE_ROWS, out, self._boxes.ring, self._num_received, self._stage - 1)

    def send_ids(self, drawn: DrawnIds) -> None:
        words = drawn.words
        self._num_ids += 1
        self._copies.ids(SEND_IDS, self._ids(self._num_ids, len(words), words.data_ptr()))

    def receive_ids(self, num_rows: int) -> SharedIds:
        self._num_ids += 1
        entry = self._boxes.ids[self._num_ids % self._sizes.num_id_entries]
        return SharedIds(pairs_of(entry), self._num_ids, num_rows, self._timeout_s, lambda: self._lost(self._last))

    def write_ids(self, ids: SharedIds, slots: Ints, positions: Ints, token_table: Tensor) -> None:
        places = self._places[ids.number % self._sizes.num_id_entries]
        host = places.numpy()
        host[0, : len(slots)], host[1, : len(slots)] = slots, positions
        argument = self._ids(ids.number, len(slots), places.data_ptr())
        argument.tokens, argument.stride = token_table.data_ptr(), token_table.stride(0)
        self._copies.ids(RECEIVE_IDS, argument)

    @property
    def lost_peer(self) -> CollectiveError | None:
        stage = int(self._missing[0]) - 1
        return None if stage < 0 else self._lost(stage)

    def _lost(self, stage: int) -> CollectiveError:
        return CollectiveError(
            f"stage {self._stage} lost the others: stage {stage} sent nothing for {self._timeout_s:g} s"
        )

    def _copy_rows(self, kernel: LinkKernel, rows: Tensor, ring: int, number: int, sender: int) -> None:
        count, sizes = len(rows), self._sizes
        row_bytes = rows.shape[1] * rows.itemsize
        assert rows.is_contiguous() and row_bytes == sizes.row_bytes, (rows.shape, rows.dtype, sizes)
        assert 0 < count <= sizes.most_rows, f"a step of {count} tokens, but stages exchange at most {sizes.most_rows}"
        entry = ring + sizes.entry(number)
        argument = Rows(
            rows=rows.data_ptr(),
            entry=entry,
            numbers=entry + sizes.most_rows * row_bytes,
            number=number,
            missing=self._missing.data_ptr(),
            patience_ns=int(self._timeout_s * 1e9),
            count=count,
            units=row_bytes // UNIT_BYTES,
            sender=sender,
        )
        self._copies.rows(kernel, argument)

    def _ids(self, number: int, count: int, source: int) -> Ids:
        sizes = self._sizes
        assert 0 < count <= sizes.most_ids, f"{count} rows sample, but stages exchange ids of at most {sizes.most_ids}"
        return Ids(
            entry=self._boxes.ids_address + number % sizes.num_id_entries * sizes.most_ids * NUMBER_BYTES,
            source=source,
            missing=self._missing.data_ptr(),
            patience_ns=int(self._timeout_s * 1e9),
            number=number & 0xFFFFFFFF,
            count=count,
            width=sizes.most_ids,
            sender=self._last,
        )


class StageBoxes:
    """Memory of this stage for the stage before it, that of the next stage as mapped here, and that of all stages for ids."""

    def __init__(self, memory: MappedMemory | None, stage: int, num_stages: int, sizes: LinkSizes) -> None:
        """`memory` is None if this stage has no kernels for its GPU."""
        self.sizes = sizes
        self.ring = 0  # address of this stage's ring of hidden states
        self.next_ring = 0  # of the next stage's
        self.ids_address = 0  # of the ring of ids, for the device
        self.ids: NDArray[np.int64] = np.zeros((0, 0), np.int64)  # that ring: [entries, rows]
        self._memory = memory
        self._stage = stage
        self._last = num_stages - 1

    def offer(self) -> bytes:
        """Allocate what other stages will map, and return what they need for that."""
        if self._memory is None:
            raise RuntimeError("there are no kernels for its GPU")
        rows = bytes(_RING_BYTES) if self._stage == 0 else self._offer_ring()
        return rows + (self._offer_ids() if self._stage == self._last else bytes(16))

    def _offer_ring(self) -> bytes:
        memory, sizes = self._memory, self.sizes
        assert memory is not None
        self.ring = memory.allocate(_whole(sizes.num_entries * sizes.entry_bytes, BLOCK_BYTES), 0)
        proof = os.urandom(_PROOF_BYTES)
        memory.write(self.ring, proof)
        return memory.handle_of(self.ring) + memory.location + proof

    def _offer_ids(self) -> bytes:
        file = os.memfd_create("ids of a pipeline")  # stays open: the other stages open it by its number
        os.ftruncate(file, self._ids_bytes)
        self._map_ids(file)
        return os.getpid().to_bytes(8, "little") + file.to_bytes(8, "little")

    def map(self, offers: list[bytes]) -> bytes:
        """Map the memory that other stages offer, and verify that it is theirs."""
        memory, stage = self._memory, self._stage
        assert memory is not None
        if stage == self._last:
            return b""
        offer = offers[stage + 1]
        handle, rest = offer[:HANDLE_BYTES], offer[HANDLE_BYTES:]
        location, proof = rest[:LOCATION_BYTES], rest[LOCATION_BYTES : LOCATION_BYTES + _PROOF_BYTES]
        if location != memory.location and not memory.reaches(location):
            raise RuntimeError(f"its GPU cannot write to the memory of stage {stage + 1}'s")
        self.next_ring = memory.map(handle)
        if memory.read(self.next_ring, _PROOF_BYTES) != proof:
            raise RuntimeError(f"it finds other memory than that of stage {stage + 1}")
        process, number = (
            int.from_bytes(offers[self._last][begin : begin + 8], "little") for begin in (_RING_BYTES, _RING_BYTES + 8)
        )
        path = f"/proc/{process}/fd/{number}"
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map_ids(file)
        finally:
            os.close(file)
        return b""

    def close(self) -> None:
        """Unmap the next stage's ring. Our own memory stays until the process ends: CUDA forbids freeing memory that is mapped."""
        ring, self.next_ring = self.next_ring, 0
        if ring and self._memory is not None:
            with suppress(RuntimeError):  # a device that has given up rejects every call
                self._memory.unmap(ring)

    @property
    def _ids_bytes(self) -> int:
        needed = self.sizes.num_id_entries * self.sizes.most_ids * NUMBER_BYTES
        return _whole(needed, mmap.PAGESIZE)

    def _map_ids(self, file: int) -> None:
        assert self._memory is not None
        shared = mmap.mmap(file, self._ids_bytes)
        count = self.sizes.num_id_entries * self.sizes.most_ids
        self.ids = np.frombuffer(shared, np.int64, count).reshape(self.sizes.num_id_entries, self.sizes.most_ids)
        address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self.ids_address = self._memory.register(address, self._ids_bytes)


def _whole(num_bytes: int, block: int) -> int:
    return -(-num_bytes // block) * block


def open_stage_memory(
    pipeline: Pipeline,
    find_memory: Callable[[], MappedMemory | None],
    sizes: LinkSizes,
    device: torch.device,
    timeout_s: float,
    copies: StageCopies = KERNEL_COPIES,
) -> StageMemory:
    """Make the stages map each other's memory; StartError on every stage if one cannot. `find_memory` returns None without kernels."""
    assert sizes.row_bytes % UNIT_BYTES == 0, f"rows of {sizes.row_bytes} bytes"
    boxes = StageBoxes(find_memory(), pipeline.stage, pipeline.num_stages, sizes)
    try:
        offers = agree(pipeline.gather, boxes.offer)
        agree(pipeline.gather, lambda: boxes.map(offers))
    except Disagreement as error:
        boxes.close()
        raise StartError(
            f"--pp-size {pipeline.num_stages} needs GPUs of compute capability 9.0 that write each other's memory ({error}): use --tp"
            " to split the model, or --dp-size for several copies."
        ) from error
    return StageMemory(pipeline, boxes, device, timeout_s, copies)
