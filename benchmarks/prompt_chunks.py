"""Prompt chunks of a worker with --tp 2 by themselves, with large sums in three ways, beside one GPU: tokens/s, and times one GPU.

    python -m benchmarks.prompt_chunks --model-path llama-3.1-8b --load-format dummy [--tokens 8192] [--prompts 2] [any option of a server]

    nccl     NCCL gathers the parts of large sums, one kernel adds them, and another one adds the residual stream and norms
    sums     one kernel sends, receives and adds
    fused    it also adds the residual stream and norms
    divided  each rank finishes the sums of half of the rows, and what the ranks exchange is sent while products run

The ways take turns in the same processes. Then the first rank loads the whole model and runs the same chunks alone. Steps are launched
kernel by kernel, one of them always ahead of what is read. The tokens that each way draws are shown: nccl and sums must draw the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from benchmarks import limits, models
from benchmarks.gpu_readings import watched
from benchmarks.step_ranks import connect, other_ranks
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import PeerMemory
from srt.model_executor.loaded_model import most_divided_bytes, most_sum_bytes, resolve_device
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from srt.server_args import ServerArgs, parse_args
from srt.utils.model_config import ModelConfig

WAYS: Final = ("nccl", "sums", "fused", "divided")
CHUNKS = 8  # in a round
ROUNDS = 3


class Chunks:
    """Runs the same prompts again and again, each time as one step."""

    def __init__(self, runner: ModelRunner, num_tokens: int, num_prompts: int) -> None:
        self._runner = runner
        length, page_size = num_tokens // num_prompts, runner.state.page_size
        vocab_size = runner.loaded.config.vocab_size
        rng = np.random.default_rng(0)
        pages_each = -(-(length + 1) // page_size)
        slots, empty = int32_array(range(num_prompts)), int32_array()
        counts = int32_array([length] * num_prompts)
        spec = SamplingSpec(max_new_tokens=2, temperature=0.0)
        admissions = [
            Admission(slot, int32_array(rng.integers(5, vocab_size, length)), length, 0, slot, spec, LogprobSpec())
            for slot in range(num_prompts)
        ]
        pages = PageDelta(slots, int32_array([pages_each] * num_prompts), int32_array(range(pages_each * num_prompts)))
        starts, samples = int32_array([0] * num_prompts), int32_array([1] * num_prompts)
        self._section = PlanSection(admissions, [pages], slots, starts, counts, samples, empty)

    def run(self, count: int) -> tuple[float, list[int]]:
        """Return the seconds that so many chunks take, and the ids that the last one drew."""
        begin_s, before = time.perf_counter(), None
        for _ in range(count):
            self._runner.reset()
            step = self._runner.sample(self._runner.execute(self._section))
            if before is not None:
                before.result()
            before = step
        assert before is not None
        drawn = before.result().ids
        return time.perf_counter() - begin_s, np.asarray(drawn).tolist()


def choose_way(peers: PeerMemory, large: object, divisions: object, way: str) -> None:
    """Let sums go this way from now on."""
    changed: Any = peers
    changed._large = None if way == "nccl" else large
    changed._divisions = divisions if way == "divided" else None
    if way == "sums":
        changed.add_and_norm = lambda *_: None
    else:
        vars(changed).pop("add_and_norm", None)


def measure(options: argparse.Namespace, args: ServerArgs) -> int:
    """Measure on one rank. What other ranks than the first print is thrown away."""
    device = resolve_device(args, options.rank)
    config = ModelConfig.from_folder(args.model_path, args.model_overrides(), quantization=args.quantization)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes = most_sum_bytes(args, config), most_divided_bytes(args, config)
    tp = connect(args, options.rank, options.meeting, device, *sizes)
    chunks = Chunks(start_runner(args, config, args.model_path, tp, device), options.tokens, options.prompts)
    figures: dict[str, list[float]] = {}
    peers = tp._peers
    if peers is None or peers._large is None:
        print("the GPUs have no boxes for large sums: only NCCL's way is measured", flush=True)
    large, divisions = (None, None) if peers is None else (peers._large, peers._divisions)
    ways = WAYS if large is not None else WAYS[:1]
    drawn: dict[str, list[int]] = {}
    for _ in range(ROUNDS):
        for way in ways:
            if peers is not None:
                choose_way(peers, large, divisions, way)
            chunks.run(2)
            tp.min_int(0)  # all begin together
            with watched(device) as readings:
                took_s, drawn[way] = chunks.run(CHUNKS)
            figures.setdefault(way, []).append(took_s / CHUNKS)
            print(f"{way}: {took_s / CHUNKS * 1e3:.2f} ms a chunk{readings.text()}", flush=True)
    tp.min_int(0)
    if options.rank == 0:
        del chunks
        report(options, args, config, figures, drawn)
    tp.close()
    return 0


def report(
    options: argparse.Namespace,
    args: ServerArgs,
    config: ModelConfig,
    figures: dict[str, list[float]],
    drawn: dict[str, list[int]],
) -> None:
    """Print the ways' figures, then those times one GPU's."""
    for way, found in figures.items():
        print(f"RESULT prompts tp {args.tp_size} {way}: {options.tokens / min(found):.0f} tokens/s", flush=True)
        print(
            f"RESULT prompts tp {args.tp_size} {way}: {1e3 * min(found):.2f} ms a chunk; ids {drawn[way]}", flush=True
        )
    torch.cuda.empty_cache() if torch.cuda.is_available() else None
    device = resolve_device(args, 0)
    alone = replace(args, tp_size=1)
    one = Chunks(
        start_runner(alone, config, args.model_path, TensorParallel(0, 1, None, device), device),
        options.tokens,
        options.prompts,
    )
    one.run(2)
    with watched(device) as readings:
        times = [one.run(CHUNKS)[0] / CHUNKS for _ in range(ROUNDS)]
    print(f"one GPU: {min(times) * 1e3:.2f} ms a chunk{readings.text()}", flush=True)
    print(f"RESULT prompts one GPU: {options.tokens / min(times):.0f} tokens/s", flush=True)
    for way, found in figures.items():
        print(f"RESULT prompts tp {args.tp_size} {way} ÷ one GPU: {min(times) / min(found):.3f}", flush=True)
    record = {"benchmark": "prompt_chunks", "model": options.model_path, "chunks_s": figures, "one_gpu_s": times}
    limits.write_jsonl(options.jsonl, {**record, "tokens": options.tokens, "versions": limits.versions()})


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="llama-3.1-8b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--tokens", type=int, default=8192, help="of a chunk")
    parser.add_argument("--prompts", type=int, default=2, help="that a chunk is made of")
    parser.add_argument("--jsonl", help="append the result to this file")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options, server_options = parser.parse_known_args(words)
    if options.prompts < 1 or options.tokens < 1 or options.tokens % options.prompts:
        parser.error("--tokens and --prompts take numbers from 1 on, and prompts have equal numbers of tokens")
    given = ["--model-path", models.folder_of(options.model_path), "--tp", "2", "--disable-cuda-graph"]
    given += ["--chunked-prefill-size", str(options.tokens), "--max-running-requests", str(max(8, options.prompts))]
    given += ["--max-total-tokens", str(2 * options.tokens)]
    args = parse_args([*given, *server_options])
    if options.rank:
        return measure(options, args)
    with other_ranks("benchmarks.prompt_chunks", words, args.tp_size) as options.meeting:
        return measure(options, args)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # NCCL would wait for who is gone
