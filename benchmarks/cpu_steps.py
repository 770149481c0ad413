"""The parts of a decode step on a CPU, and tokens/s of a server beside those of transformers' `generate`, for 1 and 16 users.

    python -m benchmarks.cpu_steps [--model-path tiny] [--dtype float32] [--temperature 0] [any option of the server]

First a worker's steps in this process, part by part. Then a server and `generate` in turns, with the same prompts, type and number of
threads, so that both see the same machine: the ratio is the figure to compare. All lines have the best of some rounds, because other work
on the machine can only add time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import torch

from benchmarks import models
from benchmarks.serving import Call, run_client, running_server, step_ms
from srt.managers.process.child_process import environment_of
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.server_args import parse_args
from srt.utils.host import usable_cores
from srt.utils.model_config import ModelConfig

USERS = (1, 16)
CONTEXT = 64  # positions of a row in the worker's steps, at first
STEPS = 30
PROMPT = 32  # tokens of a user's prompt


class Parts:
    """The least time of each part over many steps, in seconds."""

    def __init__(self) -> None:
        self.least_s: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with a clock."""

        def timed(*args: Any) -> Any:
            begin_s = time.perf_counter()
            result = call(*args)
            self.note(name, time.perf_counter() - begin_s)
            return result

        return timed

    def note(self, name: str, seconds: float) -> None:
        self.least_s[name] = min(seconds, self.least_s.get(name, seconds))


@contextmanager
def watched(runner: ModelRunner, parts: Parts) -> Iterator[None]:
    """Inside, time the parts of the runner's decode steps."""
    decodes = runner.graphs.decodes
    assert decodes is not None, f"{runner.loaded.config.architecture} decodes nothing"
    places: list[tuple[object, str, str]] = [
        (runner._planner, "plan_decodes", "plan"),
        (decodes.buffers, "gather", "look up rows"),
        (runner, "_sample_decodes", "sample"),
    ]
    if decodes._parts.cpu_step is not None:
        places.append((decodes._parts.cpu_step, "logits_into", "layers and logits"))
    else:
        places.append((runner.loaded.model, "forward", "layers"))
        places.append((runner.loaded.logits_processor, "logits_into", "logits"))
    patches = [patch.object(owner, name, parts.timed(said, getattr(owner, name))) for owner, name, said in places]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def print_parts(folder: str, server_options: list[str], temperature: float) -> None:
    from benchmarks.decode_steps import Steps
    from srt.distributed.parallel_state import TensorParallel

    words = ["--model-path", folder, "--device", "cpu", "--max-running-requests", str(max(USERS)), *server_options]
    args, cpu = parse_args(words), torch.device("cpu")
    runner = start_runner(args, ModelConfig.served_from(folder, args), folder, TensorParallel(0, 1, None, cpu), cpu)
    steps = Steps(runner, [CONTEXT] * max(USERS), STEPS * len(USERS) * 3, temperature)
    print(f"\n{'a step of the worker, ms':28}" + "".join(f"{rows:>10} rows" for rows in USERS))
    figures = []
    for rows in USERS:
        steps.run(rows, STEPS)
        parts = Parts()
        with watched(runner, parts):
            for _ in range(STEPS):
                parts.note("whole", steps.run(rows, 1))
        named = sum(seconds for name, seconds in parts.least_s.items() if name != "whole")
        parts.note("everything else", parts.least_s["whole"] - named)
        figures.append(parts.least_s)
    for name in sorted(figures[0], key=lambda name: -figures[0][name]):
        print(f"{name:28}" + "".join(f"{figure[name] * 1e3:15.3f}" for figure in figures))


class Reference:
    """The library's own loop, with its cache of keys and values."""

    def __init__(self, folder: str, dtype: torch.dtype, temperature: float) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}

    def tokens_s(self, prompts: np.ndarray, count: int) -> float:
        ids = torch.from_numpy(prompts)
        begin_s = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, **self._options
            )
        return len(prompts) * count / (time.perf_counter() - begin_s)


def served_tokens_s(url: str, prompts: np.ndarray, count: int, temperature: float) -> float:
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    calls = [Call.of(0.0, one, count, temperature) for one in prompts.tolist()]
    timings = run_client(address.hostname, address.port, time.monotonic(), calls)
    seconds = max(one.chunks_s[-1] for one in timings) - min(one.sent_s for one in timings)
    return len(prompts) * count / seconds


def compare(url: str, reference: Reference, options: argparse.Namespace, longest: int) -> None:
    """Both in turns: first a round that warms up, then those that count."""
    rng = np.random.default_rng(0)
    shapes = [(users, PROMPT, options.tokens) for users in USERS] + [(1, min(2000, longest - 8), 1)]
    print(
        f"\n{'tokens/s, the best of rounds':28}{'srt':>10}{'generate':>10}{'ratio':>8}{'step, ms':>10}{'between':>10}"
    )
    for users, prompt, count in shapes:
        ours, theirs = 0.0, 0.0
        for turn in range(options.rounds + 1):
            prompts = rng.integers(300, 1000, (users, prompt))
            served = served_tokens_s(url, prompts, count, options.temperature)
            generated = reference.tokens_s(prompts, count)
            if turn:
                ours, theirs = max(ours, served), max(theirs, generated)
            else:
                step_ms(url)  # forget the steps so far
        factor = prompt if count == 1 else 1
        step = step_ms(url) or 0.0
        said = f"{users} users" if count > 1 else f"a prompt of {prompt}"
        line = f"{said:28}{ours * factor:10.1f}{theirs * factor:10.1f}{ours / theirs:8.2f}"
        print(line + (f"{step:10.3f}{users / ours * 1e3 - step:10.3f}" if count > 1 else ""), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts-only", action="store_true", help="leave out the server")
    options, server_options = parser.parse_known_args()
    if min(options.tokens, options.rounds) < 2:
        parser.error("--tokens and --rounds take numbers from 2 on")
    folder = models.folder_of(options.model_path)
    threads = int(
        environment_of("worker", 1, 4, usable_cores()).get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", 1))
    )
    torch.set_num_threads(threads)
    given = ["--dtype", options.dtype, *server_options]
    print(
        f"{options.model_path}, {options.dtype}, {threads} threads, {usable_cores()} cores, PyTorch {torch.__version__}"
    )
    print_parts(folder, given, options.temperature)
    if options.parts_only:
        return 0
    args = parse_args(["--model-path", folder, *given])
    config = ModelConfig.served_from(folder, args)
    dtype = getattr(torch, config.torch_dtype if options.dtype == "auto" else options.dtype)
    with running_server(["--model-path", folder, "--device", "cpu", *given]) as url:
        compare(url, Reference(folder, dtype, options.temperature), options, config.context_length)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
