"""One of some ranks that add up large tensors in each other's memory: `python -m tests.gpu.large_sum_ranks CASES RANK RANKS RENDEZVOUS`.

It says `done`, or what is wrong.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks import models
from benchmarks.prompt_chunks import Chunks
from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.distributed.rendezvous import init_tensor_parallel
from srt.kernels.collectives.large_sum import UNIT_BYTES, LargeSums
from srt.kernels.collectives.peer_sum import MOST_BYTES
from srt.kernels.elementwise.rms_norm import add_rms_norm
from srt.model_executor.startup.start_runner import start_runner
from srt.server_args import parse_args
from srt.utils.model_config import ModelConfig
from tests.gpu.peer_ranks import DTYPES, Delay, check, part_of, sum_of
from tests.support.runners import logits_in

SHAPES = (
    *((257, 4096), (300, 4096), (1000, 4096), (2049, 4096), (8192, 4096)),
    *((1025, 1024), (4097, 1024), (700, 2560), (3000, 2560), (400, 5120), (131, 8192), (2500, 8192), (8200, 4096)),
)
BOXED = {"large": 8192 * 4096 * 2, "pieces": 5 << 20}
"""Bytes for which each case has boxes; larger sums take several launches."""


def ways_of(sums: LargeSums) -> Iterator[LargeSums]:
    """Whole and divided, with units and senders of several numbers: all of them on the same boxes."""
    for is_divided in {sums.is_divided, True}:
        for unit_bytes in (UNIT_BYTES, UNIT_BYTES // 2 + 16):
            for senders in (128, 40):
                yield replace(sums, is_divided=is_divided, unit_bytes=unit_bytes, senders=senders)


def check_sum(tp: TensorParallel, peers: PeerMemory, number: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The sum and its norm, to the bit: the norm is that of the kernel for norms but for the order in which squares are added."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    part = part_of(tp.rank, number, num_bytes, dtype).view(shape)
    expected = sum_of(tp.size, number, num_bytes, dtype).view(shape)
    added = peers.add_large(part)
    check(added is not None and torch.equal(added, expected), "sum", shape, dtype, peers._large)
    if shape[1] * dtype.itemsize > 16384:
        check(peers.add_and_norm(part, expected, expected[0], 1e-6) is None, "a row has no room", shape, dtype)
        return
    hidden, weight = part_of(7, number, num_bytes, dtype).view(shape), part_of(8, 0, shape[1] * dtype.itemsize, dtype)
    formed = peers.add_and_norm(part, hidden, weight, 1e-6)
    assert formed is not None, (shape, dtype)
    normed, total = add_rms_norm(hidden, expected, weight, 1e-6)
    check(torch.equal(formed[1], total), "sum of the stream", shape, dtype, peers._large)
    most = max(2 * torch.finfo(dtype).eps, 1e-5)
    check(torch.allclose(formed[0].float(), normed.float(), rtol=most, atol=most), "norm", shape, dtype, peers._large)
    # All ranks have the same bits.
    words = formed[0].contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32).long()
    places = torch.arange(words.numel(), device=words.device).view_as(words) % 8191 + 1
    check(len(set(tp.gather_ints(int((words * places).sum())))) == 1, "norms of all ranks", shape, dtype)


def large(tp: TensorParallel) -> None:
    """All shapes in every way and type, between small sums, while ranks are late."""
    peers = peers_of(tp)
    delay, same = Delay(tp.rank), random.Random(7)
    assert peers._large is not None
    ways = list(ways_of(peers._large))
    for number in range(3 * len(ways)):
        peers._large = ways[number % len(ways)]
        for shape in same.sample(SHAPES, 3):
            delay()
            dtype = same.choice((torch.bfloat16, *DTYPES))
            if shape[0] * shape[1] * dtype.itemsize > MOST_BYTES:
                check_sum(tp, peers, same.randrange(1 << 20), shape, dtype)
            few = part_of(tp.rank, number, 4096, dtype)
            check(torch.equal(tp.all_reduce(few), sum_of(tp.size, number, 4096, dtype)), "a small sum between", number)
    check(peers.add_large(torch.zeros(MOST_BYTES // 2, dtype=torch.bfloat16, device=tp.device)) is None, "small ones")


def sums(tp: TensorParallel) -> None:
    """Many in a row without a look at the results; then all are compared with those of NCCL."""
    peers, delay, same = peers_of(tp), Delay(tp.rank), random.Random(9)
    shapes = [same.choice(SHAPES) for _ in range(24)]
    parts = [part_of(tp.rank, n, 2 * shape[0] * shape[1], torch.bfloat16).view(shape) for n, shape in enumerate(shapes)]
    ours: list[torch.Tensor] = []
    for part in parts:
        delay()
        ours.append(tp.all_reduce(part))
    tp._peers = None
    theirs = [tp.all_reduce(part) for part in parts]
    tp._peers = peers
    are_equal = all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    if tp.rank == 0:
        print(f"sums as nccl {are_equal}", flush=True)
    check(are_equal, "sums of NCCL")


def graph(tp: TensorParallel) -> None:
    """Large sums between small ones in a graph that is replayed on new numbers, and others beside it."""
    peers = peers_of(tp)
    delay = Delay(tp.rank)
    works = [(shape, torch.bfloat16) for shape in ((300, 4096), (8, 4096), (2049, 4096), (1025, 1024), (64, 1024))]
    inputs = [part_of(tp.rank, 0, 2 * rows * width, dtype).view(rows, width) for (rows, width), dtype in works]
    weight = part_of(8, 0, 2 * 4096, torch.bfloat16)
    outputs: list[torch.Tensor] = []

    def run() -> None:
        outputs.clear()
        for x in inputs:
            delay()
            outputs.append(tp.all_reduce(x))
        formed = peers.add_and_norm(inputs[2], inputs[2], weight, 1e-6)
        assert formed is not None
        outputs.append(tp.all_reduce(formed[1]))

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        run()
    for number in range(60):
        for x, ((rows, width), dtype) in zip(inputs, works, strict=True):
            x.copy_(part_of(tp.rank, number, 2 * rows * width, dtype).view(rows, width))
        captured.replay()
        check_sum(tp, peers, number, (400, 5120), torch.bfloat16)
        delay()
        expected = [sum_of(tp.size, number, 2 * rows * width, dtype) for (rows, width), dtype in works]
        for output, one, work in zip(outputs, expected, works, strict=False):
            check(torch.equal(output.view(-1), one), "captured", number, work)
        parts = [part_of(rank, number, 2 * 2049 * 4096, torch.bfloat16) + expected[2] for rank in range(tp.size)]
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        check(torch.equal(outputs[-1].view(-1), total.to(torch.bfloat16)), "chained", number)


def gone(tp: TensorParallel) -> None:
    """Rank 1 leaves while rank 0 waits for it."""
    peers_of(tp)
    x = torch.ones(1024, 4096, dtype=torch.bfloat16, device=tp.device)
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


def halves(tp: TensorParallel) -> None:
    """Many sums one after the other, each rank finishing half of the rows, while ranks and their copies are late."""
    peers, delay, same = peers_of(tp), Delay(tp.rank), random.Random(11)
    # What makes the copies late must need no multiprocessor: kernels that wait have all of them.
    late, slow = random.Random(tp.rank), torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
    arrived = torch.empty_like(slow, device=tp.device)
    for number in range(40):
        rows, columns = same.choice(((2048, 4096), (2049, 4096), (3000, 1024), (4097, 2560), (8192, 4096)))
        dtype = same.choice((torch.bfloat16, *DTYPES)) if rows < 8192 else torch.bfloat16
        division = peers.divide(rows, columns, dtype, is_alone=False)
        assert division is not None, (rows, columns)
        hidden, weight = (
            part_of(7, number, rows * columns * dtype.itemsize, dtype).view(rows, columns),
            part_of(8, 0, columns * dtype.itemsize, dtype),
        )
        works, formed = [3 * number + i for i in range(3)], []
        for work in works:
            part = part_of(tp.rank, work, rows * columns * dtype.itemsize, dtype).view(rows, columns)
            delay()
            with torch.cuda.stream(division._divisions._copies):
                size = late.randrange(len(slow))
                arrived[:size].copy_(slow[:size], non_blocking=True)
            division.begin_sum().copy_(part[division.others])
            division.send_part()
            delay()
            normed = division.finish_sum(part[division.own].clone(), hidden, weight, 1e-6)
            delay()
            division.await_others()
            formed.append(normed.clone())
        expected = part_of(7, number, rows * columns * dtype.itemsize, dtype).view(rows, columns)
        for work, normed in zip(works, formed, strict=True):
            part = part_of(tp.rank, work, rows * columns * dtype.itemsize, dtype).view(rows, columns)
            whole = peers.add_and_norm(part, expected, weight, 1e-6)
            assert whole is not None
            expected = whole[1]
            check(torch.equal(normed, whole[0]), "norm", number, rows, dtype)
        check(torch.equal(hidden[division.own], expected[division.own]), "stream", number, rows, dtype)


def model(tp: TensorParallel) -> None:
    """Layers of a real shape compute the same bits whether their rows are divided or not, in chunks of several sizes."""
    peers = peers_of(tp)
    divisions = peers._divisions
    assert divisions is not None
    words = ["--model-path", models.folder_of("llama-3.1-8b"), "--load-format", "dummy", "--tp", "2"]
    words += ["--json-model-override-args", '{"num_hidden_layers": 4}', "--chunked-prefill-size", "8192"]
    words += ["--max-total-tokens", "16384", "--max-running-requests", "8", "--disable-cuda-graph"]
    args = parse_args(words)
    config = ModelConfig.from_folder(args.model_path, args.model_overrides())
    runner = start_runner(args, config, args.model_path, tp, tp.device)
    for tokens, prompts in ((8192, 2), (6000, 3), (4800, 1), (8192, 1)):
        chunks, found = Chunks(runner, tokens, prompts), []
        for way in (divisions, None, divisions):
            peers._divisions, before = way, divisions.number
            runner.reset()
            executed = runner.execute(chunks._section)
            found.append(logits_in(executed).clone())
            runner.sample(executed).result()
            check(divisions.number - before == (0 if way is None else 6), "sums of divided rows", tokens)
        check(torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), "logits", tokens)


def gone_halves(tp: TensorParallel) -> None:
    """Rank 1 leaves while rank 0 waits for its part of a divided sum."""
    peers = peers_of(tp)
    x = torch.ones(2048, 4096, dtype=torch.bfloat16, device=tp.device)
    division = peers.divide(2048, 4096, x.dtype, is_alone=False)
    assert division is not None
    if tp.rank == 1:
        return
    division.begin_sum().fill_(1)
    division.send_part()
    try:
        with tp.naming_lost_peer():
            division.finish_sum(x[division.own].clone(), x, x[0].clone(), 1e-6).sum().item()
    except CollectiveError as error:
        check(str(error).startswith("rank 0 lost the others: rank 1 sent nothing for 3 s"), str(error))
    else:
        check(False, "a divided sum without a peer")


def peers_of(tp: TensorParallel) -> PeerMemory:
    peers = tp._peers
    check(peers is not None and peers._large is not None, "no memory of peers")
    assert peers is not None
    return peers


CASES = {
    "large": large,
    "pieces": large,
    "sums": sums,
    "graph": graph,
    "halves": halves,
    "model": model,
    "gone": gone,
    "gone-halves": gone_halves,
}


def main(cases: str, rank: int, size: int, rendezvous: str) -> None:
    """Run the cases, which are divided by commas, each with memory of its own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = []  # none is left before the end: after `gone` the device would refuse what NCCL does then
    with torch.inference_mode():
        for case in cases.split(","):
            timeout_s, most = 3.0 if case.startswith("gone") else 60.0, BOXED.get(case, BOXED["large"])
            begin_s = time.perf_counter()
            point, divided = f"{rendezvous}-{case}", most + (4 << 20)
            groups.append(
                init_tensor_parallel(
                    rank,
                    size,
                    point,
                    "nccl",
                    device,
                    timeout_s,
                    most_sum_bytes=most,
                    most_divided_bytes=divided,
                )
            )
            CASES[case](groups[-1])  # graphs end before it does: NCCL would wait for them
            print(f"{case}: {time.perf_counter() - begin_s:.1f} s", flush=True)
    print("done", flush=True)
    os._exit(0)  # NCCL would wait for who is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
