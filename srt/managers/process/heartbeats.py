"""Heartbeats: each process writes its state once a second into shared memory, where all others can read it.

A process that is stopped or hangs cannot answer a question; but every reader sees that its heartbeat grows old.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.utils.shared_numbers import NumberFiles, SharedNumbers

BEAT_S = 1.0
# A process is unhealthy, but not ended yet (watchdog.py says who ends it), if it was silent for longer than UNHEALTHY_S, because a thread
# that does nothing else sends a heartbeat each second, or if it made no progress for STUCK_S and its work comes in small pieces.
UNHEALTHY_S = 5.0
STUCK_S = 10.0
_PREFIX = "heartbeat-"
_NAMES = ("pid", "beat_s", "age_s", "is_overdue", "num_replaced")


class HeartbeatWriter:
    """Writer of one process's heartbeat; `process` is a name like `worker 0`. If the folder is not writable, no other process sees it."""

    def __init__(self, run_dir: str | Path, process: str, *, is_elsewhere: bool = False) -> None:
        """Write this process's own heartbeat, or that of a process on another host, whose pid means nothing here."""
        self._numbers = SharedNumbers.fresh(Path(run_dir) / file_name(_PREFIX, process), _NAMES)
        self._numbers.set("pid", 0 if is_elsewhere else os.getpid())

    def beat(self, now_s: float, age_s: float = 0.0, is_overdue: bool = False) -> None:
        """Record a sign of life at `now_s` (CLOCK_MONOTONIC). `age_s`: seconds since a piece of work was last completed; 0 while idle."""
        self._numbers.set("age_s", age_s)
        self._numbers.set("is_overdue", is_overdue)
        self._numbers.set("beat_s", now_s)

    def count_replacement(self) -> None:
        """Count a process that was started again; called by the supervisor."""
        self._numbers.set("num_replaced", self._numbers.get("num_replaced") + 1)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    process: str
    pid: int  # 0: on another host
    silent_s: float  # since its last heartbeat
    age_s: float  # since it last completed a piece of work
    is_overdue: bool
    num_replaced: int = 0  # processes that it has started as replacements

    def trouble(self, stuck_s: float) -> str | None:
        """Return a sentence that says why this process is not healthy, or None."""
        name = self.process.capitalize()
        if self.silent_s > UNHEALTHY_S:
            return f"{name} has given no sign of life for {self.silent_s:.0f} s."
        if self.is_overdue:
            return f"{name} waits for a step that takes too long."
        if self.age_s > stuck_s:
            return f"{name} has made no progress for {self.age_s:.0f} s."
        return None


class HeartbeatReader:
    """Reader of the heartbeats of all processes of a server."""

    def __init__(self, run_dir: str | Path, worker_stuck_s: float) -> None:
        """`worker_stuck_s`: the time that a worker's largest step may take."""
        self._files = NumberFiles(Path(run_dir), _PREFIX)
        self._worker_stuck_s = worker_stuck_s

    def read(self, now_s: float) -> list[ProcessStatus]:
        """Return the status of every process that has written a heartbeat."""
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
        """Return a sentence that says why requests of this frontend cannot be served now, or None. Other frontends do not matter.

        A process in `expected` without any heartbeat is a reason as well.
        """
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
        """Return a sentence that says why this process cannot be relied upon now, or None."""
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
