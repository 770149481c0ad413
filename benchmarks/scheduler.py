"""What the scheduler costs per step of running decodes, by phase. No GPU, no sockets:   python -m benchmarks.scheduler

`result`: handling a StepResult (tokens, stop checks, ends). `plan`: making the next plan. `send`: batches for the frontends. `encode`:
both as bytes. Requests that end in a step are replaced by new ones, so that arrivals are part of what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from srt.managers.effects import Frontend, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler_state import Scheduler
from srt.protocol.codec import decode, encode
from srt.protocol.messages import (
    AckBatch,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerHello,
    int32_array,
)
from srt.server_args import ServerArgs

PHASES = ("arrive", "result", "plan and send", "encode")
VOCAB = 32_000
Float64Array = NDArray[np.float64]


class Bench:
    """A scheduler whose worker answers at once, with random tokens."""

    def __init__(self, rows: int, prompt_len: int, answer_len: int, waiting: int) -> None:
        self._rng = np.random.default_rng(0)
        self._prompt_len = prompt_len
        self._answer_len = answer_len
        self._rid = 0
        self.scheduler = Scheduler(ServerArgs(model_path="m", max_queued_requests=1 << 20), "p")
        pages = (rows + 8) * (prompt_len + 2 * answer_len + 32) // 16 * 2
        self.scheduler.handle(Worker(0), WorkerHello(0, "p", "c", "d", 16, pages, rows, 1 << 15, VOCAB), 0.0)
        self.scheduler.handle(Frontend(0), FrontendHello(0, "p"), 0.0)
        for _ in range(rows + waiting):
            self.scheduler.handle(Frontend(0), self.request(), 0.0)
        self.plans: list[StepPlan] = []

    def request(self) -> GenerateRequest:
        self._rid += 1
        prompt = self._rng.integers(0, VOCAB, self._prompt_len, np.int32)
        length = int(self._rng.integers(1, 2 * self._answer_len))
        sampling = SamplingSpec(length, stop_ids=int32_array([VOCAB + 1]))
        return GenerateRequest(
            self._rid, str(self._rid), prompt, int32_array([0]), [int32_array()], sampling, LogprobSpec(), self._rid
        )

    def result(self) -> StepResult:
        plan = self.plans.pop(0)
        (section,) = plan.sections
        count = int(section.extend_samples.sum()) + len(section.decode_slots)
        ids = self._rng.integers(0, VOCAB, count, np.int32)
        message = decode(encode(StepResult(plan.step, np.ones(count, np.int32), ids, 0, [], 0), 1, 0)).message
        assert isinstance(message, StepResult)
        return message

    def steps(self, count: int) -> Iterator[tuple[int, Float64Array]]:
        """Per step the rows of its result, and the seconds of each phase."""
        now, ended = 0.0, 0
        for _ in range(count):
            now += 0.01
            arrivals = [self.request() for _ in range(ended)]
            result = self.result() if self.plans else None
            times = [time.perf_counter()]
            for request in arrivals:
                self.scheduler.handle(Frontend(0), request, now)
            times.append(time.perf_counter())
            if result is not None:
                self.scheduler.handle(Worker(0), result, now)
            times.append(time.perf_counter())
            effects = self.scheduler.tick(now)
            times.append(time.perf_counter())
            for effect in effects:
                if isinstance(effect, (ToWorkers, ToFrontend)):
                    encode(effect.message, 1, 0)
            times.append(time.perf_counter())
            yield (
                (len(result.ids) if result is not None else 0),
                np.diff(times),
            )
            batches = [e.message for e in effects if isinstance(e, ToFrontend) and isinstance(e.message, TokenBatch)]
            ended = sum(len(batch.done) for batch in batches)
            for batch in batches:
                self.scheduler.handle(Frontend(0), AckBatch(batch.number), now)
            self.plans += [e.message for e in effects if isinstance(e, ToWorkers) and isinstance(e.message, StepPlan)]


def measure(rows: int, steps: int, prompt_len: int, answer_len: int, waiting: int) -> None:
    bench = Bench(rows, prompt_len, answer_len, waiting)
    gc.collect()
    gc.freeze()
    warm_up = 3 * answer_len
    seen = [(count, times) for i, (count, times) in enumerate(bench.steps(warm_up + steps)) if i >= warm_up]
    micros = np.array([times for _, times in seen]) * 1e6
    total = micros.sum(axis=1)
    name = f"{rows} rows, prompts of {prompt_len}, answers of 1 to {2 * answer_len - 1}, {waiting} waiting"
    print(f"\n{name}: {np.mean([count for count, _ in seen]):.0f} tokens a step")
    print(f"{'microseconds a step':20} {'p50':>8} {'p99':>8}")
    for phase, column in [*zip(PHASES, micros.T, strict=True), ("all", total)]:
        print(f"{phase:20} {np.percentile(column, 50):8.0f} {np.percentile(column, 99):8.0f}")
    figures = {"rows": rows, "waiting": waiting, "answer_len": answer_len, "p50_us": float(np.percentile(total, 50))}
    print(json.dumps({"benchmark": "scheduler", **figures, "p99_us": float(np.percentile(total, 99))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    measure(options.rows, options.steps, prompt_len=128, answer_len=2000, waiting=0)
    measure(options.rows, options.steps, prompt_len=128, answer_len=256, waiting=0)
    measure(options.rows, options.steps, prompt_len=32, answer_len=10, waiting=10)
    measure(options.rows, options.steps, prompt_len=32, answer_len=10, waiting=10_000)


if __name__ == "__main__":
    main()
