"""Everything that the GPU engine must show on one H200, in one run: the goals, what was measured, and whether they are met.

    python -m benchmarks.gpu_goals [part …] [--models qwen3-8b …] [--folder FOLDER]
    python -m benchmarks.gpu_goals --table [part …] [--folder FOLDER]        only what the last run has left there

Parts in the order of their worth: throughput, steps, serving, rate, starts, cold-starts, memory, attention, wishes, tests. Each is
commands of their own, as a user would run them; one that fails or takes too long is said so, and the next goes on. Lines of JSON and
the output of all commands are kept in the folder. Only figures of one and the same run are judged, the last of a kind. Exits with 1 if
a command failed, or a goal of the asked parts is missed or was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import limits, models

MODELS = ("qwen3-8b", "qwen3-0.6b", "qwen3-14b")
MOST_S = 540.0  # that one command may take
REQUESTS_AT_RATE = 1000
MEAN_OUTPUT = 562  # tokens of an answer in the usual mix
JSONL = "results.jsonl"
LAUNCH_256, ANSWER_256 = "host, 256 rows, launch_us_p50", "host, 256 rows, answer_us_p50"
HOST_WORK = "host work of a step of 256, µs"  # launch, sampling and answer
Key = tuple[str, str]  # model, figure
Figures = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that must be at least, or at most, so much."""

    part: str
    model: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def text(self) -> str:
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"


@dataclass(frozen=True, slots=True)
class Command:
    """One process, and what it is called in the report."""

    part: str
    name: str
    words: tuple[str, ...]


def goals() -> list[Goal]:
    sizes = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b")

    def of_all(part: str, figure: str, values: tuple[float, ...], is_least: bool = False) -> list[Goal]:
        pairs = zip(sizes, values, strict=True)
        return [Goal(part, m, figure, v if is_least else None, None if is_least else v) for m, v in pairs]

    return [
        *of_all("throughput", "output tokens/s", (27_500, 10_900, 7_050), is_least=True),
        *of_all("steps", "prefill tokens/s", (300_000, 40_000, 22_000), is_least=True),
        *of_all("steps", "decode 1, ms", (0.60, 4.0, 7.2)),
        *of_all("steps", "decode 64, ms", (2.8, 7.0, 10.5)),
        *of_all("steps", "decode 256, ms", (9.3, 17.2, 23.5)),
        *of_all("starts", "first token, caches, s", (8.0, 10.0, 13.0)),
        *of_all("cold-starts", "first token, no caches, s", (20.0, 22.0, 25.0)),
        *of_all("steps", HOST_WORK, (200, 200, 200)),
        Goal("steps", "qwen3-8b", "shared prefix, s", at_most=0.80),
        Goal("steps", "qwen3-8b", "shared prefix again, s", at_most=0.65),
        Goal("serving", "qwen3-8b", "HTTP / offline", at_least=0.95),
        Goal("serving", "qwen3-0.6b", "HTTP / offline", at_least=0.80),
        Goal("rate", "qwen3-8b", "TPOT p99 / step at half rate", at_most=1.5),
        Goal("rate", "qwen3-0.6b", "TPOT p99 / step at half rate", at_most=1.5),
    ]


def figures_of(records: Sequence[Mapping[str, Any]]) -> dict[Key, float]:
    """What the benchmarks' lines of JSON say, under the names of the goals; later lines win."""
    found: dict[Key, float] = {}
    for record in records:
        model = str(record.get("model", ""))
        found |= {(model, name): value for name, value in _figures_of(record)}
    for model in {model for model, _ in found}:
        served, offline = found.get((model, "HTTP tokens/s")), found.get((model, "output tokens/s"))
        if served is not None and offline is not None:
            found[model, "HTTP / offline"] = served / offline
        work = [found.pop((model, name), None) for name in (LAUNCH_256, ANSWER_256)]
        if work[0] is not None and work[1] is not None:
            found[model, HOST_WORK] = work[0] + work[1]
    return found


def _figures_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    match record.get("benchmark"):
        case "offline_throughput":
            yield "output tokens/s", record["output_tokens_s"]
        case "one_batch" if not record.get("sampling"):
            yield from (pair for line in record["lines"] if (pair := _of_line(line)) is not None)
        case "one_batch":
            yield from ((f"{pair[0]} (all wishes)", pair[1]) for line in record["lines"] if (pair := _of_line(line)))
        case "serving" if record["rate"]:
            # Between chunks lies what frontends and clients take too; the step is what it took the device.
            if "step_p50_ms" in record:
                yield "TPOT p99 / step at half rate", record["tpot_p99_ms"] / record["step_p50_ms"]
        case "serving":
            yield "HTTP tokens/s", record["output_tokens_s"]
        case "startup":
            caches = "no caches" if record["no_caches"] else "caches"
            yield f"first token, {caches}, s", min(record["first_token_s"])
        case "mixed_attention":
            yield f"{record['rows']} rows beside {record['chunk']}, one launch, µs", record["one_launch_us"]
            yield f"{record['rows']} rows beside {record['chunk']}, two launches, µs", record["two_launches_us"]


def _of_line(line: Mapping[str, Any]) -> tuple[str, float] | None:
    what, value = str(line["what"]), float(line["value"])
    if what.startswith("decode, "):
        return f"decode {what.removeprefix('decode, ').split(' ')[0]}, ms", value
    if what in (LAUNCH_256, ANSWER_256):
        return what, value
    if what.startswith("host, 1 rows, loop_us_"):
        return f"result to launch, 1 row, {what[-3:]}, µs", value
    if what.startswith("prefill, "):
        return "prefill tokens/s", value
    if what.startswith("shared prefix, "):
        return ("shared prefix again, s" if what.endswith("again") else "shared prefix, s"), value
    return None


