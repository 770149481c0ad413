"""Tensor parallelism: a worker's rank in its group, and the few collectives that the layers need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from srt.distributed.errors import CollectiveError

if TYPE_CHECKING:
    from srt.distributed.peer_memory import PeerMemory


class Work(Protocol):
    def wait(self) -> bool: ...


class Group(Protocol):
    """The methods used of a torch process group (ProcessGroupGloo, ProcessGroupNCCL)."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...

    def shutdown(self) -> None: ...


class _Echo:
    """A stand-in group in which every rank appears to send what this rank sends."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work:
        output.view(-1, len(input)).copy_(input)
        return _Done()

    def shutdown(self) -> None:
        pass


class _Done:
    def wait(self) -> bool:
        return True


class TensorParallel:
    """A rank of a tensor-parallel group. All ranks must call the same operations in the same order.

    Every result is the same on every rank, to the bit: data is only gathered, and each rank then does the same arithmetic in rank
    order. With one rank nothing is sent, and tensors are returned unchanged.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Group | None,
        device: torch.device,
        peers: PeerMemory | None = None,
        expert_groups: int = 1,
    ) -> None:
        """Join the group. `peers`, if given, serves small tensors."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert size % expert_groups == 0, f"{size} ranks in {expert_groups} groups"
        assert (group is None) == (size == 1), f"{size} ranks, group {group}"
        self.rank = rank
        self.size = size
        self.device = device
        self.expert_groups = expert_groups
        """Groups of neighbouring ranks that divide a mixture's experts. The ranks of a group share each of its experts."""
        self._group = group
        self._peers = peers

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order. Low precision is added in float32 and rounded once."""
        if self._group is None:
            return x
        if self._peers is not None and (added := self._peers.add(x)) is not None:
            return added
        parts = self._gather(x)
        if self.size == 2:
            return parts[0] + parts[1]  # PyTorch adds in float32 and rounds once
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        total = parts[0].to(wide) + parts[1]
        for part in parts[2:]:
            total += part
        return total.to(x.dtype)

    def all_reduce_and_norm(
        self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return (RMSNorm of hidden + sum, hidden + sum), all [rows, columns], if one launch can do it; else None.

        The sum is that of `all_reduce`.
        """
        return None if self._peers is None else self._peers.add_and_norm(x, hidden, weight, eps)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors, which have one shape, concatenated along `dim` in rank order."""
        if self._group is None:
            return x
        parts = None if self._peers is None else self._peers.gather(x)
        if parts is None:
            parts = self._gather(x)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(tuple(parts), dim=dim)

    def min_int(self, value: int) -> int:
        """Return the smallest of the ranks' values, for example of the numbers of pages that fit on each device."""
        if self._group is None:
            return value
        return int(self._gather(torch.tensor([value], dtype=torch.int64, device=self.device)).min())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank precompile without its peers.

        Inside, the other ranks appear to send what this rank sends. Kernels that would wait for peers are compiled but not launched.
        """
        group = self._group
        self._group = None if group is None else _Echo()
        try:
            yield
        finally:
            self._group = group

    @contextmanager
    def naming_lost_peer(self) -> Iterator[None]:
        """Replace any exception inside by a CollectiveError that names the lost peer, if the device has given up on one."""
        try:
            yield
        except Exception as error:
            lost = None if self._peers is None else self._peers.lost_peer
            if lost is None:
                raise
            raise lost from error

    def close(self) -> None:
        """Leave the group; afterwards the other ranks' operations fail. May be called twice."""
        group, self._group = self._group, None
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()
        if group is not None:
            group.shutdown()

    def _gather(self, x: Tensor) -> Tensor:
        """Return every rank's tensor: [size, *x.shape], the same on every rank."""
        assert self._group is not None
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            # Sent as bytes, so that the backend need not support the dtype.
            flat = x.contiguous().view(-1).view(torch.uint8)
            try:
                self._group._allgather_base(gathered.view(-1).view(torch.uint8), flat).wait()
            except RuntimeError as error:
                reason = str(error).partition(". This is typically")[0].rstrip(".")  # gloo continues with guesses
                raise CollectiveError(f"rank {self.rank} lost the others: {reason}") from error
        return gathered
