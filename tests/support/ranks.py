"""The ranks of a tensor-parallel group as threads of the test, over real gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch

from srt.distributed.parallel_state import Group, TensorParallel
from srt.distributed.rendezvous import init_tensor_parallel

T = TypeVar("T")

CPU = torch.device("cpu")


def single_rank() -> TensorParallel:
    return TensorParallel(0, 1, None, CPU)


def idle_rank(rank: int, size: int) -> TensorParallel:
    """A rank for building and loading, which send nothing."""
    return TensorParallel(rank, size, None if size == 1 else cast("Group", object()), CPU)


def run_ranks(size: int, folder: Path, work: Callable[[TensorParallel], T]) -> list[T]:
    """`work` on every rank at the same time; the results in rank order. `folder` holds the rendezvous."""
    number = len(list(folder.glob("rendezvous-*")))
    rendezvous = str(folder / f"rendezvous-{number}")

    def one(rank: int) -> T:
        tp = init_tensor_parallel(rank, size, rendezvous, "gloo", CPU, timeout_s=60)
        try:
            with torch.inference_mode():
                return work(tp)
        finally:
            tp.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