def table(figures: Figures, wanted: Sequence[Goal]) -> str:
    """A line for every goal that is wanted, then for every figure without a goal."""
    lines = [f"{'model':12} {'figure':44} {'measured':>12} {'goal':>12}"]
    for goal in wanted:
        value = figures.get((goal.model, goal.figure))
        said = f"{'–':>12} {goal.text():>12}  not measured"
        if value is not None:
            said = f"{value:12,.4g} {goal.text():>12}  {'OK' if goal.is_met(value) else 'missed'}"
        lines.append(f"{goal.model:12} {goal.figure:44} {said}")
    judged = {(goal.model, goal.figure) for goal in goals()}
    lines += [
        f"{m:12} {name:44} {value:12,.4g}" for (m, name), value in sorted(figures.items()) if (m, name) not in judged
    ]
    return "\n".join(lines)


def commands(names: Sequence[str], results: Path, figures: Figures) -> Iterator[Command]:
    """All commands of all parts. What was measured so far says how large half the rate is, so ask for them as they are run."""
    to = ("--jsonl", str(results))

    def module(part: str, name: str, module_name: str, *words: str) -> Command:
        return Command(part, name, (sys.executable, "-m", module_name, *words))

    def bench(part: str, what: str, model: str, *words: str) -> Command:
        dummy = ("--model-path", model, "--load-format", "dummy")
        return module(part, f"{part} {model}", f"benchmarks.{what}", *dummy, *to, *words)

    yield from (bench("throughput", "offline_throughput", model) for model in names)
    yield from (bench("steps", "one_batch", model) for model in names)
    as_offline = ("--runs", "2")  # the best of as many
    yield from (bench("serving", "serving", model, *as_offline) for model in names if model != "qwen3-14b")
    for model in names:
        if model != "qwen3-14b" and (speed := figures.get((model, "output tokens/s"))):
            rate = ("--requests", str(REQUESTS_AT_RATE), "--rate", f"{speed / MEAN_OUTPUT / 2:.2f}")
            yield bench("rate", "serving", model, *rate)
    # The first of these starts leaves its kernels to the second.
    yield from (bench("starts", "startup", model, "--runs", "2") for model in names)
    yield from (bench("cold-starts", "startup", model, "--runs", "1", "--no-caches") for model in names)
    yield from (bench("memory", "worst_mix", model) for model in names[:1])
    for chunk in (64, 512, 2048):
        yield module("attention", f"attention {chunk}", "benchmarks.mixed_attention", "--chunk", str(chunk), *to)
    wishes = '{"repetition_penalty": 1.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1.0}, "temperature": 0.6}'
    yield from (bench("wishes", "one_batch", m, "--only", "decode", "--sampling", wishes) for m in names[:1])
    yield module("tests", "tests", "pytest", "-q", "-m", "gpu", "tests/gpu")


NEEDS = {"serving": "throughput", "rate": "throughput"}  # parts that are judged, or asked, by what another measures
PARTS = ("throughput", "steps", "serving", "rate", "starts", "cold-starts", "memory", "attention", "wishes", "tests")


def run(command: Command, log: Path, run_id: str) -> tuple[bool, str]:
    """Runs it to its end, or to the end of its time; whether it succeeded, and what became of it."""
    code: int | None = None
    begin_s = time.monotonic()
    with log.open("a") as out:
        out.write(f"\n=== {' '.join(command.words)}\n")
        out.flush()
        environment = {**os.environ, limits.RUN: run_id}
        process = subprocess.Popen(
            command.words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            code = process.wait(MOST_S)
            outcome = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {MOST_S:.0f} s"
        finally:  # also if this process is stopped
            _end(process)
    return code == 0, f"{outcome} ({time.monotonic() - begin_s:.0f} s)"


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, if it runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(results: Path, run_id: str | None = None) -> list[dict[str, Any]]:
    """All lines that are whole, or those of one run."""
    if not results.is_file():
        return []
    found = []
    for line in results.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # its writer was stopped
            continue
        if run_id is None or record.get("run", "") == run_id:
            found.append(record)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", default=MODELS, help="shapes in benchmarks/configs")
    parser.add_argument("--folder", type=Path, default=Path("gpu_goals"), help="where results and output are kept")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.folder.mkdir(parents=True, exist_ok=True)
    asked = set(options.parts or PARTS)
    asked |= {NEEDS[part] for part in asked if part in NEEDS}
    results = options.folder / JSONL
    is_well = True
    if options.table:
        run_id = next((str(record.get("run", "")) for record in reversed(read(results))), "")
    else:
        run_id = uuid.uuid4().hex[:12]
        for model in options.models:
            models.folder_of(model)  # written once, and not within a measured start
        figures: dict[Key, float] = {}
        for command in commands(options.models, results, figures):
            if command.part in asked:
                succeeded, outcome = run(command, options.folder / f"{command.part}.log", run_id)
                print(f"{command.name}: {outcome}", flush=True)
                is_well &= succeeded
                figures |= figures_of(read(results, run_id))
    records = read(results, run_id)
    found = figures_of(records)
    wanted = [goal for goal in goals() if goal.part in asked and goal.model in options.models]
    commits = sorted({str(record.get("commit") or "unknown") for record in records})
    print(f"run {run_id or 'without a name'} of commit {', '.join(commits)}")
    print(table(found, wanted))
    is_well &= all(
        (value := found.get((goal.model, goal.figure))) is not None and goal.is_met(value) for goal in wanted
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
