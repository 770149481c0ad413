"""The ranks of a tensor-parallel group as threads of the test, over real gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch

from srt.distributed.parallel_state import Group, TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.distributed.rendezvous import init_expert_exchange, init_pipeline, init_tensor_parallel

T = TypeVar("T")

CPU = torch.device("cpu")


def single_rank() -> TensorParallel:
    return TensorParallel(0, 1, None, CPU)


def idle_rank(rank: int, size: int) -> TensorParallel:
    """A rank for building and loading, which send nothing."""
    return TensorParallel(rank, size, None if size == 1 else cast("Group", object()), CPU)


def run_ranks(size: int, folder: Path, work: Callable[[TensorParallel], T], expert_groups: int = 1) -> list[T]:
    """`work` on every rank at the same time; the results in rank order. `folder` holds the rendezvous."""
    number = len(list(folder.glob("rendezvous-*")))
    rendezvous = str(folder / f"rendezvous-{number}")

    def one(rank: int) -> T:
        tp = init_tensor_parallel(rank, size, rendezvous, "gloo", CPU, timeout_s=60, expert_groups=expert_groups)
        try:
            with torch.inference_mode():
                return work(tp)
        finally:
            tp.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def run_groups(
    num_groups: int,
    size: int,
    folder: Path,
    work: Callable[[TensorParallel, int], T],
    expert_groups: int = 1,
) -> list[T]:
    """`work` on every rank of attention groups at the same time, with the number of its group; the results in rank order.

    `size` ranks in all share the experts.
    """
    number = len(list(folder.glob("rendezvous-*")))
    group_size = size // num_groups
    paths = [str(folder / f"c{number}-{rank}") for rank in range(size)]
    opened: list[
        TensorParallel
    ] = []  # kept until all are done: a rank's last message may still be on its way when it is

    def one(rank: int) -> T:
        group, place = divmod(rank, group_size)
        meeting = str(folder / f"rendezvous-{number}")
        exchange = init_expert_exchange(
            rank, paths, num_groups, lambda purpose: f"{meeting}-{purpose}", CPU, 60.0, expert_groups=expert_groups
        )
        tp = init_tensor_parallel(
            place, group_size, f"{meeting}-group-{group}", "gloo", CPU, timeout_s=60, exchange=exchange
        )
        opened.append(tp)
        try:
            with torch.inference_mode():
                return work(tp, group)
        except BaseException:
            tp.close()  # the others fail, instead of waiting
            raise

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))
    finally:
        for tp in opened:
            tp.close()


def run_stages(num_stages: int, tp_size: int, folder: Path, work: Callable[[TensorParallel, Pipeline], T]) -> list[T]:
    """`work` on every rank of a pipeline at the same time; the results stage by stage. `folder` holds the rendezvous."""
    number = len(list(folder.glob("rendezvous-*")))
    pipelines: list[Pipeline] = []  # kept until all are done: a rank's last message may still be on its way when it is

    def one(rank: int) -> T:
        stage, tp_rank = divmod(rank, tp_size)
        meeting = str(folder / f"rendezvous-{number}")
        tp = init_tensor_parallel(tp_rank, tp_size, f"{meeting}-stage-{stage}", "gloo", CPU, timeout_s=60)
        pipeline = init_pipeline(stage, num_stages, f"{meeting}-pipeline-{tp_rank}", 60.0, 4)
        pipelines.append(pipeline)
        try:
            with torch.inference_mode():
                return work(tp, pipeline)
        finally:
            tp.close()

    with ThreadPoolExecutor(num_stages * tp_size) as pool:
        return list(pool.map(one, range(num_stages * tp_size)))
