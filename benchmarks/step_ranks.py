"""The ranks of one model, a process each, for benchmarks that run a worker without the other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.rendezvous import Backend, init_expert_exchange, init_tensor_parallel
from srt.server_args import ServerArgs

TIMEOUT_S = 120.0


@contextmanager
def other_ranks(module: str, words: Sequence[str], num_ranks: int) -> Iterator[str]:
    """Start `python -m module words --rank N --meeting FOLDER` for all ranks but the first. Yields the folder where all meet.

    A failure ends this process at once: without its peers it could wait for them at its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *words, "--meeting", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL) for rank in range(1, num_ranks)]
        try:
            yield folder
            for rank in ranks:
                rank.wait(TIMEOUT_S)
        except Exception:
            traceback.print_exc()
            for rank in ranks:
                rank.kill()
            os._exit(1)
        finally:
            for rank in ranks:
                rank.kill()


def connect(
    args: ServerArgs, rank: int, folder: str, device: torch.device, most_sum_bytes: int = 0, most_divided_bytes: int = 0
) -> TensorParallel:
    """Meet the other ranks as workers do: those of --tp-size, which divide the experts by --ep-size, or attention groups of them.

    Large sums, up to `most_sum_bytes`, and steps with divided rows, up to `most_divided_bytes`, are those of ranks without such groups.
    """
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    size = args.tp_size
    meeting, groups = Path(folder), args.dp_size if args.enable_dp_attention else 1
    maps = not args.disable_custom_all_reduce
    if groups == 1:
        point = str(meeting / "ranks")
        return init_tensor_parallel(
            rank,
            size,
            point,
            backend,
            device,
            TIMEOUT_S,
            maps,
            args.ep_size,
            most_sum_bytes=most_sum_bytes,
            most_divided_bytes=most_divided_bytes,
        )
    paths = [str(meeting / f"calls-{number}") for number in range(size)]
    exchange = init_expert_exchange(
        rank, paths, groups, lambda purpose: str(meeting / purpose), device, TIMEOUT_S, maps, args.ep_size
    )
    group, place = divmod(rank, size // groups)
    point = str(meeting / f"group-{group}")
    return init_tensor_parallel(place, size // groups, point, backend, device, TIMEOUT_S, maps, exchange=exchange)
