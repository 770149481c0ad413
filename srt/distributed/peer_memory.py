"""Exchange tensors between the ranks of one host through memory that they write for each other, faster than NCCL.

peer_sum.cu, medium_sum.cu and large_sum.cu in srt/kernels/collectives explain the protocols and why they are correct, and row_division.py
how two ranks divide the rows of large steps. This file owns the memory; `peer_setup.py` makes the ranks agree on it. Importing this module
imports Triton.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

import torch
from torch import Tensor

from srt.distributed import row_division
from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import HANDLE_BYTES, LOCATION_BYTES, MappedMemory
from srt.distributed.row_division import RowDivision, RowDivisions
from srt.kernels.collectives import large_sum, medium_sum
from srt.kernels.collectives.large_sum import PROGRAMS, LargeMail, LargeSums
from srt.kernels.collectives.medium_sum import MediumSums
from srt.kernels.collectives.peer_sum import (
    BOXES,
    MOST_BYTES,
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


def medium_place(ranks: int) -> int:
    """Return the offset of the boxes of medium sums in a rank's memory. Those of peer_sum.cu come first."""
    return memory_bytes(ranks)


def large_place(ranks: int) -> int:
    """Return the offset of the boxes of large sums."""
    return medium_place(ranks) + medium_sum.memory_bytes(ranks)


def divided_place(ranks: int, most_large_bytes: int) -> int:
    """Return the offset of the memory for steps whose rows two ranks divide, which is the last."""
    return large_place(ranks) + large_sum.memory_bytes(ranks, most_large_bytes)


class PeerMemory:
    """Sums and gathers over the ranks' boxes, and steps whose rows two ranks divide. All ranks must call the same in the same order.

    Small tensors have boxes of their own. Large ones can only be added up, and only if the boxes were opened for them.
    """

    def __init__(self, boxes: Boxes, device: torch.device, timeout_s: float) -> None:
        self._boxes = boxes
        self._size = len(boxes.addresses)
        self._timeout_s = timeout_s
        self._runs = torch.full((BOXES,), boxes.first_run, dtype=torch.int32, device=device)
        # Pinned memory that the device writes: it stays readable after the device has stopped working.
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._mail = Mail(
            memories=tuple(boxes.addresses),
            runs=self._runs.data_ptr(),
            missing=self._missing.data_ptr(),
            patience_ns=int(timeout_s * 1e9),
            rank=boxes.rank,
        )
        self._medium_runs = torch.zeros(medium_sum.num_boxes(self._size), dtype=torch.int32, device=device)
        self._medium: MediumSums | None = self._medium_sums()
        self._large_runs = torch.ones(PROGRAMS, dtype=torch.int64, device=device)
        self._large = self._large_sums() if boxes.most_large_bytes else None
        self._divisions = self._row_divisions(device) if boxes.most_divided_bytes else None

    def _medium_sums(self) -> MediumSums:
        first = medium_place(self._size)
        mail = Mail(
            memories=tuple(address + first for address in self._boxes.addresses),
            runs=self._medium_runs.data_ptr(),
            missing=self._missing.data_ptr(),
            patience_ns=int(self._timeout_s * 1e9),
            rank=self._boxes.rank,
        )
        return MediumSums(mail, self._size)

    def _large_sums(self) -> LargeSums:
        boxes, first = self._boxes, large_place(self._size)
        mail = LargeMail(
            memories=tuple(address + first for address in boxes.addresses),
            runs=self._large_runs.data_ptr(),
            missing=self._missing.data_ptr(),
            patience_ns=int(self._timeout_s * 1e9),
            box_bytes=large_sum.box_bytes(self._size, boxes.most_large_bytes),
            rank=boxes.rank,
        )
        return LargeSums.of(mail, self._size, boxes.most_large_bytes)

    def _row_divisions(self, device: torch.device) -> RowDivisions:
        boxes = self._boxes
        assert self._size == 2, f"{self._size} ranks divide no rows"
        first, patience_ns = divided_place(self._size, boxes.most_large_bytes), int(self._timeout_s * 1e9)
        addresses = boxes.addresses[boxes.rank] + first, boxes.addresses[1 - boxes.rank] + first
        missing = self._missing.data_ptr()
        return RowDivisions(*addresses, boxes.most_divided_bytes, boxes.rank, missing, patience_ns, device)

    def add(self, x: Tensor) -> Tensor | None:
        """Return the sum over ranks, added in rank order in float32 and rounded once; None if the tensor is too large."""
        if self._medium is not None and medium_sum.is_summable(x.dtype, x.nbytes, self._size):
            return self._medium.add(x)
        return add_parts(x, self._mail, self._size) if is_summable(x.dtype, x.nbytes, self._size) else None

    def add_large(self, x: Tensor) -> Tensor | None:
        """Return what `add` returns for tensors that are too large for it; None if they are not, or if there are no boxes for them."""
        return self._large.add(x) if self._large is not None and self._is_large(x) else None

    def add_and_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """Return (the norm of hidden + sum, hidden + sum) for [rows, columns]; None if one launch cannot do it."""
        row_bytes = x.shape[1] * x.itemsize
        if self._medium is not None and medium_sum.is_normable(x.dtype, len(x), row_bytes, self._size):
            return self._medium.add_and_norm(x, hidden, weight, eps)
        if is_normable(x.dtype, len(x), row_bytes, self._size):
            return add_parts_and_norm(x, hidden, weight, eps, self._mail, self._size)
        if self._large is not None and self._is_large(x) and large_sum.is_normable(row_bytes):
            return self._large.add_and_norm(x, hidden, weight, eps)
        return None

    def divide(self, num_rows: int, columns: int, dtype: torch.dtype, is_alone: bool) -> RowDivision | None:
        """Return how two ranks divide the rows of a step; None if they do not."""
        return None if self._divisions is None else self._divisions.divide(num_rows, columns, dtype, is_alone)

    def _is_large(self, x: Tensor) -> bool:
        return x.nbytes > MOST_BYTES and large_sum.is_summable(x.dtype, x.nbytes)

    def gather(self, x: Tensor) -> Tensor | None:
        """Return [ranks, *x.shape]; None if the tensor is too large."""
        return gather_parts(x, self._mail, self._size) if is_gatherable(x.nbytes, self._size) else None

    @property
    def lost_peer(self) -> CollectiveError | None:
        """An error that names the peer on which the device has given up, if any. Later CUDA errors are a consequence of it."""
        missing = int(self._missing[0]) - 1
        if missing < 0:
            return None
        reason = f"rank {missing} sent nothing for {self._timeout_s:g} s"
        help_ = "if GPUs cannot write each other's memory here, --disable-custom-all-reduce leaves it to NCCL"
        return CollectiveError(f"rank {self._boxes.rank} lost the others: {reason}; {help_}")

    def close(self) -> None:
        """Unmap the peers' boxes; may be called twice. Our own stay until the process ends: CUDA forbids freeing memory that is mapped."""
        with contextlib.suppress(RuntimeError):  # a device that has given up rejects every call
            self._boxes.unmap()


