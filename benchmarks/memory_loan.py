"""Seconds to release a server's memory and to take it back, by part, with the bytes that the GPU has free before and after.

    python -m benchmarks.memory_loan --model-path qwen3-8b --load-format dummy [--cycles 3] [any option of the server]

The answers to greedy requests must be equal before and after, and no graph may be captured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks import limits, models
from benchmarks.graphs import wait_for_graphs
from srt.protocol.engine_work import MEMORY_TAGS
from srt.runtime import Runtime
from srt.server_args import parse_args

GREEDY = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--cycles", type=int, default=3, help="of all parts, behind one of each part by itself")
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    folder = models.folder_of(options.model_path)
    args = parse_args(["--model-path", folder, *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    figures: list[dict[str, Any]] = []
    print(f"{options.model_path} on {torch.cuda.get_device_name()}; {limits.versions()}")
    with Runtime(**given, enable_memory_saver=True) as runtime:
        wait_for_graphs(runtime)
        expected = answers(runtime)
        assert answers(runtime) == expected, "answers differ even without a loan"
        print(
            "released                        s        GB   GB/s   resumed s   GB/s   free GB before, meanwhile, after"
        )
        for tags in (*([tag] for tag in MEMORY_TAGS), *([list(MEMORY_TAGS)] * options.cycles)):
            before = free_bytes()
            released_s = seconds(partial(runtime.release_memory_occupation, tags))
            meanwhile = free_bytes()
            resumed_s = seconds(partial(runtime.resume_memory_occupation, tags))
            after, size = free_bytes(), meanwhile - before
            rates = size / released_s / 1e9, size / resumed_s / 1e9
            print(
                f"{', '.join(tags):29} {released_s:6.3f} {size / 1e9:8.2f} {rates[0]:6.1f} {resumed_s:10.3f} {rates[1]:7.1f}  "
                f" {before / 1e9:.2f}, {meanwhile / 1e9:.2f}, {after / 1e9:.2f}",
                flush=True,
            )
            assert answers(runtime) == expected, "other tokens than before"
            figures.append({"tags": tags, "released_s": released_s, "resumed_s": resumed_s, "bytes": size})
        assert not runtime.get_server_info()["internal_states"][0]["num_graphs_left"]
    print("all answers are equal")
    record = {"benchmark": "memory_loan", "model": options.model_path, "options": server_options, "loans": figures}
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions()})
    return 0


def answers(runtime: Runtime) -> list[list[int]]:
    """Return the tokens of greedy requests of several lengths, computed anew, and one after the other: so their steps are the same."""
    runtime.flush_cache()
    prompts = [[7 + n, *range(300, 300 + 150 * n)] for n in range(1, 5)]
    return [runtime.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in prompts]


def seconds(work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def free_bytes() -> int:
    """The free memory of the GPU, as every process sees it."""
    return torch.cuda.mem_get_info(0)[0]


if __name__ == "__main__":
    raise SystemExit(main())
