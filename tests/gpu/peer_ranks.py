"""One of some ranks whose GPUs write each other's memory: `python -m tests.gpu.peer_ranks CASE RANK RANKS RENDEZVOUS`.

It says `done`, or what is wrong.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import CudaMemory
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.distributed.peer_setup import open_peer_memory
from srt.distributed.rendezvous import init_tensor_parallel
from srt.kernels.collectives.peer_sum import MOST_BYTES, PROGRAMS
from srt.kernels.elementwise.rms_norm import add_rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (
    *(8, 16, 1000, 4096, 4104, 8192, 32768, 131072, 131080, 400000, 524288, 524296, 1048576, 1048584, MOST_BYTES),
    *(2560 * 4, 2560 * 12, 2560 * 128, 2560 * 256),
)
NORM_WIDTH = 2560  # in more than one box, and not a multiple of one
FIRST_RUNS = {"few": 1, "renewal": (1 << 20) - 100, "overflow": -100}


def part_of(rank: int, number: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Any rank knows any rank's: numbers of all magnitudes, so that the order of addition shows."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(1000 * number + rank)
    count = num_bytes // dtype.itemsize
    scales = torch.randint(-6, 7, (count,), generator=generator, device=device)
    return (torch.randn(count, generator=generator, device=device) * torch.exp2(scales)).to(dtype)


def sum_of(size: int, number: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    total = part_of(0, number, num_bytes, dtype).float()
    for rank in range(1, size):
        total += part_of(rank, number, num_bytes, dtype).float()
    return total.to(dtype)


def check_normed(
    peers: PeerMemory, size: int, part: torch.Tensor, number: int, num_bytes: int, dtype: torch.dtype
) -> None:
    """The sum to the bit, its norm as the kernel for norms has it."""
    rows = part.view(-1, NORM_WIDTH)
    hidden, weight = (
        part_of(7, number, num_bytes, dtype).view_as(rows),
        part_of(8, 0, NORM_WIDTH * dtype.itemsize, dtype),
    )
    formed = peers.add_and_norm(rows, hidden, weight, 1e-6)
    check((formed is not None) == (1 < len(rows) <= PROGRAMS), "normed at all", rows.shape, dtype)
    if formed is None:
        return
    normed, total = add_rms_norm(hidden, sum_of(size, number, num_bytes, dtype).view_as(rows), weight, 1e-6)
    check(torch.equal(formed[1], total), "sum of the stream", rows.shape, dtype)
    # Squares are added in another order.
    most = max(2 * torch.finfo(dtype).eps, 1e-5)
    check(torch.allclose(formed[0].float(), normed.float(), rtol=most, atol=most), "norm", rows.shape, dtype)


class Delay:
    """Other work on the device, of a length that is this rank's own."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)
        self._matrix = torch.randn(2048, 2048, device="cuda")

    def __call__(self) -> None:
        if self._random.random() < 0.5:
            for _ in range(self._random.choice((1, 1, 2, 8))):
                torch.mm(self._matrix, self._matrix)


def check(is_right: bool, *what: object) -> None:
    if not is_right:
        raise SystemExit(f"wrong: {what}")


def eager(tp: TensorParallel, first_run: int) -> None:
    """Many in a row without a look at the results, of sizes in any order, which all ranks choose alike."""
    memory = CudaMemory(tp.device)
    peers = open_peer_memory(tp, lambda: memory, timeout_s=60, first_run=first_run)
    check(peers is not None, "no memory of peers")
    assert peers is not None
    peers._medium = None  # medium_sum_ranks.py has their test
    delay, same = Delay(tp.rank), random.Random(7)
    for _ in range(20):
        works = [(same.randrange(1 << 20), same.choice(BYTES), same.choice(DTYPES)) for _ in range(40)]
        parts = [part_of(tp.rank, *work) for work in works]
        results = []
        for part in parts:
            delay()
            results.append((peers.add(part), peers.gather(part)))
            if part.numel() % NORM_WIDTH == 0:
                check_normed(peers, tp.size, part, *works[len(results) - 1])
        for work, (added, gathered) in zip(works, results, strict=True):
            assert added is not None and gathered is not None
            check(torch.equal(added, sum_of(tp.size, *work)), "sum", work)
            every = torch.stack([part_of(rank, *work) for rank in range(tp.size)])
            check(torch.equal(gathered.view(torch.uint8), every.view(torch.uint8)), "gathered", work)
    peers.close()


def graph(tp: TensorParallel) -> None:
    """Sums between sums, some of them NCCL's, in a graph that is replayed on new numbers, and others beside it."""
    check(tp._peers is not None, "no memory of peers")
    delay, same = Delay(tp.rank), random.Random(8)
    works = [(same.choice((*BYTES, 3 * MOST_BYTES)), same.choice(DTYPES)) for _ in range(30)]
    inputs = [part_of(tp.rank, 0, *work) for work in works]
    outputs: list[torch.Tensor] = []

    def run() -> None:
        outputs.clear()
        for x in inputs:
            delay()
            outputs.append(tp.all_reduce(x))
        # One that needs the one before, and what ranks gather.
        outputs.append(tp.all_reduce(outputs[-1] * 0.5))
        outputs.append(tp.all_gather(outputs[0].unsqueeze(0), dim=0))

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        run()
    for number in range(150):
        for x, work in zip(inputs, works, strict=True):
            x.copy_(part_of(tp.rank, number, *work))
        captured.replay()
        beside = tp.all_reduce(part_of(tp.rank, number, 512, torch.float32))
        delay()
        sums = [sum_of(tp.size, number, *work) for work in works]
        for output, expected, work in zip(outputs, sums, works, strict=False):
            check(torch.equal(output, expected), "captured", number, work)
        half = (sums[-1] * 0.5).float()
        chained = sum([half] * (tp.size - 1), half).to(sums[-1].dtype)
        check(torch.equal(outputs[-2], chained), "chained", number)
        check(torch.equal(outputs[-1], torch.stack([sums[0]] * tp.size)), "gathered", number)
        check(torch.equal(beside, sum_of(tp.size, number, 512, torch.float32)), "beside", number)


def dead(tp: TensorParallel) -> None:
    """Rank 1 leaves while rank 0 waits for it."""
    check(tp._peers is not None, "no memory of peers")
    x = torch.ones(4096, dtype=torch.bfloat16, device=tp.device)
    check(tp.all_reduce(x).sum().item() == tp.size * 4096, "the first sum")
    if tp.rank == 1:
        return
    try:
        with tp.naming_lost_peer():
            tp.all_reduce(x).sum().item()
    except CollectiveError as error:
        check(str(error).startswith("rank 0 lost the others: rank 1 sent nothing for 3 s"), str(error))
    else:
        check(False, "a sum without a peer")


def main(case: str, rank: int, size: int, rendezvous: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    timeout_s = 3.0 if case == "dead" else 60.0
    works: dict[str, Callable[[TensorParallel], None]] = {"graph": graph, "dead": dead}
    works |= {name: lambda tp, run=run: eager(tp, run) for name, run in FIRST_RUNS.items()}  # type: ignore[misc]
    with torch.inference_mode():
        tp = init_tensor_parallel(rank, size, rendezvous, "nccl", device, timeout_s)
        works[case](tp)  # graphs end before it does: NCCL would wait for them
    print("done", flush=True)
    os._exit(0)  # NCCL would wait for who is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
