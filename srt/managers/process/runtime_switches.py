"""Switches that change while the server runs: one frontend sets them, all processes read them in shared memory."""

from __future__ import annotations

from pathlib import Path

from srt.server_args import ServerArgs
from srt.utils.shared_numbers import SharedNumbers

_FILE = "control"
_NAMES = ("trace", "latest_trace", "steps_before_trace", "traced_steps", "request_log_level", "gc_freezes")
NO_REQUEST_LOG = -1


class ControlWords:
    def __init__(self, numbers: SharedNumbers) -> None:
        self._cells = numbers.cells
        places = (numbers.place(name) for name in _NAMES)
        self._trace, self._latest_trace, self._steps_before_trace, self._traced_steps, *others = places
        self._request_log_level, self._gc_freezes = others

    @classmethod
    def create(cls, run_dir: Path, args: ServerArgs) -> ControlWords:
        """Create the shared memory. Called once, by the supervisor, before any process opens it."""
        return cls._with_defaults(SharedNumbers.create(run_dir / _FILE, _NAMES), args)

    @classmethod
    def open(cls, run_dir: str | Path, args: ServerArgs) -> ControlWords:
        """Open the shared memory; without a supervisor, return switches that are private to this process."""
        shared = SharedNumbers.open(Path(run_dir) / _FILE)
        return cls._with_defaults(SharedNumbers.private(_NAMES), args) if shared is None else cls(shared)

    @classmethod
    def _with_defaults(cls, numbers: SharedNumbers, args: ServerArgs) -> ControlWords:
        words = cls(numbers)
        words.request_log_level = args.log_requests_level if args.log_requests else NO_REQUEST_LOG
        return words

    @property
    def trace(self) -> int:
        """The number of the trace being recorded; if there is none, the last one's number, negated; 0 if there was none yet."""
        return int(self._cells[self._trace])

    @property
    def trace_switch(self) -> memoryview[float]:
        """A cell that is above 0 while a trace is being recorded, for readers that check it often."""
        return self._cells[self._trace : self._trace + 1]

    @property
    def latest_trace(self) -> int:
        """The number of the trace asked for last, in whatever state; 0 if there was none."""
        return int(self._cells[self._latest_trace])

    @property
    def is_trace_open(self) -> bool:
        """True if a trace is being recorded, or will be after some steps."""
        return self._cells[self._trace] > 0 or self._cells[self._steps_before_trace] > 0

    def has_trace_ended(self, number: int) -> bool:
        """Return whether the recording of the trace with this number is over."""
        return self.latest_trace > number or self.trace == -number

    def start_trace(self, num_steps: int | None, start_step: int = 0) -> int:
        """Start a trace and return its number. It begins after `start_step` more steps of the model, and ends by itself after
        `num_steps` recorded steps, if given."""
        assert not self.is_trace_open, f"trace {self.latest_trace} is being recorded"
        number = self.latest_trace + 1
        self._cells[self._traced_steps] = num_steps or 0
        self._cells[self._latest_trace] = number
        if start_step:
            self._cells[self._steps_before_trace] = start_step
        else:
            self._cells[self._trace] = number
        return number

    def stop_trace(self) -> None:
        self._cells[self._steps_before_trace] = 0
        self._cells[self._trace] = -self.latest_trace

    def count_step(self) -> None:
        """Count a completed step; called by the scheduler. A trace may begin or end with it."""
        cells = self._cells
        if cells[self._steps_before_trace] > 0:
            cells[self._steps_before_trace] -= 1
            if cells[self._steps_before_trace] == 0:
                cells[self._trace] = cells[self._latest_trace]
        elif cells[self._trace] > 0 and cells[self._traced_steps] > 0:
            cells[self._traced_steps] -= 1
            if cells[self._traced_steps] == 0:
                self.stop_trace()

    @property
    def gc_freezes(self) -> int:
        """Number of times that all processes were asked to freeze their objects (gc.freeze)."""
        return int(self._cells[self._gc_freezes])

    def freeze_gc(self) -> None:
        self._cells[self._gc_freezes] += 1

    @property
    def request_log_level(self) -> int:
        """Level of detail with which requests are logged, or NO_REQUEST_LOG."""
        return int(self._cells[self._request_log_level])

    @request_log_level.setter
    def request_log_level(self, level: int) -> None:
        self._cells[self._request_log_level] = level
