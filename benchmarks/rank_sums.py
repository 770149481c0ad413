"""Sums over ranks: microseconds of one among many, by NCCL (on a CPU gloo) and by memory that the ranks write for each other.

    python -m benchmarks.rank_sums [--ranks 2] [--rows 1,16,64,256] [--width 4096]

A decode step has two in each layer. On GPUs they are timed in a CUDA graph, as steps have them, on the slowest rank; each rank checks its
result to the bit. The limit is what a rank sends to all others at the rate of a copy between two GPUs, which is measured first.
`large_sums.py` measures the kernels one by one, and sums of prompts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import limits
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.rendezvous import Backend, init_tensor_parallel

SUMS = 100  # in a graph
REPLAYS = 30
COPIED = 1 << 28  # bytes
TIMEOUT_S = 60.0
Act = Callable[[Tensor], Tensor]


def microseconds_of(act: Act, x: Tensor, tp: TensorParallel) -> float:
    """Return the microseconds of one sum, on the slowest rank."""

    def run() -> None:
        for _ in range(SUMS):
            act(x)

    run()
    replay, replays = run, 1
    if x.is_cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        graph.replay()
        torch.cuda.synchronize()
        replay, replays = graph.replay, REPLAYS
    tp.min_int(0)  # all begin together
    begin_s = time.perf_counter()
    for _ in range(replays):
        replay()
    if x.is_cuda:
        torch.cuda.synchronize()
    mine_ns = (time.perf_counter() - begin_s) / (SUMS * replays) * 1e9
    return -tp.min_int(-int(mine_ns)) / 1e3


def part_of(rank: int, rows: int, width: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1000 * rows + rank)
    return torch.randn(rows, width, generator=generator, device=device).to(torch.bfloat16)


def sum_of(ranks: int, rows: int, width: int, device: torch.device) -> Tensor:
    """In rank order, rounded once."""
    total = part_of(0, rows, width, device).float()
    for rank in range(1, ranks):
        total += part_of(rank, rows, width, device).float()
    return total.to(torch.bfloat16)


def copied_bytes_s(device: torch.device) -> float | None:
    """From this GPU to the next; None where there is none."""
    if device.type != "cuda":
        return None
    here = torch.ones(COPIED, dtype=torch.uint8, device=device)
    there = torch.empty_like(here, device=torch.device("cuda", 1))
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    return COPIED / min(times)


def by_memory(tp: TensorParallel, x: Tensor) -> bool:
    return tp._peers is not None and (tp._peers.add(x) is not None or tp._peers.add_large(x) is not None)


def measure(rank: int, options: argparse.Namespace) -> None:
    """On one rank. The first one prints."""
    has_gpus = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    backend: Backend = "nccl" if has_gpus else "gloo"

    def join(name: str, maps_peers: bool) -> TensorParallel:
        meeting, most = str(Path(options.folder) / name), 2 * max(options.rows) * options.width
        return init_tensor_parallel(
            rank, options.ranks, meeting, backend, device, TIMEOUT_S, maps_peers, most_sum_bytes=most
        )

    ways: dict[str, TensorParallel] = {backend: join("group", maps_peers=False)}
    if has_gpus:
        ways["memory"] = join("peers", maps_peers=True)
    link = copied_bytes_s(device) if rank == 0 else None
    if rank == 0:
        rate = f"; {link / 1e9:.0f} GB/s from one to the next" if link else ""
        print(f"{options.ranks} ranks on {device.type}{rate}; {limits.versions()}", flush=True)
    lines: list[dict[str, object]] = []
    for rows in options.rows:
        x, expected = part_of(rank, rows, options.width, device), sum_of(options.ranks, rows, options.width, device)
        for way, tp in ways.items():
            if way == "memory" and not by_memory(tp, x):
                continue  # it would go through the group
            if not torch.equal(tp.all_reduce(x), expected):
                raise SystemExit(f"rank {rank}: a wrong sum of {rows} rows by {way}")
            took_us = microseconds_of(tp.all_reduce, x, tp)
            limit_us = (options.ranks - 1) * x.nbytes / link * 1e6 if link else None
            lines.append({"rows": rows, "way": way, "us": took_us, "limit_us": limit_us})
            if rank == 0:
                beside = f"  limit {limit_us:7.2f}  ratio {took_us / limit_us:.2f}" if limit_us else ""
                print(f"{rows:4} rows  {way:6} {took_us:8.2f} µs{beside}", flush=True)
    if rank == 0:
        record: dict[str, object] = {"benchmark": "rank_sums", "ranks": options.ranks, "width": options.width}
        limits.write_jsonl(options.jsonl, {**record, "lines": lines, "versions": limits.versions()})


def run_ranks(module: str, count: int) -> int:
    """Run the ranks of a benchmark with the arguments of this command, and return their exit code. They end with the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(count)]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.1)
            return max(abs(code or 0) for code in codes)
        finally:
            for rank in ranks:
                rank.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=limits.numbers, default="1,16,64,256", help="of tokens, one or more")
    parser.add_argument("--width", type=int, default=4096, help="of the model's stream, in bfloat16")
    parser.add_argument("--jsonl", help="append the result to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.ranks - 1, options.width, *options.rows) < 1:
        parser.error("--ranks takes numbers from 2 on, --rows and --width from 1 on")
    if options.rank is not None:
        with torch.inference_mode():
            measure(options.rank, options)
        sys.stdout.flush()
        os._exit(0)  # NCCL would wait for who is gone
    return run_ranks("benchmarks.rank_sums", options.ranks)


if __name__ == "__main__":
    raise SystemExit(main())
