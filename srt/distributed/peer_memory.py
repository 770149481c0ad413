"""Few bytes between the ranks of one host, by way of memory that they write for each other: there before NCCL's would be.

srt/kernels/collectives/peer_sum.cu says how that goes and why it is right. Here is who owns the memory, and how ranks agree on
it. Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import HANDLE_BYTES, LOCATION_BYTES, MappedMemory
from srt.kernels.collectives.peer_sum import (
    BOXES,
    MOST_RANKS,
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

if TYPE_CHECKING:
    from srt.distributed.parallel_state import TensorParallel

logger = logging.getLogger(__name__)
_PROOF_BYTES: Final = 16
_MESSAGE_BYTES: Final = 256


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


class _Disagreement(Exception):
    """A rank cannot do what all have to."""


def open_peer_memory(
    tp: TensorParallel, memory: MappedMemory | None, timeout_s: float, first_run: int = 1
) -> PeerMemory | None:
    """Memory that all ranks can write to; or None on all, where one of them cannot: rank 0 says which and why.

    Without `memory` this rank has no kernel for it. Who waits longer than `timeout_s` for a peer gives up. Runs count in 32 bits.
    """
    if tp.size > MOST_RANKS:
        return None
    boxes = Boxes(memory, tp.rank, tp.size, first_run)
    try:
        offers = _agree(tp, boxes.offer)
        _agree(tp, lambda: boxes.map(offers))
    except _Disagreement as error:
        boxes.unmap()
        tp.min_int(0)  # nobody maps ours any more
        boxes.free()
        if tp.rank == 0:
            logger.info("Small sums over GPUs go through NCCL: %s", error)
        return None
    return PeerMemory(boxes, tp.device, timeout_s)


def _agree(tp: TensorParallel, act: Callable[[], bytes]) -> list[bytes]:
    """What it gave on every rank; _Disagreement on all of them where it failed on one."""
    try:
        said = b"+" + act()
    except Exception as error:  # whatever it is: the others wait for the answer
        said = b"-" + f"{type(error).__name__}: {error}".encode()
    mine = torch.frombuffer(bytearray(said[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    all_said = [bytes(one.tolist()) for one in tp.all_gather(mine.to(tp.device).unsqueeze(0), dim=0).cpu()]
    for rank, one in enumerate(all_said):
        if one[:1] == b"-":
            raise _Disagreement(f"rank {rank}: {one[1:].rstrip(bytes(1)).decode(errors='replace')}")
    return [one[1:] for one in all_said]
