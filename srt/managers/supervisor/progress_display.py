"""Display of the start: one line that changes on a terminal, a few plain lines or JSON elsewhere, nothing with `quiet`."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from typing import TextIO

from srt.managers.process.child_process import ChildKey
from srt.managers.process.startup_report import ChildStartup, StartupReport
from srt.utils.logs import json_line

REFRESH_S = 0.1
_CLEAR_LINE = "\r\x1b[K"


class ProgressDisplay:
    """Owner of the supervisor's standard error. `quiet` shows errors only. Texts that are shown go to the handler `keep` as well."""

    def __init__(
        self,
        *,
        quiet: bool,
        as_json: bool = False,
        stream: TextIO | None = None,
        keep: logging.Handler | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._as_json = as_json
        self._keep = keep or logging.NullHandler()
        self._live = not quiet and not as_json and self._stream.isatty()
        self._line_shown = False
        self._shown_s = -REFRESH_S

    def update(self, report: StartupReport, changed: ChildKey | None, now_s: float) -> None:
        """Show the start's progress; `changed` is the child that entered another phase."""
        if self._live and (changed or now_s - self._shown_s >= REFRESH_S):
            self._shown_s = now_s
            width = shutil.get_terminal_size().columns
            line = render(report, now_s)
            self._put(_CLEAR_LINE + line[: width - 1])
            self._line_shown = True
        elif not self._live and not self._quiet and changed and changed.index == 0:
            # Process 0 of each role is shown for all of the role.
            self._write(f"{now_s - report.started_s:5.1f} s  {changed}: {report.children[changed].phase}")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._write(text)

    def error(self, text: str) -> None:
        self._write(text, "error")

    def _write(self, text: str, level: str = "info") -> None:
        number = logging.getLevelNamesMapping()[level.upper()]
        self._keep.handle(logging.LogRecord(__name__, number, __file__, 0, text, (), None))
        if self._as_json:
            self._put(json_line(time.time(), level, "supervisor", text) + "\n")
            return
        self._put(f"{_CLEAR_LINE if self._line_shown else ''}{text}\n")
        self._line_shown = False

    def _put(self, text: str) -> None:
        """Write and flush, ignoring errors: a server keeps running when its output is closed or its log's disk is full."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def render(report: StartupReport, now_s: float) -> str:
    """Format the line `Starting 3.2 s | worker 0: weights 45 % of 2.7 GB | scheduler 0: ready | …`"""
    parts = [f"{child}: {_state(entry)}" for child, entry in report.children.items()]
    return " | ".join([f"Starting {now_s - report.started_s:.1f} s", *parts])


def _state(entry: ChildStartup) -> str:
    if entry.total <= 0 or entry.ready_s is not None:
        return entry.phase
    return f"{entry.phase} {100 * entry.done // entry.total} % of {_size(entry.total)}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
