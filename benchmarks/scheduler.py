"""What the scheduler costs, and what its prefix cache saves. No GPU, no sockets:   python -m benchmarks.scheduler [--quick]

Times are CPU time of this thread (`time.thread_time_ns`), so other load on the machine is not in them, though its use of shared
caches is. A step is everything that the scheduler's process does for it apart from the sockets: all messages are decoded from bytes
and encoded to bytes. Requests that end are replaced by new ones, so arrivals are part of what is measured. Ratios compare two
schedulers that take turns in one run; the scheduler's two forms, compiled and plain, take turns as processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.scheduler_cache import measure_cache
from benchmarks.scheduler_load import PHASES, Load, LoadedScheduler
from benchmarks.scheduler_reuse import measure_reuse
from srt.server_args import ServerArgs
from srt.utils.compiled import MODULES, SWITCH, plain_modules

GOAL_P50_US, GOAL_P99_US, GOAL_RATIO = 300, 1000, 1.2
POLICIES = next(f.metadata["choices"] for f in fields(ServerArgs) if f.name == "schedule_policy")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rows: int
    steps: int
    waiting: int
    cached_tokens: int
    prompt_len: int
    nodes: tuple[int, ...]
    num_chats: int


A_TENTH = Load("a tenth ends in each step", prompt_len=32, answer_len=10, waiting=10)
FULL = Sizes(256, 1000, 10_000, 1_000_000, 32_768, (1_000, 10_000, 100_000), 300)
QUICK = Sizes(16, 30, 100, 5_000, 2_048, (100, 1_000), 20)


def report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}))


def measure_steps(sizes: Sizes, policy: str, load: Load) -> None:
    micros = LoadedScheduler(sizes.rows, load, policy).measure(sizes.steps)
    total = micros.sum(axis=1)
    title = f"{sizes.rows} rows, {load.name}, {policy}"
    print(f"\n{title:56} {'p50':>8} {'p99':>8}   CPU microseconds a step")
    for phase, column in [*zip(PHASES, micros.T, strict=True), ("all", total)]:
        print(f"{phase:56} {np.percentile(column, 50):8.0f} {np.percentile(column, 99):8.0f}")
    print(f"{'goal':56} {GOAL_P50_US:8} {GOAL_P99_US:8}")
    p50, p99 = np.percentile(total, (50, 99)).round(1).tolist()
    form = form_of(plain_modules())
    report("scheduler step", load=load.name, policy=policy, rows=sizes.rows, form=form, p50_us=p50, p99_us=p99)


def form_of(plain: list[str]) -> str:
    """Name the scheduler's form. Figures of a mixture would be taken for those of one form, so it is refused."""
    if plain and len(plain) < len(MODULES):
        raise SystemExit(f"Only a part of the scheduler is compiled. Plain: {', '.join(plain)}")
    return "plain" if plain else "compiled"


def measure_ratio(sizes: Sizes, name: str, small: LoadedScheduler, large: LoadedScheduler) -> None:
    """The same step of two schedulers, which take turns of 50 steps, so that what else the machine does meets both."""
    seen: tuple[list[float], list[float]] = [], []
    for _ in range(max(sizes.steps // 50, 1)):
        for scheduler, times in zip((small, large), seen, strict=True):
            times += scheduler.measure(50).sum(axis=1).tolist()
    low, high = (float(np.median(times)) for times in seen)
    print(f"\n{name}: p50 {low:.0f} and {high:.0f} us a step, ratio {high / low:.2f} (goal {GOAL_RATIO})")
    report("scheduler ratio", name=name, p50_us=[round(low, 1), round(high, 1)], ratio=round(high / low, 3))


def measure_policy(sizes: Sizes, policy: str) -> None:
    measure_steps(sizes, policy, Load("long answers", prompt_len=128, answer_len=2000, waiting=0))
    measure_steps(sizes, policy, A_TENTH)
    few = LoadedScheduler(sizes.rows, A_TENTH, policy)
    many = LoadedScheduler(sizes.rows, replace(A_TENTH, waiting=sizes.waiting), policy)
    measure_ratio(sizes, f"10 and {sizes.waiting} waiting, {policy}", few, many)
    little, much = (LoadedScheduler(sizes.rows, A_TENTH, policy, tokens) for tokens in (1_000, sizes.cached_tokens))
    measure_ratio(sizes, f"1000 and {sizes.cached_tokens} cached tokens, {policy}", little, much)


def measure_forms(quick: bool) -> None:
    """The same load in two processes: the compiled scheduler, if it was compiled, and its sources as they are."""
    command = [sys.executable, "-m", "benchmarks.scheduler", "--only", "step", *(["--quick"] if quick else [])]
    seen: dict[str, list[float]] = {}
    for switch in ("", "0") * 3:
        run = subprocess.run(command, env=os.environ | {SWITCH: switch}, capture_output=True, text=True, check=True)
        said = json.loads(run.stdout.splitlines()[-1])
        seen.setdefault(said["form"], []).append(said["p50_us"])
    plain = round(float(np.median(seen["plain"])), 1)
    compiled = round(float(np.median(seen["compiled"])), 1) if "compiled" in seen else None
    ratio = round(compiled / plain, 3) if compiled else None
    ask = "" if compiled else " (`make compile` compiles the scheduler)"
    print(f"\n{A_TENTH.name}: p50 {compiled} us a step compiled, {plain} plain, ratio {ratio}{ask}")
    report("scheduler forms", load=A_TENTH.name, compiled_us=compiled, plain_us=plain, ratio=ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not what it costs")
    parser.add_argument("--only", choices=("steps", "step", "forms", "cache", "reuse"), help="one part of it")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    if options.only in (None, "steps"):
        for policy in POLICIES:
            measure_policy(sizes, policy)
    if options.only == "step":
        measure_steps(sizes, POLICIES[0], A_TENTH)
    if options.only in (None, "forms"):
        measure_forms(options.quick)
    if options.only in (None, "cache"):
        measure_cache(sizes.prompt_len, sizes.nodes, report)
    if options.only in (None, "reuse"):
        measure_reuse(sizes.num_chats, report)


if __name__ == "__main__":
    main()
