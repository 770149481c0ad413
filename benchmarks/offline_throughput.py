"""Output tokens per second of many requests at once, through `srt.Runtime`, beside the limit of the hardware.

    python -m benchmarks.offline_throughput --model-path qwen3-8b --load-format dummy [--adapters 8] [any option of the server]

256 requests of 100 to 1,024 tokens in and out, temperature 0.6, all sent at the start: once as soon as the server answers, which is shown
by itself, then with all graphs captured. The limit is a bound on the whole run, not on its steps one by one: all bytes that it must read
(weights once in each of the fewest possible steps, KV of every decode) at the measured bandwidth, or all its products at the measured
rate, whichever takes longer.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import limits, models
from benchmarks.adapters import write_adapters
from benchmarks.graphs import wait_for_graphs
from srt.runtime import Runtime
from srt.server_args import parse_args

BEGUN_S = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--least", type=int, default=100, help="tokens in and out, at least")
    parser.add_argument("--most", type=int, default=1024, help="tokens in and out, at most")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--runs", type=int, default=2, help="behind the first; the best is shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=0, help="then also with so many LoRA adapters, in turns")
    parser.add_argument("--resident", type=int, help="adapters held at a time (default: all)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    if min(options.requests, options.least, options.runs) < 1 or options.most < options.least:
        parser.error("--requests, --least and --runs are at least 1, and --most is at least --least.")
    folder = models.folder_of(options.model_path)
    args = parse_args(["--model-path", folder, *server_options])
    device, shape = limits.measured().of_ranks(args.tp_size), limits.Shape.of(folder, args.kv_cache_dtype)
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    rng = np.random.default_rng(options.seed)
    lengths_in, lengths_out = (rng.integers(options.least, options.most + 1, options.requests) for _ in range(2))
    vocab_size = 150_000 if shape.head_weights > 10**8 else 1000
    sampling = [
        {"temperature": options.temperature, "max_new_tokens": int(n), "ignore_eos": True, "sampling_seed": i}
        for i, n in enumerate(lengths_out)
    ]
    took_s = []
    tell("options read, hardware measured")
    with TemporaryDirectory() as root, Runtime(**given, **lora_options(folder, root, options)) as runtime:
        tell("server started")
        runtime.generate(input_ids=[[5] * 64] * options.requests, sampling_params={**sampling[0], "max_new_tokens": 16})
        for number in range(1 + options.runs):
            if number == 1:
                wait_for_graphs(runtime)
                tell("graphs captured")
            prompts = [rng.integers(300, vocab_size, n).tolist() for n in lengths_in]  # others, which no cache has
            begin_s = time.perf_counter()
            answers = runtime.generate(input_ids=prompts, sampling_params=sampling)
            took_s.append(time.perf_counter() - begin_s)
            tell(f"{took_s[-1]:.2f} s without adapters")
            assert [len(a["output_ids"]) for a in answers] == lengths_out.tolist()
        rounds = [[rng.integers(300, vocab_size, n).tolist() for n in lengths_in] for _ in range(1 + options.runs)]
        adapted_s = adapted_seconds(runtime, rounds, sampling, options.adapters)
        grouped_s = grouped_seconds(runtime, rounds[0], sampling, options)
    first_s, *took_s = took_s
    limit_s = shape_limit_s(shape, device, lengths_in, lengths_out)
    tokens = int(lengths_out.sum())
    speed, limit = tokens / min(took_s), tokens / limit_s
    print(f"{options.model_path} on {device.name}; {limits.versions()}")
    print(
        f"{options.requests} requests, {int(lengths_in.sum()):,} tokens in, {tokens:,} out: {min(took_s):.2f} s",
        end=" ",
    )
    print(f"(of {', '.join(f'{s:.2f}' for s in took_s)}; the first after the start {first_s:.2f})")
    print(f"{speed:,.0f} output tokens/s; limit {limit:,.0f}; ratio {limit / speed:.2f}")
    if adapted_s:
        print_adapted(options, min(took_s), adapted_s, grouped_s)
    record = {"benchmark": "offline_throughput", "model": options.model_path, "device": asdict(device)}
    figures = {"output_tokens_s": speed, "limit": limit, "seconds": took_s, "first_s": first_s}
    figures |= {"adapters": options.adapters, "adapted_seconds": adapted_s, "grouped_seconds": grouped_s}
    limits.write_jsonl(options.jsonl, {**record, "options": server_options, "versions": limits.versions(), **figures})
    return 0


def tell(what: str) -> None:
    """Say on standard error how long ago the benchmark began, and what it has done."""
    print(f"{time.perf_counter() - BEGUN_S:6.1f} s: {what}", file=sys.stderr, flush=True)


def adapted_seconds(
    runtime: Runtime, rounds: list[list[list[int]]], sampling: list[dict[str, Any]], num_adapters: int
) -> list[float]:
    """Return the seconds of each round of prompts, which take the adapters in turns; none without adapters."""
    names = [f"adapter-{number % max(1, num_adapters)}" for number in range(len(sampling))]
    lengths = [one["max_new_tokens"] for one in sampling]
    took_s = []
    for prompts in rounds if num_adapters else []:
        begin_s = time.perf_counter()
        answers = runtime.generate(input_ids=prompts, sampling_params=sampling, lora_path=names)
        took_s.append(time.perf_counter() - begin_s)
        tell(f"{took_s[-1]:.2f} s with adapters")
        assert [len(answer["output_ids"]) for answer in answers] == lengths
    return took_s


def grouped_seconds(
    runtime: Runtime, prompts: list[list[int]], sampling: list[dict[str, Any]], options: argparse.Namespace
) -> float | None:
    """Return the seconds without adapters if only as many requests run at a time as resident adapters allow; None if all are resident.

    The requests of an adapter form a group, and the next group begins when a whole one has ended.
    """
    if options.resident is None or options.resident >= options.adapters:
        return None
    groups = [slice(number, None, options.adapters) for number in range(options.adapters)]
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(options.resident) as pool:
        calls = [pool.submit(runtime.generate, input_ids=prompts[g], sampling_params=sampling[g]) for g in groups]
        wait(calls)
    took_s = time.perf_counter() - begin_s
    assert sum(len(answer["output_ids"]) for call in calls for answer in call.result()) == sum(
        one["max_new_tokens"] for one in sampling
    )
    return took_s


def print_adapted(options: argparse.Namespace, base_s: float, adapted_s: list[float], grouped_s: float | None) -> None:
    shown = f"{min(adapted_s):.2f} s (of {', '.join(f'{s:.2f}' for s in adapted_s)})"
    print(f"with {options.adapters} adapters {shown}: {base_s / min(adapted_s):.3f} of the throughput without")
    if grouped_s is not None:
        share = grouped_s / min(adapted_s)
        print(
            f"{options.resident} of them resident: {share:.3f} of that without in the same groups ({grouped_s:.2f} s)"
        )


def lora_options(model_folder: str, root: str, options: argparse.Namespace) -> dict[str, Any]:
    """Write the adapters, if any, and return the options of a server that has them."""
    if not options.adapters:
        return {}
    folders = write_adapters(model_folder, Path(root), options.adapters, options.rank)
    tell("adapters written")
    paths = tuple(f"{name}={folder}" for name, folder in folders.items())
    return {"lora_paths": paths, "max_loras_per_batch": options.resident or options.adapters}


def shape_limit_s(shape: limits.Shape, device: limits.Device, lengths_in: np.ndarray, lengths_out: np.ndarray) -> float:
    """The longer of all reads and all products: both can go on at the same time, since prompts are mixed into decode steps.

    The fewest steps are as many as the longest answer has tokens. Each reads all weights; its decodes read their KV.
    """
    products_s = sum(shape.prefill_s(device, 1, int(n)) for n in lengths_in)
    read_s = shape.read_s(device, 0, 0.0)  # the step of the prompts, which gives each request its first token
    for step in range(1, int(lengths_out.max())):
        running = lengths_out > step
        num_rows, context = int(running.sum()), float((lengths_in[running] + step).mean())
        read_s += shape.read_s(device, num_rows, context)
        products_s += shape.products_s(device, num_rows)
    return max(read_s, products_s)


if __name__ == "__main__":
    raise SystemExit(main())
