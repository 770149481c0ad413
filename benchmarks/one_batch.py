"""Latency by batch size, decode and prefill apart, beside the limit of the hardware.

    python -m benchmarks.one_batch --model-path qwen3-8b --load-format dummy [any option of the server]

A decode step is the difference of a long answer and one of a single token, over the tokens between. Prompts are random and fresh
for every run, so that nothing is cached but where it says shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import limits, models
from benchmarks.graphs import wait_for_graphs
from srt.entrypoints.native import server_facts
from srt.runtime import Runtime
from srt.server_args import parse_args

DECODES = ((1, 128, 512), (64, 1024, 256), (256, 1024, 256))  # rows, prompt, answer
PREFILL = (8, 8192)
SHARED = (64, 4096, 32, 64)  # rows, prefix, own, answer


@dataclass(frozen=True, slots=True)
class Line:
    """One figure beside its limit, both in the same unit."""

    what: str
    unit: str
    value: float
    limit: float | None

    def text(self) -> str:
        if self.limit is None:
            return f"{self.what:34} {self.value:12,.3f} {self.unit:10}"
        ratio = self.value / self.limit
        return f"{self.what:34} {self.value:12,.3f} {self.unit:10} limit {self.limit:12,.3f}  ratio {ratio:.2f}"


class Bench:
    """The same runtime for all figures; each draws prompts of its own."""

    def __init__(
        self, runtime: Runtime, shape: limits.Shape, device: limits.Device, seed: int, sampling: dict[str, object]
    ) -> None:
        self._runtime = runtime
        self._sampling = {"temperature": 0, "ignore_eos": True, **sampling}
        self._shape = shape
        self._device = device
        self._rng = np.random.default_rng(seed)
        self._vocab_size = 150_000 if shape.head_weights > 10**8 else 1000

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        drawn: list[list[int]] = self._rng.integers(300, self._vocab_size, (rows, length)).tolist()
        return drawn

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        sampling = {**self._sampling, "max_new_tokens": new_tokens}
        begin_s = time.perf_counter()
        self._runtime.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - begin_s

    def _state(self) -> dict[str, Any]:
        engine = self._runtime._engine
        state: dict[str, Any] = engine.run(server_facts(engine._service, deep=True))["internal_states"][0]
        return state

    def decode(self, rows: int, length: int, new_tokens: int) -> list[Line]:
        self.seconds(self.prompts(rows, length), 8)
        wait_for_graphs(self._runtime)
        short_s = min(self.seconds(self.prompts(rows, length), 1) for _ in range(2))
        long_s = min(self.seconds(self.prompts(rows, length), new_tokens) for _ in range(3))
        step_s = (long_s - short_s) / (new_tokens - 1)
        limit_s = self._shape.decode_s(self._device, rows, length + new_tokens / 2)
        name = f"{rows} × {length} in, {new_tokens} out"
        return [Line(f"decode, {name}", "ms/step", step_s * 1e3, limit_s * 1e3), *self._host(rows)]

    def _host(self, rows: int) -> list[Line]:
        """The worker's own time of the latest steps: to launch one, and from a result until the plan that it led to is launched."""
        state = self._state()
        if state.get("worker_decode_rows") != rows:
            return []  # other steps came more often
        names = (f"{kind}_us_{percent}" for kind in ("launch", "answer", "loop") for percent in ("p50", "p99"))
        found = ((name, state.get(f"worker_{name}")) for name in names)
        return [Line(f"host, {rows} rows, {name}", "µs", value, None) for name, value in found if value is not None]

    def prefill(self, rows: int, length: int) -> list[Line]:
        self.seconds(self.prompts(rows, length), 1)
        wait_for_graphs(self._runtime)
        took_s = min(self.seconds(self.prompts(rows, length), 1) for _ in range(3))
        limit_s = self._shape.prefill_s(self._device, rows, length)
        tokens = rows * length
        return [Line(f"prefill, {rows} × {length}", "tokens/s", tokens / took_s, tokens / limit_s)]

    def shared_prefix(self, rows: int, prefix: int, own: int, new_tokens: int) -> list[Line]:
        (shared,) = self.prompts(1, prefix)
        prompts = [shared + tail for tail in self.prompts(rows, own)]
        name = f"shared prefix, {rows} × ({prefix} + {own})"
        return [Line(f"{name}, {time_}", "s", self.seconds(prompts, new_tokens), None) for time_ in ("cold", "again")]


def shapes(text: str) -> list[tuple[int, int, int]]:
    """Each rows×prompt×answer; answers of one token have no decodes."""
    found = []
    for one in text.split(","):
        rows, prompt, answer = map(int, one.replace("x", "×").split("×"))
        if min(rows, prompt, answer - 1) < 1:
            raise ValueError(one)
        found.append((rows, prompt, answer))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument(
        "--batch", type=shapes, default=DECODES, help="decode shapes instead of the usual: rows×prompt×answer, …"
    )
    parser.add_argument(
        "--sampling", default="{}", help="sampling parameters of all requests, as JSON (default: greedy)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    folder = models.folder_of(options.model_path)
    args = parse_args(["--model-path", folder, *server_options])
    device, shape = limits.measured().of_ranks(args.tp_size), limits.Shape.of(folder, args.kv_cache_dtype)
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    print(f"{options.model_path} on {device.name}: {device.read_bytes_s / 1e12:.2f} TB/s read,", end=" ")
    print(f"{device.matmul_flops_s / 1e12:.0f} TFLOP/s; {limits.versions()}")
    begin_s = time.perf_counter()
    with Runtime(**given) as runtime:
        bench = Bench(runtime, shape, device, options.seed, json.loads(options.sampling))
        print(f"{'ready':34} {time.perf_counter() - begin_s:12,.3f} s")
        bench.seconds(bench.prompts(1, 128), 1)
        print(f"{'first token (128 in)':34} {time.perf_counter() - begin_s:12,.3f} s", flush=True)
        work: list[tuple[str, Callable[[], list[Line]]]] = [
            (f"decode {shape_}", partial(bench.decode, *shape_)) for shape_ in options.batch
        ]
        work += [("prefill", partial(bench.prefill, *PREFILL)), ("shared", partial(bench.shared_prefix, *SHARED))]
        lines: list[Line] = []
        for name, measure in work:
            if options.only in name:
                lines += (news := measure())
                print("\n".join(line.text() for line in news), flush=True)
    record = {
        "benchmark": "one_batch",
        "model": options.model_path,
        "device": asdict(device),
        "options": server_options,
        "sampling": json.loads(options.sampling),
    }
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions(), "lines": [asdict(x) for x in lines]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
