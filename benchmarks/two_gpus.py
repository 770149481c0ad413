"""The gain of a second GPU: one GPU beside two ranks, two replicas and two stages, with the same model on the same machine.

    python -m benchmarks.two_gpus --model-path llama-3.1-8b --load-format dummy [--layouts one,tp,dp,pp] [any option of the server]

For each layout: output tokens/s of 256 requests of 100 to 1,024 tokens in and out, and of 512 with `dp` and `pp` (the same load a GPU);
the same of as many streams over one HTTP port, with `one` and `dp`; milliseconds of a decode step of 1 and of 32 rows; tokens/s of 16
prompts of 4,096 tokens; seconds to the first token behind a prompt of 16,384. Behind each figure its quotient by that of one GPU, where
512 requests are compared with 256. All graphs are captured first. A layout that fails is named, and the others go on.

`--requests 8 --tokens 16 --model-path tiny --device cpu` tries all of it in a minute, without GPUs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from benchmarks import limits, models, serving
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.runtime import Runtime
from srt.server_args import parse_args
from srt.utils.errors import StartError
from srt.utils.model_config import ModelConfig

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "one": {},
    "tp": {"tp_size": 2},
    "dp": {"dp_size": 2},
    "pp": {"pp_size": 2, "max_running_requests": 512},
    "pp-17-15": {"pp_size": 2, "max_running_requests": 512, "pp_layer_partition": (17, 15)},
}
FOR_TWICE_AS_MANY: Final = ("dp", "pp", "pp-17-15")  # layouts that run twice as many requests as one GPU
OVER_HTTP: Final[dict[str, int]] = {"one": 1, "dp": 2}  # layouts whose streams are measured, and times the requests
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="llama-3.1-8b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--layouts", default="one,tp,dp,pp", help=f"some of {', '.join(LAYOUTS)}; `one` first")
    parser.add_argument("--requests", type=int, default=256, help="requests for one GPU")
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a request in, and out")
    parser.add_argument("--jsonl", help="append the results to this file")
    options, server_options = parser.parse_known_args()
    layouts = options.layouts.split(",")
    if not set(layouts) <= set(LAYOUTS):
        parser.error(f"--layouts are some of {', '.join(LAYOUTS)}.")
    args = parse_args(["--model-path", models.folder_of(options.model_path), *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    device = limits.measured()
    print(f"{options.model_path} on {device.name}; {limits.versions()}")
    print(f"it reads {device.read_bytes_s / 1e12:.2f} TB/s, {device.matmul_flops_s / 1e12:.0f} TFLOP/s", flush=True)
    one: Figures = {}
    failed = []
    for layout in layouts:
        found: Figures = {}
        try:
            for name, value in measure(layout, {**given, **LAYOUTS[layout]}, options.requests, options.tokens):
                found[name] = value
                shown = quotient(name, value, found if layout == "one" else one, options.requests)
                print(f"{layout:>8}: {name:>36} {value:>10,.4g}{shown}", flush=True)
        except (StartError, RequestError, RuntimeError, AssertionError, OSError) as error:
            failed.append(layout)
            print(f"{layout:>8}: failed with {type(error).__name__}: {error}", flush=True)
        one = found if layout == "one" else one
        record = {"benchmark": "two_gpus", "model": options.model_path, "layout": layout, "device": asdict(device)}
        limits.write_jsonl(options.jsonl, {**record, "options": server_options, "versions": limits.versions(), **found})
    return 1 if failed else 0


def quotient(name: str, value: float, one: Figures, num_requests: int) -> str:
    """Return how many times the figure is that of one GPU, to be shown behind it; nothing where one GPU has none."""
    reference = one.get(name.replace(str(2 * num_requests), str(num_requests)))
    return "" if reference is None else f" ({value / reference:.3f} ×)"


def measure(layout: str, given: dict[str, Any], num_requests: int, most_tokens: int) -> Iterator[tuple[str, float]]:
    """Start an engine with these options, and yield each figure with its name."""
    rng = np.random.default_rng(0)
    vocab_size = ModelConfig.from_folder(given["model_path"]).vocab_size

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [rng.integers(5, vocab_size - 5, length).tolist() for length in lengths]

    begin_s = time.perf_counter()
    with Runtime(**{**given, "port": 0, "incremental_streaming_output": True}) as runtime:
        yield "start, s", time.perf_counter() - begin_s
        generate(runtime, prompts([most_tokens // 2] * num_requests), [16] * num_requests)
        wait_for_all_graphs(runtime)
        yield "start with all graphs, s", time.perf_counter() - begin_s
        for count in (num_requests, 2 * num_requests) if layout in FOR_TWICE_AS_MANY else (num_requests,):
            ins, outs = drawn_lengths(count, most_tokens)
            yield f"{count} requests, tokens/s", sum(outs) / generate(runtime, prompts(ins), outs)
        if layout in OVER_HTTP:
            count = OVER_HTTP[layout] * num_requests
            ins, outs = drawn_lengths(count, most_tokens)
            yield f"{count} streams over HTTP, tokens/s", sum(outs) / stream(runtime, prompts(ins), outs)
        for rows in (1, 32):
            batches = [prompts([max(1, most_tokens // 8)] * rows) for _ in range(4)]
            yield f"{rows} rows, ms", step_ms(runtime, batches, max(1, most_tokens // 5))
        yield "prompts, tokens/s", max(prompts_s(runtime, prompts([4 * most_tokens] * 16)) for _ in range(2))
        yield "long prompt, s", generate(runtime, prompts([16 * most_tokens]), [1])


def wait_for_all_graphs(runtime: Runtime) -> None:
    while any(state["num_graphs_left"] for state in runtime.get_server_info()["internal_states"]):
        time.sleep(0.1)


def drawn_lengths(count: int, most_tokens: int) -> tuple[list[int], list[int]]:
    """Return the tokens in and out of each request, a tenth of the most at least; the same for the same count."""
    rng = np.random.default_rng(count)
    ins, outs = (rng.integers(max(1, most_tokens // 10), most_tokens + 1, count).tolist() for _ in range(2))
    return ins, outs


def generate(runtime: Runtime, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds until all requests have their tokens."""
    sampling = [
        {"temperature": 0.6, "max_new_tokens": length, "ignore_eos": True, "sampling_seed": seed}
        for seed, length in enumerate(lengths)
    ]
    begin_s = time.perf_counter()
    answers = runtime.generate(input_ids=prompts, sampling_params=sampling)
    took_s = time.perf_counter() - begin_s
    assert [len(answer["output_ids"]) for answer in answers] == lengths
    return took_s


def stream(runtime: Runtime, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds from the first request over HTTP to the last token of all streams."""
    calls = [serving.Call.of(0.0, *request, temperature=0.6) for request in zip(prompts, lengths, strict=True)]
    assert runtime.url is not None
    return serving.load(runtime.url, calls, clients=max(1, (os.cpu_count() or 1) // 4))[1]


def step_ms(runtime: Runtime, batches: list[list[list[int]]], num_steps: int) -> float:
    """Return the milliseconds of a step in which as many rows decode as a batch has prompts; the best of two rounds.

    In each round one batch gets a token, and another one as many steps more as are measured.
    """
    rounds = []
    for short, long in (batches[:2], batches[2:]):
        first_s = generate(runtime, short, [1] * len(short))
        rounds.append(1000 * (generate(runtime, long, [1 + num_steps] * len(long)) - first_s) / num_steps)
    return min(rounds)


def prompts_s(runtime: Runtime, prompts: list[list[int]]) -> float:
    """Return the prompt tokens computed in a second."""
    return sum(map(len, prompts)) / generate(runtime, prompts, [1] * len(prompts))


if __name__ == "__main__":
    raise SystemExit(main())
