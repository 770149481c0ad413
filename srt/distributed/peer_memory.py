"""Few bytes between the ranks of one host, by way of memory that they write for each other: there before NCCL's would be.

srt/kernels/collectives/peer_sum.cu says how that goes and why it is right. Here is who owns the memory, and how ranks agree on
it. Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

import torch
from torch import Tensor

from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import HANDLE_BYTES, LOCATION_BYTES, MappedMemory
from srt.kernels.collectives.peer_sum import (
    BOXES,
    Mail,
    add_parts,
    add_parts_and_norm,
    gather_parts,
    is_gatherable,
    is_normable,
    is_summable,
    memory_bytes,
    own_place,
)

_PROOF_BYTES: Final = 16


class PeerMemory:
    """What the ranks' boxes are for. All ranks ask the same of it, in the same order."""

    def __init__(self, boxes: Boxes, device: torch.device, timeout_s: float) -> None:
        self._boxes = boxes
        self._size = len(boxes.addresses)
        self._timeout_s = timeout_s
        self._runs = torch.full((BOXES,), boxes.first_run, dtype=torch.int32, device=device)
        # Memory of the host that the device can write: it can be read when the device does nothing any more.
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._mail = Mail(
            memories=tuple(boxes.addresses),
            runs=self._runs.data_ptr(),
            missing=self._missing.data_ptr(),
            patience_ns=int(timeout_s * 1e9),
            rank=boxes.rank,
        )

    def add(self, x: Tensor) -> Tensor | None:
        """The sum over ranks, added in rank order in float32 and rounded once; None where there is too much of it."""
        return add_parts(x, self._mail, self._size) if is_summable(x.dtype, x.nbytes, self._size) else None

    def add_and_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """(the norm of hidden + sum, hidden + sum) for [rows, columns]; None where that is more than one launch."""
        if not is_normable(x.dtype, len(x), x.shape[1] * x.itemsize, self._size):
            return None
        return add_parts_and_norm(x, hidden, weight, eps, self._mail, self._size)

    def gather(self, x: Tensor) -> Tensor | None:
        """[ranks, *x.shape]; None where there is too much of it."""
        return gather_parts(x, self._mail, self._size) if is_gatherable(x.nbytes, self._size) else None

    @property
    def lost_peer(self) -> CollectiveError | None:
        """Whom the device has given up on, if so: what failed in CUDA since then failed because of it."""
        missing = int(self._missing[0]) - 1
        if missing < 0:
            return None
        reason = f"rank {missing} sent nothing for {self._timeout_s:g} s"
        help_ = "if GPUs cannot write each other's memory here, --disable-custom-all-reduce leaves it to NCCL"
        return CollectiveError(f"rank {self._boxes.rank} lost the others: {reason}; {help_}")

    def close(self) -> None:
        """Twice is fine. Our own boxes stay until the process ends: CUDA forbids to free what others may still map."""
        with contextlib.suppress(RuntimeError):  # a device that has given up does nothing any more
            self._boxes.unmap()


class Boxes:
    """This rank's memory for the others, and theirs as it is mapped here."""

    def __init__(self, memory: MappedMemory | None, rank: int, size: int, first_run: int) -> None:
        self.rank = rank
        self.first_run = first_run
        self.addresses = [0] * size
        """Of every rank's; 0 where there is none."""
        self._memory = memory

    def offer(self) -> bytes:
        """Take ours, and say how others map it."""
        memory, rank = self._memory, self.rank
        if memory is None:
            raise RuntimeError("there is no kernel for its GPU")
        own = self.addresses[rank] = memory.take(memory_bytes(len(self.addresses)), (self.first_run - 1) % 2**32)
        proof = os.urandom(_PROOF_BYTES)
        memory.write(own + own_place(rank), proof)
        return memory.handle_of(own) + memory.location + proof

    def map(self, offers: list[bytes]) -> bytes:
        """Map the others', each of which is seen to be what was offered."""
        memory = self._memory
        assert memory is not None
        for rank, offer in enumerate(offers):
            if rank == self.rank:
                continue
            handle, rest = offer[:HANDLE_BYTES], offer[HANDLE_BYTES:]
            location, proof = rest[:LOCATION_BYTES], rest[LOCATION_BYTES : LOCATION_BYTES + _PROOF_BYTES]
            if not memory.reaches(location):
                raise RuntimeError(f"its GPU cannot write to the memory of rank {rank}'s")
            address = self.addresses[rank] = memory.map(handle)
            if memory.read(address + own_place(rank), _PROOF_BYTES) != proof:
                raise RuntimeError(f"it finds other memory than that of rank {rank}")
        return b""

    def unmap(self) -> None:
        """Twice is fine."""
        for rank, address in enumerate(self.addresses):
            if rank != self.rank and address:
                self.addresses[rank] = 0
                self._memory.unmap(address)  # type: ignore[union-attr]  # which has mapped it

    def free(self) -> None:
        """Ours, which nobody maps."""
        own, self.addresses[self.rank] = self.addresses[self.rank], 0
        if own:
            self._memory.free(own)  # type: ignore[union-attr]  # of which it was taken
