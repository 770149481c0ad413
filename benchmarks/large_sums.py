"""Sums over the GPUs of a host, as prompts and steps have them: microseconds of one, by NCCL and by memory that ranks write for each other.

    python -m benchmarks.large_sums [--ranks 2] [--rows 512,2048,8192] [--width 4096] [--choices]

    nccl              NCCL gathers the parts, and a kernel adds them; behind it the kernel that adds the residual stream and norms
    letters           the kernel that sends the number of the launch with each 4 bytes (peer_sum); where it has no room for the rows, the
                      kernel that norms behind it
    medium            one kernel that sends nothing but the data (medium_sum); both only for what has room
    whole, divided    one kernel that sends, receives and adds, in both of its ways; alone, and with the residual stream and the norm.
                      Three or four ranks only divide

All ways of a size take turns, in graphs of a few sums. The best round of each counts, on the slowest rank. Each rank checks the results:
sums to the bit, norms to their precision. `--choices` also tries other numbers of programs that send, and units of other sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import limits
from benchmarks.rank_sums import TIMEOUT_S, copied_bytes_s, part_of, run_ranks, sum_of
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.distributed.rendezvous import init_tensor_parallel
from srt.kernels.collectives import medium_sum, peer_sum
from srt.kernels.collectives.large_sum import LargeSums
from srt.kernels.elementwise.rms_norm import add_rms_norm

SUMS = 8  # in a graph
SMALL_SUMS = 64  # in a graph, if each has at most SMALL bytes
SMALL = 4 << 20
REPLAYS = 6  # in a round
ROUNDS = 4
EPS = 1e-5
Act = Callable[[], tuple[Tensor, Tensor | None]]  # returns the sum or the stream, and the norm


class Ways:
    """The ways to add up one tensor."""

    def __init__(self, tp: TensorParallel, nccl: TensorParallel, x: Tensor) -> None:
        assert tp._peers is not None and tp._peers._large is not None, "the GPUs cannot write each other's memory"
        self._nccl = nccl
        self._x = x
        self._peers: PeerMemory = tp._peers
        self._large: LargeSums = tp._peers._large
        self.hidden = part_of(11, x.shape[0], x.shape[1], x.device)
        self.weight = part_of(12, 1, x.shape[1], x.device)[0]

    def all(self, has_choices: bool) -> Iterator[tuple[str, Act]]:
        yield "nccl", lambda: (self._nccl.all_reduce(self._x), None)
        yield "nccl, norm", self._normed_behind_nccl
        yield from self._small()
        large = self._large
        # The boxes of three or four ranks have no room for whole sums. Few rows have fewer pieces than there are ranks.
        for is_divided in sorted({large.is_divided, True} if self._x.nbytes >= SMALL else {large.is_divided} - {True}):
            name, chosen = "divided" if is_divided else "whole", replace(large, is_divided=is_divided)
            yield name, self._added(chosen)
            yield f"{name}, norm", self._normed(chosen)
            for senders, unit_kib in ((64, 32), (192, 32), (128, 16), (128, 64)) if has_choices else ():
                other = replace(chosen, senders=senders, unit_bytes=unit_kib << 10)
                yield f"{name}, norm, {senders} senders, {unit_kib} KiB", self._normed(other)

    def _small(self) -> Iterator[tuple[str, Act]]:
        x, mail, ranks, medium = self._x, self._peers._mail, self._large.ranks, self._peers._medium
        assert medium is not None
        if peer_sum.is_summable(x.dtype, x.nbytes, ranks):
            yield "letters", lambda: (peer_sum.add_parts(x, mail, ranks), None)
            yield "letters, norm", self._normed_by_letters
        if medium_sum.is_summable(x.dtype, x.nbytes, ranks):
            yield "medium", lambda: (medium.add(x), None)
        if medium_sum.is_normable(x.dtype, len(x), x[0].nbytes, ranks):
            yield "medium, norm", lambda: swapped(medium.add_and_norm(x, self.hidden, self.weight, EPS))

    def _normed_by_letters(self) -> tuple[Tensor, Tensor]:
        x, mail, ranks = self._x, self._peers._mail, self._large.ranks
        if peer_sum.is_normable(x.dtype, len(x), x[0].nbytes, ranks):
            return swapped(peer_sum.add_parts_and_norm(x, self.hidden, self.weight, EPS, mail, ranks))
        return swapped(add_rms_norm(self.hidden, peer_sum.add_parts(x, mail, ranks), self.weight, EPS))

    def _normed_behind_nccl(self) -> tuple[Tensor, Tensor]:
        return swapped(add_rms_norm(self.hidden, self._nccl.all_reduce(self._x), self.weight, EPS))

    def _added(self, large: LargeSums) -> Act:
        return lambda: (large.add(self._x), None)

    def _normed(self, large: LargeSums) -> Act:
        return lambda: swapped(large.add_and_norm(self._x, self.hidden, self.weight, EPS))


def swapped(both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return both[1], both[0]


def check(act: Act, expected: Tensor, ways: Ways) -> None:
    found, normed = act()
    if normed is None:
        assert torch.equal(found, expected), "a wrong sum"
        return
    right, total = add_rms_norm(ways.hidden, expected, ways.weight, EPS)
    assert torch.equal(found, total), "a wrong stream"
    assert torch.allclose(normed.float(), right.float(), rtol=0.02, atol=0.02), "a wrong norm"


def captured(act: Act, num_sums: int) -> torch.cuda.CUDAGraph:
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_sums):
            act()
    return graph


def microseconds_of(graph: torch.cuda.CUDAGraph, num_sums: int, tp: TensorParallel) -> float:
    """Return the microseconds of one sum, on the slowest rank."""
    graph.replay()
    torch.cuda.synchronize()
    tp.min_int(0)  # all begin together
    begin_s = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    mine_ns = (time.perf_counter() - begin_s) / (num_sums * REPLAYS) * 1e9
    return -tp.min_int(-int(mine_ns)) / 1e3


def measure(rank: int, options: argparse.Namespace) -> None:
    """On one rank. The first one prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    most = max(2 * max(options.rows) * options.width, peer_sum.MOST_BYTES + 1)  # so that there are boxes for large sums

    def join(name: str, maps_peers: bool) -> TensorParallel:
        meeting = str(Path(options.folder) / name)
        return init_tensor_parallel(
            rank, options.ranks, meeting, "nccl", device, TIMEOUT_S, maps_peers, most_sum_bytes=most
        )

    nccl, tp = join("group", maps_peers=False), join("peers", maps_peers=True)
    link = copied_bytes_s(device) if rank == 0 else None
    if rank == 0 and link:
        card = limits.measure()
        rates = f"{card.read_bytes_s / 1e12:.2f} TB/s, {card.matmul_flops_s / 1e12:.0f} TFLOP/s"
        print(f"RESULT card reads {rates}; {link / 1e9:.0f} GB/s to the next; {limits.versions()}", flush=True)
    torch.cuda.empty_cache()
    nccl.min_int(0)
    lines: list[dict[str, object]] = []
    for rows in options.rows:
        x, expected = part_of(rank, rows, options.width, device), sum_of(options.ranks, rows, options.width, device)
        ways = Ways(tp, nccl, x)
        graphs, num_sums = {}, SMALL_SUMS if x.nbytes <= SMALL else SUMS
        for name, act in ways.all(options.choices and rows == max(options.rows)):
            check(act, expected, ways)
            graphs[name] = captured(act, num_sums)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(microseconds_of(graph, num_sums, nccl))
        for name, found in times.items():
            lines.append({"rows": rows, "way": name, "us": min(found), "us_of_rounds": found})
            if rank == 0:
                rate = x.nbytes / min(found) / 1e3
                print(
                    f"RESULT sum {rows} rows {x.nbytes >> 10} KiB {name}: {min(found):.1f} µs, {rate:.0f} GB/s",
                    flush=True,
                )
        graphs.clear()
    if rank == 0:
        record: dict[str, object] = {"benchmark": "large_sums", "ranks": options.ranks, "width": options.width}
        limits.write_jsonl(options.jsonl, {**record, "lines": lines, "versions": limits.versions()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=limits.numbers, default="512,2048,8192", help="of tokens, one or more")
    parser.add_argument("--width", type=int, default=4096, help="of the model's stream, in bfloat16")
    parser.add_argument("--choices", action="store_true", help="also other programs and units, for the most rows")
    parser.add_argument("--jsonl", help="append the result to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 2 <= options.ranks <= 4 or min(options.width, *options.rows) < 1:
        parser.error("--ranks takes 2 to 4, --rows and --width numbers from 1 on")
    if options.rank is not None:
        with torch.inference_mode():
            measure(options.rank, options)
        sys.stdout.flush()
        os._exit(0)  # NCCL would wait for who is gone
    if torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks} needs as many GPUs, and PyTorch sees {torch.cuda.device_count()}")
    return run_ranks("benchmarks.large_sums", options.ranks)


if __name__ == "__main__":
    raise SystemExit(main())
