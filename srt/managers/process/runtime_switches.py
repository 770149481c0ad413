"""Switches that are thrown while the server runs: one frontend is told, all processes see it, in memory that all have mapped."""

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
        """Once, by the supervisor, before anybody looks."""
        return cls._with_defaults(SharedNumbers.create(run_dir / _FILE, _NAMES), args)

    @classmethod
    def open(cls, run_dir: str | Path, args: ServerArgs) -> ControlWords:
        """Where there is no supervisor, nobody else sees what is set."""
        shared = SharedNumbers.open(Path(run_dir) / _FILE)
        return cls._with_defaults(SharedNumbers.private(_NAMES), args) if shared is None else cls(shared)

    @classmethod
    def _with_defaults(cls, numbers: SharedNumbers, args: ServerArgs) -> ControlWords:
        words = cls(numbers)
        words.request_log_level = args.log_requests_level if args.log_requests else NO_REQUEST_LOG
        return words

    @property
    def trace(self) -> int:
        """The number of the trace that is being recorded; negative, that of the last one; 0 if there was none."""
        return int(self._cells[self._trace])

    @property
    def trace_switch(self) -> memoryview[float]:
        """One number, above 0 while a trace is being recorded: for those who look all the time."""
        return self._cells[self._trace : self._trace + 1]

    @property
    def latest_trace(self) -> int:
        """The number of the trace that was asked for last, whatever has become of it; 0 if there was none."""
        return int(self._cells[self._latest_trace])

    @property
    def is_trace_open(self) -> bool:
        """A trace is being recorded, or will be after some steps."""
        return self._cells[self._trace] > 0 or self._cells[self._steps_before_trace] > 0

    def has_trace_ended(self, number: int) -> bool:
        """Nothing more will be recorded in the trace with this number."""
        return self.latest_trace > number or self.trace == -number

    def start_trace(self, num_steps: int | None, start_step: int = 0) -> int:
        """Returns its number. It begins after `start_step` more steps of the model, at once if that is 0, and ends by itself after
        `num_steps` steps of its own, if that is given."""
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
        """Count a step that is done; called by the scheduler. A trace may begin or end with it."""
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
        """How often all processes were asked to take what they hold out of garbage collection."""
        return int(self._cells[self._gc_freezes])

    def freeze_gc(self) -> None:
        self._cells[self._gc_freezes] += 1

    @property
    def request_log_level(self) -> int:
        """How much of each request is logged, or NO_REQUEST_LOG."""
        return int(self._cells[self._request_log_level])

    @request_log_level.setter
    def request_log_level(self, level: int) -> None:
        self._cells[self._request_log_level] = level
