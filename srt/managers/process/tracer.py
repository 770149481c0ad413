"""Recorder of one process's events while a trace is taken (`/start_profile`), in bounded memory.

Times are those of the clock that all processes of a host share. Without a trace, a caller that checks `is_on` first pays only for
reading one number.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from srt.managers.process.runtime_switches import ControlWords

MAX_EVENTS = 200_000  # per process and trace; later events are counted, not kept
PART_PREFIX = "trace-part-"
MAIN, DEVICE = 1, 2  # a process's rows in the trace

# Kinds of the numbers that identify arrows and spans.
_REPLICA_BITS = 48  # steps and batches are numbered by replica: its number stands above these bits
REQUEST, STATE, STEP, BATCH, HTTP = "request", "state", "step", "batch", "http"

Event = dict[str, Any]
NO_SWITCH = memoryview(bytes(8)).cast("d")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recording:
    events: list[Event] = field(default_factory=list)
    num_dropped: int = 0


class Tracer:
    """Recorder of a process's events. Some thread must call `tend` a few times a second; each thread records its own work."""

    def __init__(
        self,
        process: str = "",
        run_dir: str | Path = "",
        control: ControlWords | None = None,
        now_s: Callable[[], float] = time.monotonic,
        pid: int = 0,
        replica: int = 0,
    ) -> None:
        """Without `control` the tracer is never on. `replica`: the one that the process is a part of."""
        self._process = process
        self._run_dir = Path(run_dir)
        self._control = control
        self._switch = NO_SWITCH if control is None else control.trace_switch
        self._now_s = now_s
        self._replica = replica
        self._pid = pid or os.getpid()
        self._recordings: dict[int, _Recording] = {}  # by trace number: a new one may begin before the last is written
        self._written = 0 if control is None else _last_ended(control)

    @property
    def is_on(self) -> bool:
        return self._switch[0] > 0.0

    def slice(self, name: str, began_s: float, ended_s: float | None = None, row: int = MAIN, **args: object) -> None:
        """Record a span of work of a row. Slices of one row must nest or not overlap."""
        ended_s = self._now_s() if ended_s is None else ended_s
        self._add({"ph": "X", "name": name, "ts": began_s, "end": ended_s, "tid": row, "args": args})

    def begin(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        """Begin a span that may overlap others of its kind; `end` with the same kind, number and name closes it."""
        self._async("b", kind, number, name, at_s, args)

    def end(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        self._async("e", kind, number, name, at_s, args)

    def mark(self, kind: str, number: int, name: str, at_s: float | None = None, **args: object) -> None:
        """Mark a moment within a span."""
        self._async("n", kind, number, name, at_s, args)

    def count(self, name: str, at_s: float, values: Mapping[str, float]) -> None:
        """Record values that are drawn as curves over time."""
        self._add({"ph": "C", "name": name, "ts": at_s, "tid": MAIN, "args": values})

    def arrow(self, phase: str, kind: str, number: int, at_s: float, row: int = MAIN) -> None:
        """Record that an arrow starts (`s`), passes (`t`) or ends (`f`) at the slice that contains this moment."""
        if kind in (STEP, BATCH):
            number |= self._replica << _REPLICA_BITS
        event = {"ph": phase, "cat": kind, "name": kind, "id": number, "ts": at_s, "tid": row}
        self._add(event | ({"bp": "e"} if phase == "f" else {}))

    def tend(self) -> None:
        """Write this process's part once a recording has ended. If that fails, the trace lacks this part."""
        if self._control is None:
            return
        last = _last_ended(self._control)
        while self._written < last:
            self._written += 1
            try:
                self._write(self._written, self._recordings.pop(self._written, _Recording()))
            except (OSError, orjson.JSONEncodeError) as error:
                logger.error(
                    "Trace %d lacks the events of this process, which could not be written: %s", self._written, error
                )

    def _async(
        self, phase: str, kind: str, number: int, name: str, at_s: float | None, args: Mapping[str, object]
    ) -> None:
        at_s = self._now_s() if at_s is None else at_s
        self._add({"ph": phase, "cat": kind, "name": name, "id": number, "ts": at_s, "tid": MAIN, "args": args})

    def _add(self, event: Event) -> None:
        assert self._control is not None, "nothing is recorded without control words"
        number = self._control.trace
        if number <= self._written:
            return  # it has ended just now
        recording = self._recordings.get(number) or self._recordings.setdefault(number, _Recording())
        if len(recording.events) < MAX_EVENTS:
            recording.events.append(event)
        else:
            recording.num_dropped += 1

    def _write(self, number: int, recording: _Recording) -> None:
        """Write the part as a whole, or leave no file."""
        part = {
            "process": self._process,
            "pid": self._pid,
            "num_dropped": recording.num_dropped,
            "events": recording.events,
        }
        path = self._run_dir / f"{PART_PREFIX}{number}-{self._process.replace(' ', '-')}"
        fresh = path.with_name(f".{path.name}")
        data = orjson.dumps(part, default=str)
        try:
            fresh.write_bytes(data)
            fresh.rename(path)
        except OSError:
            fresh.unlink(missing_ok=True)  # free the disk, so that the summary can say that this part is missing
            raise


def _last_ended(control: ControlWords) -> int:
    number = control.trace
    return number - 1 if number > 0 else -number


def request_number(frontend: int, rid: int) -> int:
    """Return the number that identifies a request in the traces of all processes."""
    return ((frontend + 1) << 40) | rid


def batch_number(frontend: int, number: int, replica: int = 0) -> int:
    """Return the number that identifies a batch in the traces of all processes; schedulers need not give their replica."""
    return (replica << _REPLICA_BITS) | ((frontend + 1) << 40) | number
