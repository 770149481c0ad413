"""Events of one process while a trace is recorded: on the clock that all processes of a host share, in bounded memory.

While none is, a caller that asks `is_on` first pays for reading one number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from srt.managers.control_words import ControlWords

MAX_EVENTS = 200_000  # of one process in one trace: later ones are counted, not kept
PART_PREFIX = "trace-part-"
MAIN, DEVICE = 1, 2  # rows of a process

# What a number is a number of, where an arrow or a span has one.
REQUEST, STATE, STEP, BATCH, HTTP = "request", "state", "step", "batch", "http"

Event = dict[str, Any]
NO_SWITCH = memoryview(bytes(8)).cast("d")


class Tracer:
    """`tend` must be called a few times a second by some thread; all else by the threads whose work it tells of."""

    def __init__(
        self,
        process: str = "",
        run_dir: str | Path = "",
        control: ControlWords | None = None,
        now_s: Callable[[], float] = time.monotonic,
        pid: int = 0,
    ) -> None:
        """Without `control` it is never on."""
        self._process = process
        self._run_dir = Path(run_dir)
        self._control = control
        self._switch = NO_SWITCH if control is None else control.trace_switch
        self._now_s = now_s
        self._pid = pid or os.getpid()
        self._recording = 0
        self._events: list[Event] = []
        self._num_dropped = 0
        self._written = 0 if control is None else -min(control.trace, 0)

    @property
    def is_on(self) -> bool:
        return self._switch[0] > 0.0

    def slice(self, name: str, began_s: float, ended_s: float | None = None, row: int = MAIN, **args: object) -> None:
        """Something that a row was busy with. Slices of a row lie in one another or apart."""
        ended_s = self._now_s() if ended_s is None else ended_s
        self._add({"ph": "X", "name": name, "ts": began_s, "end": ended_s, "tid": row, "args": args})

    def begin(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        """Something that goes on beside others of its kind, until `end` with the same kind, number and name."""
        self._async("b", kind, number, name, at_s, args)

    def end(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        self._async("e", kind, number, name, at_s, args)

    def mark(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        """A moment of it."""
        self._async("n", kind, number, name, at_s, args)

    def arrow(self, phase: str, kind: str, number: int, at_s: float, row: int = MAIN) -> None:
        """An arrow starts (`s`), passes (`t`) or ends (`f`) at the slice that contains this moment."""
        event = {"ph": phase, "cat": kind, "name": kind, "id": number, "ts": at_s, "tid": row}
        self._add(event | ({"bp": "e"} if phase == "f" else {}))

    def tend(self) -> None:
        """Write down what was recorded when the recording has ended."""
        if self._control is None:
            return
        number = self._control.trace
        if number > 0:
            self._follow(number)
        elif -number != self._written:
            self._follow(-number)
            self._write(-number)

    def _async(
        self, phase: str, kind: str, number: int, name: str, at_s: float | None, args: Mapping[str, object]
    ) -> None:
        at_s = self._now_s() if at_s is None else at_s
        self._add({"ph": phase, "cat": kind, "name": name, "id": number, "ts": at_s, "tid": MAIN, "args": args})

    def _add(self, event: Event) -> None:
        assert self._control is not None, "nothing is recorded without control words"
        number = self._control.trace
        if number <= 0:
            return  # it has ended just now
        self._follow(number)
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._num_dropped += 1

    def _follow(self, number: int) -> None:
        if self._recording != number:
            self._recording, self._events, self._num_dropped = number, [], 0

    def _write(self, number: int) -> None:
        events, self._events = self._events, []
        part = {
            "process": self._process,
            "pid": self._pid,
            "num_dropped": self._num_dropped,
            "events": events,
        }
        path = self._run_dir / f"{PART_PREFIX}{number}-{self._process.replace(' ', '-')}"
        fresh = path.with_name(f".{path.name}")
        fresh.write_bytes(orjson.dumps(part, default=str))
        fresh.rename(path)
        self._written = number


def request_number(frontend: int, rid: int) -> int:
    """One number for a request in all processes."""
    return ((frontend + 1) << 40) | rid


def batch_number(frontend: int, number: int) -> int:
    return ((frontend + 1) << 40) | number
