"""Taking a trace of all processes: they record their parts (`tracer.py`), and one frontend merges these into a file (`trace_file.py`).

The routes that ask for it are in `profiling.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from srt.entrypoints.request_schema import bad_parameter
from srt.managers.process.heartbeats import UNHEALTHY_S, ProcessStatus
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.trace_file import (
    claim,
    default_folder,
    merge,
    missing_parts,
    new_file,
    read_summary,
    release,
    take_over,
    write_summary,
)
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.sampling.parameter_checks import show

PARTS_S = 5.0  # time for all processes to write their parts
WRITTEN_S = 60.0  # time for the merged file to be written
LOOK_S = 0.05  # polling interval

logger = logging.getLogger(__name__)


class Profiler:
    """Owner of the traces that this frontend was asked to record, and of those it took over from a frontend that died.

    Only one trace is recorded at a time in the whole server.
    """

    def __init__(
        self, run_dir: Path | None, control: ControlWords, statuses: Callable[[], list[ProcessStatus]]
    ) -> None:
        """Create a profiler for the processes that share `run_dir`; without a folder nothing can be recorded."""
        self._run_dir = run_dir
        self._control = control
        self._statuses = statuses
        self._writing: set[asyncio.Task[None]] = set()

    def start(
        self, output_dir: str | None, num_steps: int | None, start_step: int = 0, prefix: str = "", name: str = ""
    ) -> Path:
        """Begin recording, at once or after `start_step` steps, and return the path of the future file. Raise RequestError if a trace is
        being recorded already, or if the file cannot be written."""
        if self._run_dir is not None and self._has_taken_over(self._run_dir, self._control.latest_trace):
            self._control.stop_trace()
        if self._run_dir is None or self._control.is_trace_open:
            raise RequestError(400, "A trace is being recorded already: stop it first.")
        if output_dir and not output_dir.startswith("/"):
            reason = "must be an absolute path, since the server's working directory may differ from yours"
            raise bad_parameter("output_dir", f"{reason}, not {show(output_dir)}")
        try:
            path = new_file(Path(output_dir) if output_dir else default_folder(), prefix, name)
        except (OSError, ValueError) as error:  # a ValueError for names that no file can have
            raise bad_parameter("output_dir", f"cannot be written to ({error})") from error
        number = self._control.start_trace(num_steps, start_step)
        claim(self._run_dir, number, path)
        self._begin_to_write(self._run_dir, number, path)
        return path

    async def stop(self) -> dict[str, Any]:
        """End the recording, wait until some frontend has written the file, and return its summary."""
        run_dir, number = self._run_dir, self._control.latest_trace
        if run_dir is None or not number:
            raise RequestError(400, "No trace is being recorded: start one first.")
        self._control.stop_trace()
        try:
            async with asyncio.timeout(WRITTEN_S):
                await _until(lambda: self._is_written(run_dir, number))
        except TimeoutError:
            raise RequestError(503, f"The trace was not written within {WRITTEN_S:g} s.") from None
        told = read_summary(run_dir, number) or {}
        if "error" in told:
            raise RequestError(500, told["error"])
        return told

    def _is_written(self, run_dir: Path, number: int) -> bool:
        """Return whether the trace is written. Takes the trace over if its frontend dies during the wait."""
        return not self._has_taken_over(run_dir, number) and read_summary(run_dir, number) is not None

    def _has_taken_over(self, run_dir: Path, number: int) -> bool:
        """Take over a trace whose frontend has died before writing it; return whether that was so."""
        if not number or read_summary(run_dir, number) is not None:
            return False
        path = take_over(run_dir, number)
        if path is None:
            return False
        self._begin_to_write(run_dir, number, path)
        return True

    def _begin_to_write(self, run_dir: Path, number: int, path: Path) -> None:
        task = asyncio.create_task(self._write(run_dir, number, path))
        self._writing.add(task)
        task.add_done_callback(self._handle_end)

    async def _write(self, run_dir: Path, number: int, path: Path) -> None:
        """Wait until the recording has ended and all parts are there, then merge them into one file."""
        await _until(lambda: self._control.has_trace_ended(number))
        statuses = [status for status in self._statuses() if status.process != "supervisor"]
        alive = [status.process for status in statuses if status.silent_s < UNHEALTHY_S]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARTS_S):
                await _until(lambda: not missing_parts(run_dir, number, alive))
        missing = missing_parts(run_dir, number, alive)
        missing += [status.process for status in statuses if status.silent_s >= UNHEALTHY_S]
        try:
            told = await asyncio.to_thread(merge, run_dir, number, alive, missing, path)
        except OSError as error:
            sentence = f"The trace {path} could not be written: {error.strerror}."
            write_summary(run_dir, number, {"error": sentence})
            logger.error("%s", sentence)
        else:
            write_summary(run_dir, number, told)
            logger.info("The trace %s has %d events.", path, told["num_events"])
        release(run_dir, number)

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The trace could not be written: %s", error)


async def _until(is_so: Callable[[], bool]) -> None:
    """Poll until `is_so()` is true: other processes cause it, and they send no signal."""
    while True:
        if is_so():
            return
        await asyncio.sleep(LOOK_S)
