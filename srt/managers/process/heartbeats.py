"""Signs of life: what every process says about itself once a second, in memory that all others can read without asking.

A process that is stopped or hangs cannot answer a question; but that its sign grows old is seen by whoever looks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.utils.shared_numbers import NumberFiles, SharedNumbers

BEAT_S = 1.0
SILENT_S = 5.0  # signs come every second, from a thread that nothing keeps busy
STUCK_S = 10.0  # of processes whose work comes in small pieces
_PREFIX = "heartbeat-"
_NAMES = ("pid", "beat_s", "age_s", "is_overdue", "num_replaced")


class HeartbeatWriter:
    """Of one process, named like `worker 0`. Without a folder that can be written to, nobody sees it."""

    def __init__(self, run_dir: str | Path, process: str) -> None:
        self._numbers = SharedNumbers.fresh(Path(run_dir) / file_name(_PREFIX, process), _NAMES)
        self._numbers.set("pid", os.getpid())

    def beat(self, now_s: float, age_s: float = 0.0, is_overdue: bool = False) -> None:
        """Alive at `now_s` (CLOCK_MONOTONIC). `age_s`: since it last completed what it had to do; 0 when there is nothing to do."""
        self._numbers.set("age_s", age_s)
        self._numbers.set("is_overdue", is_overdue)
        self._numbers.set("beat_s", now_s)

    def count_replacement(self) -> None:
        """A process that had ended was started again. The supervisor says so."""
        self._numbers.set("num_replaced", self._numbers.get("num_replaced") + 1)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    process: str
    pid: int
    silent_s: float  # since it last gave a sign
    age_s: float  # since it last completed what it had to do
    is_overdue: bool
    num_replaced: int = 0  # processes that it has started in the place of others

    def trouble(self, stuck_s: float) -> str | None:
        """The sentence, if it cannot be called healthy."""
        name = self.process.capitalize()
        if self.silent_s > SILENT_S:
            return f"{name} has given no sign of life for {self.silent_s:.0f} s."
        if self.is_overdue:
            return f"{name} waits for a step that takes too long."
        if self.age_s > stuck_s:
            return f"{name} has made no progress for {self.age_s:.0f} s."
        return None


class HeartbeatReader:
    """Of all processes of a server."""

    def __init__(self, run_dir: str | Path, worker_stuck_s: float) -> None:
        """A worker's step takes as long as it takes: `worker_stuck_s` is how long the largest may."""
        self._files = NumberFiles(Path(run_dir), _PREFIX)
        self._worker_stuck_s = worker_stuck_s

    def read(self, now_s: float) -> list[ProcessStatus]:
        """Those who have given a sign at all."""
        return [
            ProcessStatus(
                name.replace("-", " "),
                int(values["pid"]),
                max(0.0, now_s - values["beat_s"]),
                values["age_s"] + max(0.0, now_s - values["beat_s"] - BEAT_S) * (values["age_s"] > 0),
                bool(values["is_overdue"]),
                int(values["num_replaced"]),
            )
            for name, values in self._files.read().items()
            if values["beat_s"] > 0
        ]

    def trouble(self, statuses: list[ProcessStatus], frontend: str, expected: Sequence[str] = ()) -> str | None:
        """Why requests of this frontend cannot be served now; None if nothing speaks against it. Other frontends do not matter.
        Of those that are `expected` there must be a sign at all."""
        seen = {status.process for status in statuses}
        for process in expected:
            if process not in seen:
                return f"{process.capitalize()} has left no sign of life."
        for status in statuses:
            role = status.process.partition(" ")[0]
            if role != "frontend" or status.process == frontend:
                found = self.trouble_of(status)
                if found is not None:
                    return found
        return None

    def trouble_of(self, status: ProcessStatus) -> str | None:
        """Why this process cannot be relied upon now."""
        return status.trouble(self._worker_stuck_s if status.process.startswith("worker") else STUCK_S)


def as_json(statuses: list[ProcessStatus]) -> dict[str, Any]:
    return {
        status.process: {
            "pid": status.pid,
            "silent_s": round(status.silent_s, 3),
            "progress_age_s": round(status.age_s, 3),
        }
        for status in statuses
    }


def file_name(prefix: str, process: str) -> str:
    return prefix + process.replace(" ", "-")
