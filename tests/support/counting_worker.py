"""A real worker that tells how often it has replayed graphs of decode steps, and that may fail to capture one.

`python -m tests.support.counting_worker launch --model-path …` is a whole server of such workers. FAILING_RANK in the environment names a
rank that fails once it has captured the graphs of FAILING_SIZE rows. On a CPU a Recorder stands in for graphs.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Final

import torch

from srt.layers.attention import backend_choice
from srt.managers.process.child import Child
from srt.managers.tp_worker import process as tp_worker
from srt.model_executor.graphs.cuda_graph_runner import CudaGraphRunner
from srt.model_executor.startup import start_runner
from tests.support.other_workers import run_or_launch
from tests.support.recorder import PlansAtOnce, Recorder

FAILING_RANK: Final = "FAILING_RANK"
FAILING_SIZE: Final = 4
TOLD_AT: Final = 50
logger = logging.getLogger("tests.counting_worker")


def told_by(rank: int) -> str:
    """What the worker of this rank says when it has replayed TOLD_AT graphs."""
    return f"Rank {rank} has replayed {TOLD_AT} graphs"


def count_replays(rank: int, is_failing: bool) -> None:
    """Let the graphs of this process be counted, and a capture fail."""
    capture, num_replays = CudaGraphRunner.capture_one_batch_size, 0

    def count() -> None:
        nonlocal num_replays
        num_replays += 1
        if num_replays == TOLD_AT:
            logger.warning(told_by(rank))

    def captured(graphs: CudaGraphRunner, size: int) -> None:
        capture(graphs, size)
        forward, *others = graphs.replays_of(size)

        def counted() -> None:
            count()
            forward()

        graphs._replays[size] = [counted, *others]
        if is_failing and size == FAILING_SIZE:
            raise RuntimeError("out of memory, says the test")

    CudaGraphRunner.capture_one_batch_size = captured  # type: ignore[assignment, method-assign]


def work(child: Child) -> None:
    rank = child.start.index
    count_replays(rank, os.environ.get(FAILING_RANK) == str(rank))
    if not torch.cuda.is_available():
        backend_choice.TorchNativeBackend = PlansAtOnce  # type: ignore[attr-defined]
        start_runner.start_runner = partial(start_runner.start_runner, capture=Recorder())
    tp_worker.main(child)


if __name__ == "__main__":
    run_or_launch("tests.support.counting_worker", work)
