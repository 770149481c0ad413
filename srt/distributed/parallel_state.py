"""Tensor parallelism: a worker's rank in its group, and the few collectives that the layers need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from srt.distributed.errors import CollectiveError

if TYPE_CHECKING:
    from srt.distributed.peer_memory import PeerMemory
    from srt.distributed.row_division import RowDivision


class Work(Protocol):
    def wait(self) -> bool: ...


class Group(Protocol):
    """The methods used of a torch process group (ProcessGroupGloo, ProcessGroupNCCL)."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], /
    ) -> Work: ...

    def shutdown(self) -> None: ...


class SharedExperts(Protocol):
    """What layers use of the connection to other groups that share their experts (expert_exchange.py)."""

    ranks: TensorParallel
    """The ranks of all groups."""

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return the rows of all groups, in the order of groups, for each tensor of this group's rows, one a token of the step."""

    def sum_own(self, summands: Tensor) -> Tensor:
        """Return the sum over ranks of this group's rows. `summands` are this rank's for the rows of all groups."""

    def pad(self, num_tokens: int) -> None:
        """Let each group have this number of tokens in the present step; what it lacks is padding."""

    def alone(self) -> AbstractContextManager[None]:
        """Let this rank precompile without the others, as `TensorParallel.alone` does."""

    def close(self) -> None: ...


class _Echo:
    """A stand-in group in which every rank appears to send what this rank sends."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work:
        output.view(-1, len(input)).copy_(input)
        return _Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], /
    ) -> Work:
        output.copy_(input)  # all ranks appear to have as many rows
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
        exchange: SharedExperts | None = None,
    ) -> None:
        """Join the group. `peers`, if given, serves small tensors, and sums of large ones. `exchange` connects it to other groups."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert size % expert_groups == 0, f"{size} ranks in {expert_groups} groups"
        assert (group is None) == (size == 1), f"{size} ranks, group {group}"
        self.rank = rank
        self.size = size
        self.device = device
        self.expert_groups = expert_groups
        """Groups of neighbouring ranks that divide a mixture's experts. The ranks of a group share each of its experts."""
        self.exchange = exchange
        self._group = group
        self._peers = peers

    @property
    def of_experts(self) -> TensorParallel:
        """The ranks that share experts: those of this group, or of all groups that `exchange` connects."""
        return self if self.exchange is None else self.exchange.ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order. Low precision is added in float32 and rounded once."""
        if self._group is None:
            return x
        added = self.add_small(x)
        if added is None and self._peers is not None:
            added = self._peers.add_large(x)
        return self.add(self._gather(x)) if added is None else added

    def add_small(self, x: Tensor) -> Tensor | None:
        """Return what `all_reduce` returns, if the ranks write each other's memory and it is small enough for that; else None."""
        return None if self._peers is None else self._peers.add(x)

    def add(self, parts: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which are stacked, added in rank order."""
        if self.size == 2:
            return parts[0] + parts[1]  # PyTorch adds in float32 and rounds once
        wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
        total = parts[0].to(wide) + parts[1]
        for part in parts[2:]:
            total += part
        return total.to(parts.dtype)

    def exchange_rows(self, rows: Tensor, counts: Sequence[int], own: int) -> Tensor:
        """Send each rank its number of `rows`, which are in rank order. Return what each rank has sent: [size, own, columns]."""
        assert self._group is not None, "a single rank has nobody to exchange rows with"
        received = rows.new_empty((self.size, own, rows.shape[1]))
        width = rows.shape[1] * rows.itemsize
        flat = rows.contiguous().view(-1).view(torch.uint8)
        sizes = [own * width] * self.size, [count * width for count in counts]
        with self._naming_loss():
            self._group.alltoall_base(received.view(-1).view(torch.uint8), flat, *map(list, sizes)).wait()
        return received

    def all_reduce_and_norm(
        self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return (RMSNorm of hidden + sum, hidden + sum), all [rows, columns], if one launch can do it; else None.

        The sum is that of `all_reduce`.
        """
        return None if self._peers is None else self._peers.add_and_norm(x, hidden, weight, eps)

    def divide(self, num_rows: int, columns: int, dtype: torch.dtype) -> RowDivision | None:
        """Return how this rank and the other one divide the rows of a step's hidden states; None if they do not."""
        if self._peers is None:
            return None
        return self._peers.divide(num_rows, columns, dtype, is_alone=isinstance(self._group, _Echo))

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
        return min(self.gather_ints(value))

    def gather_ints(self, value: int) -> list[int]:
        """Return the ranks' values in rank order."""
        if self._group is None:
            return [value]
        gathered: list[int] = (
            self._gather(torch.tensor([value], dtype=torch.int64, device=self.device)).view(-1).tolist()
        )
        return gathered

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank precompile without its peers.

        Inside, the other ranks appear to send what this rank sends. Kernels that would wait for peers are compiled but not launched.
        """
        group = self._group
        self._group = None if group is None else _Echo()
        try:
            with nullcontext() if self.exchange is None else self.exchange.alone():
                yield
        finally:
            self._group = group

    @property
    def lost_peer(self) -> CollectiveError | None:
        """An error that names the peer on which the device has given up, if any."""
        return None if self._peers is None else self._peers.lost_peer

    @contextmanager
    def naming_lost_peer(self) -> Iterator[None]:
        """Replace any exception inside by a CollectiveError that names the lost peer, if the device has given up on one."""
        try:
            yield
        except Exception as error:
            lost = self.lost_peer or (None if self.exchange is None else self.exchange.ranks.lost_peer)
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
        if self.exchange is not None:
            self.exchange.close()

    def _gather(self, x: Tensor) -> Tensor:
        """Return every rank's tensor: [size, *x.shape], the same on every rank."""
        assert self._group is not None
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            # Sent as bytes, so that the backend need not support the dtype.
            flat = x.contiguous().view(-1).view(torch.uint8)
            with self._naming_loss():
                self._group._allgather_base(gathered.view(-1).view(torch.uint8), flat).wait()
        return gathered

    @contextmanager
    def _naming_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition(". This is typically")[0].rstrip(".")  # gloo continues with guesses
            raise CollectiveError(f"rank {self.rank} lost the others: {reason}") from error