class Boxes:
    """Memory of this rank for its peers, and the peers' memory as mapped here."""

    def __init__(
        self,
        memory: MappedMemory | None,
        rank: int,
        size: int,
        first_run: int,
        most_large_bytes: int = 0,
        most_divided_bytes: int = 0,
    ) -> None:
        self.rank = rank
        self.first_run = first_run
        self.most_large_bytes = most_large_bytes
        """Bytes of a large tensor that are added up in one launch; 0: large tensors have no boxes."""
        self.most_divided_bytes = most_divided_bytes
        """Most bytes of the hidden states whose rows two ranks divide; 0: they divide none."""
        self.addresses = [0] * size
        """The address of every rank's box; 0 if it has none."""
        self._memory = memory

    def offer(self) -> bytes:
        """Allocate our box and return what peers need to map it."""
        memory, rank = self._memory, self.rank
        if memory is None:
            raise RuntimeError("there is no kernel for its GPU")
        size = len(self.addresses)
        num_bytes = divided_place(size, self.most_large_bytes) + row_division.memory_bytes(self.most_divided_bytes)
        # Numbers of runs of large tensors and of divided steps have 64 bits, and this word twice is not one that they wait for.
        own = self.addresses[rank] = memory.allocate(num_bytes, (self.first_run - 1) % 2**32)
        memory.write(own + medium_place(size), medium_sum.EMPTY_BYTE * medium_sum.memory_bytes(size))
        proof = os.urandom(_PROOF_BYTES)
        memory.write(own + own_place(rank), proof)
        return memory.handle_of(own) + memory.location + proof

    def map(self, offers: list[bytes]) -> bytes:
        """Map the peers' boxes and verify that each is the one offered."""
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
        """Unmap the peers' boxes; may be called twice."""
        for rank, address in enumerate(self.addresses):
            if rank != self.rank and address:
                self.addresses[rank] = 0
                self._memory.unmap(address)  # type: ignore[union-attr]  # mapped, so not None

    def free(self) -> None:
        """Free our own box, which no peer may still map."""
        own, self.addresses[self.rank] = self.addresses[self.rank], 0
        if own:
            self._memory.free(own)  # type: ignore[union-attr]  # allocated, so not None
