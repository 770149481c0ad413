"""One of some ranks that add up medium tensors in each other's memory: `python -m tests.gpu.medium_sum_ranks CASES RANK RANKS RENDEZVOUS`.

It says `done`, or what is wrong.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.distributed.rendezvous import init_tensor_parallel
from srt.kernels.collectives.medium_sum import MediumSums, is_normable, is_summable
from srt.kernels.collectives.peer_sum import add_parts
from srt.kernels.collectives.peer_sum import is_summable as is_small
from tests.gpu.peer_ranks import DTYPES, Delay, check, part_of, sum_of

SHAPES = (
    *((1, 8), (1, 4096), (2, 4096), (3, 4096), (33, 4096), (64, 4096), (128, 4096), (129, 4096), (255, 4096)),
    *((256, 4096), (257, 4096), (384, 4096), (512, 4096), (5, 1024), (200, 1024), (511, 1024), (7, 2560), (300, 2560)),
    *((2, 5120), (100, 5120), (256, 5120), (9, 8192), (140, 8192), (255, 8192), (20, 12288), (128, 12288), (31, 16384)),
)


def check_sum(tp: TensorParallel, peers: PeerMemory, number: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The sum to the bit, and its norm but for the order in which squares are added."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if not is_summable(dtype, num_bytes, tp.size):
        return
    part = part_of(tp.rank, number, num_bytes, dtype).view(shape)
    expected = sum_of(tp.size, number, num_bytes, dtype).view(shape)
    # Made before the look at the sum: the kernel reads weights before it waits for the kernel in front of it.
    hidden, weight = part_of(7, number, num_bytes, dtype).view(shape), part_of(8, 0, shape[1] * dtype.itemsize, dtype)
    check(torch.equal(tp.all_reduce(part), expected), "sum", shape, dtype)
    if not is_normable(dtype, shape[0], shape[1] * dtype.itemsize, tp.size):
        return
    formed = peers.add_and_norm(part, hidden, weight, 1e-6)
    assert formed is not None, (shape, dtype)
    total = hidden + expected
    check(torch.equal(formed[1], total), "sum of the stream", shape, dtype)
    wide = total.float()  # by PyTorch, which compiles nothing for each width
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)
    most = max(2 * torch.finfo(dtype).eps, 1e-5)
    check(torch.allclose(formed[0].float(), normed.float(), rtol=most, atol=most), "norm", shape, dtype)
    # All ranks have the same bits.
    words = formed[0].contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32).long()
    places = torch.arange(words.numel(), device=words.device).view_as(words) % 8191 + 1
    check(len(set(tp.gather_ints(int((words * places).sum())))) == 1, "norms of all ranks", shape, dtype)


def sums(tp: TensorParallel) -> None:
    """All shapes in every type, between gathers and smaller sums, while ranks are late."""
    peers, delay, same = peers_of(tp), Delay(tp.rank), random.Random(7)
    works = [(shape, dtype) for shape in SHAPES for dtype in (torch.bfloat16, *DTYPES)]
    same.shuffle(works)
    for number, (shape, dtype) in enumerate(works):
        delay()
        check_sum(tp, peers, number, shape, dtype)
        few = part_of(tp.rank, number, 8, dtype)  # too few bytes for a word
        check(torch.equal(tp.all_reduce(few), sum_of(tp.size, number, 8, dtype)), "a small sum between", number)
        every = torch.stack([part_of(rank, number, 4096, dtype) for rank in range(tp.size)])
        check(torch.equal(tp.all_gather(every[tp.rank : tp.rank + 1], dim=0), every), "gathered", number)


def row(tp: TensorParallel) -> None:
    """Many in a row without a look at the results, some with NaNs of all kinds; then all bits are compared with those of peer_sum."""
    peers, delay, same = peers_of(tp), Delay(tp.rank), random.Random(9)
    for dtype in DTYPES:
        words = torch.int16 if dtype.itemsize == 2 else torch.int32
        parts = []
        for number in range(60):
            num_bytes = 16 * same.choice((1, 3, 512, 513, 8192, 40000, 65536, 65537, 100000, 131072))
            part = part_of(tp.rank, number, num_bytes, dtype)
            if number % 2:
                drawn = torch.rand(len(part), device=part.device)
                for bits, share in ((-1, 0.1), (2 ** (8 * dtype.itemsize - 1) - 1, 0.1), (-2, 0.05), (0, 0.05)):
                    part.view(words)[drawn < share] = bits
                    drawn = drawn - share + (drawn < share)
                part[: len(part) // 8].view(words).fill_(-1)  # places where nothing has arrived look so
            parts.append(part)
        ours: list[torch.Tensor] = []
        for part in parts:
            delay()
            ours.append(tp.all_reduce(part))
        for number, (part, one) in enumerate(zip(parts, ours, strict=True)):
            assert is_small(dtype, part.nbytes, tp.size), part.nbytes
            theirs = add_parts(part, peers._mail, tp.size)
            check(torch.equal(one.view(words), theirs.view(words)), "bits of peer_sum", number, dtype)


def graph(tp: TensorParallel) -> None:
    """Sums and norms of many sizes in a graph that is replayed on new numbers, and others beside it."""
    peers, delay, same = peers_of(tp), Delay(tp.rank), random.Random(8)
    shapes = [(256, 4096), (1, 4096), (32, 4096), (512, 4096), (200, 1024), (64, 4096), (2, 8192)]
    inputs = [part_of(tp.rank, 0, 2 * rows * width, torch.bfloat16).view(rows, width) for rows, width in shapes]
    hidden, weight = torch.zeros(256, 4096, dtype=torch.bfloat16, device=tp.device), part_of(8, 0, 8192, torch.bfloat16)
    outputs: list[torch.Tensor] = []
    streams: list[torch.Tensor] = []

    def run() -> None:
        outputs.clear()
        streams.clear()
        for x in inputs:
            delay()
            outputs.append(tp.all_reduce(x))
        stream = hidden
        for _ in range(4):  # each needs the one before
            formed = peers.add_and_norm(inputs[0], stream, weight, 1e-6)
            assert formed is not None
            stream = formed[1]
        streams.append(stream)

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        run()
    for number in range(60):
        for x, (rows, width) in zip(inputs, shapes, strict=True):
            x.copy_(part_of(tp.rank, number, 2 * rows * width, torch.bfloat16).view(rows, width))
        captured.replay()
        check_sum(tp, peers, number, same.choice(SHAPES), torch.bfloat16)
        delay()
        expected = [sum_of(tp.size, number, 2 * rows * width, torch.bfloat16) for rows, width in shapes]
        for output, one, shape in zip(outputs, expected, shapes, strict=True):
            check(torch.equal(output.view(-1), one), "captured", number, shape)
        total = torch.zeros_like(expected[0])
        for _ in range(4):
            total = total + expected[0]
        check(torch.equal(streams[0].view(-1), total), "chained", number)


def gone(tp: TensorParallel) -> None:
    """Rank 1 leaves while rank 0 waits for it."""
    peers_of(tp)
    x = torch.ones(256, 4096, dtype=torch.bfloat16, device=tp.device)
    check(bool((tp.all_reduce(x) == tp.size).all()), "the first sum")
    if tp.rank == 1:
        return
    try:
        with tp.naming_lost_peer():
            tp.all_reduce(x).sum().item()
    except CollectiveError as error:
        check(str(error).startswith("rank 0 lost the others: rank 1 sent nothing for 3 s"), str(error))
    else:
        check(False, "a sum without a peer")


def peers_of(tp: TensorParallel) -> PeerMemory:
    peers = tp._peers
    check(peers is not None and isinstance(peers._medium, MediumSums), "no memory of peers")
    assert peers is not None
    return peers


CASES = {"sums": sums, "row": row, "graph": graph, "gone": gone}


def main(cases: str, rank: int, size: int, rendezvous: str) -> None:
    """Run the cases, which are divided by commas, each with memory of its own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = []  # none is left before the end: after `gone` the device would refuse what NCCL does then
    with torch.inference_mode():
        for case in cases.split(","):
            begin_s = time.perf_counter()
            timeout_s = 3.0 if case == "gone" else 60.0
            groups.append(init_tensor_parallel(rank, size, f"{rendezvous}-{case}", "nccl", device, timeout_s))
            CASES[case](groups[-1])  # graphs end before it does: NCCL would wait for them
            print(f"{case}: {time.perf_counter() - begin_s:.1f} s", flush=True)
    print("done", flush=True)
    os._exit(0)  # NCCL would wait for who is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
