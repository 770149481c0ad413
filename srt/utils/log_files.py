"""Keep the last log lines of this user's servers in small files in the temporary folder, for bug reports.

The files are bounded and private to the user. If they cannot be written, nothing is kept and nothing fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path

MAX_BYTES = 128 << 10  # per file; each process has two, the current and the previous one
MAX_FILES = 60  # over all servers
_SUFFIX = ".log"
_BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")


def log_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"srt-logs-{os.getuid()}"


def log_file_handler(process: str, server_pid: int) -> logging.Handler:
    """Return a handler that keeps the lines of this process; one that does nothing if they cannot be kept."""
    with contextlib.suppress(OSError):
        folder = log_folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
            _sweep(folder)
            path = folder / f"{server_pid}-{process.replace(' ', '-')}{_SUFFIX}"
            handler = _BoundedFileHandler(path, encoding="utf-8", delay=True)
            handler.setFormatter(
                logging.Formatter(f"%(asctime)s server {server_pid} {process} %(levelname)s: %(message)s")
            )
            return handler
    return logging.NullHandler()


class _BoundedFileHandler(logging.FileHandler):
    """Starts a new file when one is full, and keeps the previous one.

    The standard library's rotating handler is not used because its module loads sockets and pickle, which slows the start.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # emit opens the file, and tell flushes it
            super().emit(record)
            if self.stream is not None and self.stream.tell() > MAX_BYTES:
                self.close()
                os.replace(self.baseFilename, self.baseFilename + ".1")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: a full disk must not disturb the server."""


def last_lines(count: int) -> list[str]:
    """Return the last lines of all processes in order of time, each traceback in one piece; empty if there are no files."""
    records: list[list[str]] = []
    for path in sorted(log_folder().glob(f"*{_SUFFIX}*"), reverse=True):  # the previous file, .log.1, before .log
        with contextlib.suppress(OSError):
            for line in path.read_text("utf-8", "replace").splitlines():
                if _BEGINNING.match(line) or not records:
                    records.append([])
                records[-1].append(line)
    records.sort(key=lambda record: record[0][:23])
    return [line for record in records for line in record][-count:]


def _sweep(folder: Path) -> None:
    """Delete all but the newest files."""
    files = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in files[MAX_FILES:]:
        with contextlib.suppress(OSError):
            path.unlink()
