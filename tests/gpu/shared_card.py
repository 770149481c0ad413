"""Ranks of a tensor-parallel group that share one GPU, where NCCL refuses them. Their processes take turns on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from srt.distributed.mapped_memory import CudaMemory
from srt.distributed.parallel_state import Group, TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.distributed.peer_setup import open_peer_memory
from srt.distributed.rendezvous import init_tensor_parallel
from srt.kernels.collectives.peer_sum import LETTER_BYTES, MOST_BYTES

TIMEOUT_S = 60.0


class SharedCardGroup:
    """Gathers through memory of the host; once there is memory of peers, through that, in pieces, which a CUDA graph can hold."""

    def __init__(self, group: Group) -> None:
        self.peers: PeerMemory | None = None
        self._group = group

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> SharedCardGroup:
        if self.peers is None:
            gathered = torch.empty(output.shape, dtype=output.dtype)
            self._group._allgather_base(gathered, input.cpu()).wait()
            output.copy_(gathered)
            return self
        ranks = output.view(-1, len(input))
        for begin in range(0, len(input), MOST_BYTES):
            piece = input[begin : begin + MOST_BYTES]
            padded = torch.nn.functional.pad(piece, (0, -len(piece) % LETTER_BYTES))
            parts = self.peers.gather(padded)
            assert parts is not None
            ranks[:, begin : begin + len(piece)].copy_(parts[:, : len(piece)])
        return self

    def wait(self) -> bool:
        return True

    def alltoall_base(self, *_: object) -> SharedCardGroup:
        raise AssertionError("no test with a shared GPU has experts")

    def shutdown(self) -> None:
        self._group.shutdown()


def init_shared_card(
    rank: int, size: int, rendezvous: str, device: torch.device, *, maps_peers: bool = True
) -> TensorParallel:
    """Meet the other ranks at `rendezvous`, a path. With `maps_peers` small tensors travel by the memory that they map."""
    group = init_tensor_parallel(rank, size, rendezvous, "gloo", torch.device("cpu"), TIMEOUT_S)._group
    assert group is not None
    shared = SharedCardGroup(group)
    if not maps_peers:
        return TensorParallel(rank, size, shared, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaMemory, "reaches", lambda self, location: True)  # CUDA denies that a GPU is a peer of its own
        memory = CudaMemory(device)
        peers = open_peer_memory(TensorParallel(rank, size, shared, device), lambda: memory, TIMEOUT_S)
    assert peers is not None
    shared.peers = peers
    return TensorParallel(rank, size, shared, device, peers)
