"""Thousands of trials of 16 probes on GPUs in the deterministic mode: of a model of real size with random weights, or of `tiny`.

    python -m tests.gpu.deterministic_trials [--model qwen3-8b] [--trials 2000] [--ordinary] [--tp-size 2]

Each row of each batch is a trial of one probe. The number of different results of each probe is printed, and the exit code is 1 if a
probe has more than one. `--ordinary` leaves the mode out, so that there must be differences. A digest of all results is the same for any
two runs with the same options that give the same results, for example with and without `--disable-custom-all-reduce`.

Each rank of `--tp-size` has a GPU; if there are fewer, all ranks take turns on one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks import models
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.rendezvous import init_tensor_parallel
from srt.layers.batch_invariant_gpu import BatchInvariantGpuOps
from srt.model_executor.model_runner import ModelRunner
from srt.utils.model_config import ModelConfig
from tests.gpu.shared_card import init_shared_card
from tests.support.invariance import Probe, make_probes, run_trials
from tests.support.runners import make_runner

PAGE_SIZE: Final = 16
LENGTHS: Final = (3, 70, 505, 1100)
KINDS: Final = ((7, (1, 3), 0.01), (64, (1, 17, 33), 0.06), (512, (3, 64, 128), 0.33), (8192, (200, 255), 0.6))
"""Largest chunks of prompts, sizes of batches, and shares of the trials."""
MOST_ROWS: Final = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument(
        "--least-chunk", type=int, default=0, help="leave out smaller chunks of prompts, which take many steps"
    )
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="leave all sums to NCCL")
    parser.add_argument(
        "--plant-norms", action="store_true", help="a fault: norm some sums over ranks where they are added up"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tp_size > 1 and options.rank is None:
        return run_ranks(options.tp_size)
    with torch.inference_mode():
        code = try_all(options, options.rank or 0)
    if options.tp_size > 1:
        sys.stdout.flush()
        os._exit(code)  # NCCL would wait for the graphs' end
    return code


def run_ranks(size: int) -> int:
    """Run this program on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.deterministic_trials", *sys.argv[1:]]
        command += ["--rendezvous", str(Path(folder) / "rendezvous"), "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
        try:
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


def try_all(options: argparse.Namespace, rank: int) -> int:
    """Run all trials on this rank, and print what rank 0 found."""
    BatchInvariantGpuOps.norms_while_summing = options.plant_norms
    is_shared = torch.cuda.device_count() < options.tp_size
    device = torch.device("cuda", 0 if is_shared else rank)
    torch.cuda.set_device(device)
    folder = Path(models.folder_of(options.model))
    runner = make_runner(
        folder,
        PAGE_SIZE,
        tp=join_ranks(options, rank, device, is_shared=is_shared),
        device=device,
        load_format="auto" if list(folder.glob("*.safetensors")) else "dummy",
        dtype="bfloat16",
        max_total_tokens=1 << 18,
        max_running_requests=MOST_ROWS,
        tp_size=options.tp_size,
        disable_cuda_graph=is_shared and options.disable_custom_all_reduce,
        enable_deterministic_inference=not options.ordinary,
    )
    runner.graphs.capture_all()
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    probes, done, most, begin_s = make_probes(16, vocab_size, lengths=LENGTHS), 0, 0, time.perf_counter()
    for seed, (chunk, batches, share) in enumerate(KINDS):
        if chunk >= options.least_chunk:
            done += run_trials(runner, probes, int(share * options.trials), PAGE_SIZE, (chunk,), batches, seed)
        most = max((probe.num_distinct for probe in probes if probe.bits), default=0)
        if not rank:
            print(
                f"{done:5} trials after {time.perf_counter() - begin_s:5.1f} s: at most {most} different results",
                flush=True,
            )
    if not rank:
        say(options, runner, probes)
    return int(most > 1)


def join_ranks(
    options: argparse.Namespace, rank: int, device: torch.device, *, is_shared: bool
) -> TensorParallel | None:
    """Return this rank's connection to the others; None if there are none."""
    size, maps_peers = options.tp_size, not options.disable_custom_all_reduce
    if size == 1:
        return None
    if is_shared:
        return init_shared_card(rank, size, options.rendezvous, device, maps_peers=maps_peers)
    most = 2 * (KINDS[-1][0] + MOST_ROWS) * ModelConfig.from_folder(models.folder_of(options.model)).hidden_size
    return init_tensor_parallel(rank, size, options.rendezvous, "nccl", device, 60.0, maps_peers, most_sum_bytes=most)


def say(options: argparse.Namespace, runner: ModelRunner, probes: Sequence[Probe]) -> None:
    distinct = [probe.num_distinct if probe.bits else 0 for probe in probes]
    ways = f"tp {options.tp_size}" + (", sums by NCCL" if options.disable_custom_all_reduce else "")
    print(f"{options.model}, {ways}, {torch.cuda.get_device_name()}: different results of each probe: {distinct}")
    print(f"digest {digest_of(probes)}", flush=True)


def digest_of(probes: Sequence[Probe]) -> str:
    """Return a hash of all results, in an order of their own."""
    found = hashlib.sha256()
    for probe in probes:
        found.update(repr(sorted(probe.ids)).encode())
        for place in sorted(probe.bits):
            found.update(repr((place, sorted(probe.bits[place]))).encode())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    raise SystemExit(main())
