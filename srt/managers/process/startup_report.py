"""Times of the start: when each phase of each process began, on one time line, for the display, the report and the benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srt.managers.process.child_process import ChildKey
from srt.protocol.messages import FromChild, Progress, Ready, Scalar

STARTUP_FILE = "startup.json"  # in the run directory, written when the server is ready


@dataclass(slots=True)
class ChildStartup:
    spawned_s: float
    phases: list[tuple[str, float]] = field(default_factory=list)  # (phase, when it began)
    done: int = 0
    total: int = 0
    ready_s: float | None = None
    values: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return "ready" if self.ready_s is not None else self.phases[-1][0] if self.phases else "starting"

    def durations(self) -> list[tuple[str, float]]:
        """Return each phase with its seconds; the first phase, `interpreter`, lasts until the process's first message."""
        marks = [("interpreter", self.spawned_s), *self.phases]
        ends = [began for _, began in marks[1:]] + [self.ready_s or marks[-1][1]]
        return [(phase, max(0.0, end - began)) for (phase, began), end in zip(marks, ends, strict=True)]


class StartupReport:
    """Record of a server's start. All times are CLOCK_MONOTONIC; `started_s` is when the kernel started the supervisor."""

    def __init__(self, started_s: float, spawned_s: Mapping[ChildKey, float]) -> None:
        self.started_s = started_s
        self.children = {child: ChildStartup(when) for child, when in spawned_s.items()}

    def record(self, child: ChildKey, message: FromChild, now_s: float) -> bool:
        """Record a child's message; True if its phase changed."""
        entry = self.children[child]
        before = entry.phase
        match message:
            case Progress(phase, done, total, at_s):
                if not entry.phases or entry.phases[-1][0] != phase:
                    entry.phases.append((phase, at_s))
                entry.done, entry.total = done, total
            case Ready(values):
                entry.ready_s, entry.values = now_s, values
            case _:
                pass
        return entry.phase != before

    def value(self, child: ChildKey, name: str) -> Scalar:
        """Return a fact that this child reported when it was ready."""
        return self.children[child].values.get(name)

    def as_json(self, ready_s: float) -> dict[str, Any]:
        """Return the report for JSON; times are seconds since the supervisor's start."""

        def since(when_s: float) -> float:
            return round(when_s - self.started_s, 4)

        return {
            "startup_s": since(ready_s),
            "children": {
                str(child): {
                    "spawned_s": since(entry.spawned_s),
                    "phases": [[phase, since(began)] for phase, began in entry.phases],
                    "ready_s": None if entry.ready_s is None else since(entry.ready_s),
                    "values": dict(entry.values),
                }
                for child, entry in self.children.items()
            },
        }

    def write(self, path: Path, ready_s: float) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.as_json(ready_s)), "utf-8")
        part.rename(path)  # so that readers see the whole file or none

    def table(self) -> str:
        """Format a line per process: when it was started and how long each phase took."""
        lines = ["start-up, seconds:"]
        for child, entry in self.children.items():
            phases = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in entry.durations())
            lines.append(f"  {child!s:12} at {entry.spawned_s - self.started_s:.2f}  {phases}")
        return "\n".join(lines)
