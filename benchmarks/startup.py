"""Seconds from process start to the first token, by process and phase, beside what the slowest process needs for itself.

    python -m benchmarks.startup --model-path DIR [--runs 3] [--no-caches] [any option of the server]

Goal: total ≤ 1.3 × the slowest process's own imports and loading in the same run. Waiting for others is not its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import limits, models
from srt.utils.cache_folders import FOLDERS, VARIABLE, cache_environment

GOAL = 1.3
WAITING = ("workers", "waiting for the engine", "communicator")  # phases in which a process waits for others
DEFAULT_MODEL = ".cache/models/random-qwen3"


@dataclass(frozen=True, slots=True)
class Phase:
    process: str
    name: str
    begin_s: float  # since the supervisor's process began
    duration_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server."""

    phases: list[Phase]
    ready_s: float
    first_token_s: float

    def own_s(self) -> dict[str, float]:
        """What each process needed for itself."""
        own: dict[str, float] = {}
        for phase in self.phases:
            own[phase.process] = own.get(phase.process, 0.0) + (phase.name not in WAITING) * phase.duration_s
        return own

    @property
    def ratio(self) -> float:
        return self.first_token_s / max(self.own_s().values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=DEFAULT_MODEL)
    parser.add_argument("--runs", type=int, default=3, help="starts; the table is of the median one")
    parser.add_argument(
        "--no-caches", action="store_true", help="without kernels and graphs that earlier starts compiled"
    )
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    words = ["--model-path", models.folder_of(options.model_path), *server_options]
    starts = sorted(
        (measure(words, options.no_caches) for _ in range(options.runs)), key=lambda start: start.first_token_s
    )
    middle = starts[len(starts) // 2]
    print(table(middle))
    print(summary(starts))
    record = as_record(starts, middle) | {
        "model": options.model_path,
        "no_caches": options.no_caches,
        "options": server_options,
    }
    print(json.dumps(record))
    limits.write_jsonl(options.jsonl, record)
    return 0


def measure(words: list[str], no_caches: bool = False) -> Start:
    """Start a server, ask it for one token, read its own report, and stop it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        began_s = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "-m", "srt.launch_server", "--port", "0", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder, **(empty_caches(folder) if no_caches else {})},
        )
        try:
            url = wait_for_url(server)
            ask(f"{url}/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
            first_token_s = time.monotonic() - began_s
            report = ask(f"{url}/server_info")["startup"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    phases = [phase for name, child in report["children"].items() for phase in phases_of(name, child)]
    return Start(phases, report["startup_s"], first_token_s)


def empty_caches(folder: str) -> dict[str, str]:
    """The variables that lead what is compiled into this folder; what was downloaded stays where it is."""
    caches = Path(folder) / "caches"
    here = {**os.environ, **cache_environment(os.environ)}
    downloaded = here.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    moved = {name: str(caches / place) for name, place in FOLDERS.items()}
    return {**moved, VARIABLE: str(caches), "HF_HOME": downloaded}


def phases_of(process: str, child: dict[str, Any]) -> list[Phase]:
    marks = [("interpreter", child["spawned_s"]), *child["phases"]]
    ends = [begin for _, begin in marks[1:]] + [child["ready_s"]]
    return [Phase(process, name, begin, end - begin) for (name, begin), end in zip(marks, ends, strict=True)]


def wait_for_url(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if "Ready at " in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
            return line.split("Ready at ")[1].split()[0]
    raise SystemExit("the server did not start:\n" + "".join(said))


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def table(start: Start) -> str:
    lines = [f"{'process':14} {'phase':24} {'begin s':>8} {'s':>8}"]
    lines += [f"{p.process:14} {p.name:24} {p.begin_s:8.2f} {p.duration_s:8.2f}" for p in start.phases]
    own = start.own_s()
    lines += ["", f"{'process':14} {'own imports and loading, s':>33}"]
    lines += [f"{process:14} {seconds:33.2f}" for process, seconds in own.items()]
    lines += ["", f"ready {start.ready_s:.2f} s, first token {start.first_token_s:.2f} s"]
    lines += [f"first token / slowest process's own: {start.ratio:.2f} (goal: at most {GOAL})"]
    return "\n".join(lines)


def summary(starts: list[Start]) -> str:
    seconds = [start.first_token_s for start in starts]
    ratios = sorted(start.ratio for start in starts)
    return (
        f"{len(starts)} starts: first token after {min(seconds):.2f} to {max(seconds):.2f} s,"
        f" median {statistics.median(seconds):.2f}; ratio {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


def as_record(starts: list[Start], middle: Start) -> dict[str, Any]:
    return {
        "benchmark": "startup",
        "first_token_s": [round(start.first_token_s, 3) for start in starts],
        "ready_s": round(middle.ready_s, 3),
        "own_s": {process: round(seconds, 3) for process, seconds in middle.own_s().items()},
        "ratio": round(middle.ratio, 3),
        "goal": GOAL,
        "phases": [asdict(phase) for phase in middle.phases],
    }


if __name__ == "__main__":
    sys.exit(main())
