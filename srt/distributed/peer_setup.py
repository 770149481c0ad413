"""Make the ranks of one host agree to map each other's memory. Importing this module imports Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from srt.distributed.mapped_memory import MappedMemory
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import Boxes, PeerMemory
from srt.kernels.collectives.peer_sum import MOST_RANKS

logger = logging.getLogger(__name__)
_MESSAGE_BYTES: Final = 256


class Disagreement(Exception):
    """The ranks cannot map each other's memory, because one of them failed."""


def open_peer_memory(
    tp: TensorParallel,
    find_memory: Callable[[], MappedMemory | None],
    timeout_s: float,
    first_run: int = 1,
    most_large_bytes: int = 0,
    most_divided_bytes: int = 0,
) -> PeerMemory | None:
    """Return memory that all ranks can write, or None on every rank if one rank cannot take part; rank 0 logs which one and why.

    `find_memory` returns None if this rank has no kernel for it; it is not called if there are more than MOST_RANKS ranks. A rank that
    waits longer than `timeout_s` for a peer gives up. Runs are counted from `first_run` in 32 bits. With `most_large_bytes`, which is the
    same on all ranks, large tensors are added up too, up to so many bytes in a launch. With `most_divided_bytes` two ranks can divide the
    rows of steps whose hidden states have at most that size.
    """
    if tp.size > MOST_RANKS:
        return None
    boxes = Boxes(find_memory(), tp.rank, tp.size, first_run, most_large_bytes, most_divided_bytes)

    def gather(x: Tensor) -> Tensor:
        return tp.all_gather(x.to(tp.device).unsqueeze(0), dim=0).cpu()

    try:
        offers = agree(gather, boxes.offer)
        agree(gather, lambda: boxes.map(offers))
    except Disagreement as error:
        boxes.unmap()
        tp.min_int(0)  # a barrier: after it no peer maps our box
        boxes.free()
        if tp.rank == 0:
            logger.info("Sums over GPUs go through NCCL: %s", error)
        return None
    return PeerMemory(boxes, tp.device, timeout_s)


def agree(gather: Callable[[Tensor], Tensor], act: Callable[[], bytes]) -> list[bytes]:
    """Return the result of `act` on every rank; raise Disagreement on all ranks if it failed on one.

    `gather` returns the ranks' tensors, which are in host memory, as [ranks, *x.shape].
    """
    try:
        said = b"+" + act()
    except Exception as error:  # must be reported whatever it is, because the other ranks wait for the answer
        said = b"-" + f"{type(error).__name__}: {error}".encode()
    mine = torch.frombuffer(bytearray(said[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    all_said = [bytes(one.tolist()) for one in gather(mine)]
    for rank, one in enumerate(all_said):
        if one[:1] == b"-":
            raise Disagreement(f"rank {rank}: {one[1:].rstrip(bytes(1)).decode(errors='replace')}")
    return [one[1:] for one in all_said]
