"""The gain of a second GPU: one GPU beside two replicas, two stages and two ranks, with the same model on the same machine.

    python -m benchmarks.two_gpus --model-path llama-3.1-8b --load-format dummy [--layouts one,dp,tp] [any option of the server]

For each layout: output tokens/s of 256 requests of 100 to 1,024 tokens in and out, and of 512 with `dp` and `pp` (the same load a GPU);
milliseconds of a decode step of 1 and of 32 rows; tokens/s of 16 prompts of 4,096 tokens; seconds to the first token behind a prompt of
16,384. Behind each figure its ratio to that of one GPU, where 512 requests are compared with 256. All graphs are captured first.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from benchmarks import limits, models
from srt.runtime import Runtime
from srt.server_args import parse_args

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "one": {},
    "dp": {"dp_size": 2},
    "pp": {"pp_size": 2, "max_running_requests": 512},
    "pp-17-15": {"pp_size": 2, "max_running_requests": 512, "pp_layer_partition": (17, 15)},
    "tp": {"tp_size": 2},
}
SEVERAL: Final = ("dp", "pp", "pp-17-15")  # layouts for 512 requests
Figures = dict[str, float]
MORE_IS_BETTER: Final = "/s"  # at the end of a figure's name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="llama-3.1-8b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--layouts", default="one,dp,tp", help=f"some of {', '.join(LAYOUTS)}; `one` first")
    parser.add_argument(
        "--requests", type=int, default=256, help="of one GPU; twice as many where each GPU has as many"
    )
    parser.add_argument("--jsonl", help="append the results to this file")
    options, server_options = parser.parse_known_args()
    layouts = options.layouts.split(",")
    if not set(layouts) <= set(LAYOUTS):
        parser.error(f"--layouts are some of {', '.join(LAYOUTS)}.")
    args = parse_args(["--model-path", models.folder_of(options.model_path), *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    device = limits.measured()
    print(f"{options.model_path} on {device.name}; {limits.versions()}", flush=True)
    print(
        f"one GPU reads {device.read_bytes_s / 1e12:.2f} TB/s, {device.matmul_flops_s / 1e12:.0f} TFLOP/s", flush=True
    )
    one: Figures = {}
    for layout in layouts:
        begin_s = time.perf_counter()
        found = measure({**given, **LAYOUTS[layout]}, options.requests, layout in SEVERAL)
        one = one or found
        shown = [
            f"{name} {value:,.4g} ({ratio_of(name, value, one, options.requests):.2f} ×)"
            for name, value in found.items()
        ]
        print(f"{layout:>8}: {'; '.join(shown)}; all in {time.perf_counter() - begin_s:.0f} s", flush=True)
        record = {"benchmark": "two_gpus", "model": options.model_path, "layout": layout, "device": asdict(device)}
        limits.write_jsonl(options.jsonl, {**record, "options": server_options, "versions": limits.versions(), **found})
    return 0


def ratio_of(name: str, value: float, one: Figures, num_requests: int) -> float:
    """Return how many times as good as one GPU's this figure is."""
    reference = one[name.replace(str(2 * num_requests), str(num_requests))]
    return value / reference if name.endswith(MORE_IS_BETTER) else reference / value


def measure(given: dict[str, Any], num_requests: int, is_for_more: bool) -> Figures:
    """Start an engine with these options, and measure everything."""
    rng = np.random.default_rng(0)
    found: Figures = {}
    with Runtime(**given) as runtime:
        wait_for_all_graphs(runtime)
        generate(runtime, [[5] * 64] * num_requests, [16] * num_requests)
        for count in (num_requests, 2 * num_requests) if is_for_more else (num_requests,):
            ins, outs = (np.random.default_rng(count).integers(100, 1025, count) for _ in range(2))
            seconds = generate(runtime, prompts_of(rng, ins.tolist()), outs.tolist())
            found[f"{count} requests, tokens/s"] = float(outs.sum()) / seconds
        for rows in (1, 32):
            found[f"{rows} rows, ms"] = step_ms(runtime, rng, rows)
        seconds = generate(runtime, prompts_of(rng, [4096] * 16), [1] * 16)
        found["prompts, tokens/s"] = 16 * 4096 / seconds
        found["long prompt, s"] = generate(runtime, prompts_of(rng, [16384]), [1])
    return found


def wait_for_all_graphs(runtime: Runtime) -> None:
    while any(state["num_graphs_left"] for state in runtime.get_server_info()["internal_states"]):
        time.sleep(0.1)


def prompts_of(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(300, 100_000, length).tolist() for length in lengths]


def generate(runtime: Runtime, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds until all have their tokens."""
    sampling = [
        {"temperature": 0.6, "max_new_tokens": length, "ignore_eos": True, "sampling_seed": seed}
        for seed, length in enumerate(lengths)
    ]
    begin_s = time.perf_counter()
    answers = runtime.generate(input_ids=prompts, sampling_params=sampling)
    took_s = time.perf_counter() - begin_s
    assert [len(answer["output_ids"]) for answer in answers] == lengths
    return took_s


def step_ms(runtime: Runtime, rng: np.random.Generator, rows: int, num_steps: int = 200) -> float:
    """Return the milliseconds of a step in which `rows` rows decode, behind 128 to 328 tokens; the best of two rounds."""
    rounds = []
    for _ in range(2):
        short, long = (generate(runtime, prompts_of(rng, [128] * rows), [count] * rows) for count in (1, 1 + num_steps))
        rounds.append(1000 * (long - short) / num_steps)
    return min(rounds)


if __name__ == "__main__":
    raise SystemExit(main())
