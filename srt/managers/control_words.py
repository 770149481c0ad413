"""Switches that are thrown while the server runs: one frontend is told, all processes see it, in memory that all have mapped."""

from __future__ import annotations

from pathlib import Path

from srt.server_args import ServerArgs
from srt.utils.shared_numbers import SharedNumbers

_FILE = "control"
_NAMES = ("trace", "traced_steps", "request_log_level", "gc_freezes")
NO_REQUEST_LOG = -1


class ControlWords:
    def __init__(self, numbers: SharedNumbers) -> None:
        self._cells = numbers.cells
        self._trace, self._traced_steps, self._request_log_level, self._gc_freezes = (
            numbers.place(name) for name in _NAMES
        )

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

    def start_trace(self, num_steps: int | None) -> int:
        """Returns its number. It ends by itself after `num_steps` steps of the model, if that is given."""
        assert self.trace <= 0, f"trace {self.trace} is being recorded"
        self._cells[self._traced_steps] = num_steps or 0
        self._cells[self._trace] = 1 - self.trace
        return self.trace

    def stop_trace(self) -> None:
        self._cells[self._trace] = -abs(self.trace)

    def count_traced_step(self) -> None:
        """By the scheduler, of each step that is done."""
        if self._cells[self._traced_steps] > 0:
            self._cells[self._traced_steps] -= 1
            if self._cells[self._traced_steps] == 0:
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
