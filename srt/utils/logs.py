"""Log lines of all processes: one line per event, as text or JSON, with the name of the process and the id of the HTTP request."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from contextvars import ContextVar
from typing import TextIO

from srt.utils.log_files import log_file_handler

# Set in the task that answers an HTTP request, and inherited by the tasks that it starts.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")


def set_up_logging(process: str, level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Log to standard error (or `stream`) in the given format, in a child process of the supervisor.

    The last lines are also kept in a file for bug reports.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(process, log_format))
    logging.raiseExceptions = False  # if nobody reads the log, a server neither stops nor complains about it there
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    logging.basicConfig(level=level.upper(), handlers=[handler, log_file_handler(process, os.getppid())], force=True)


def show_lines_of(name: str, process: str, log_format: str) -> None:
    """Write the lines of the logger `name` to standard error, in a program that is not ours and has not set up logging itself."""
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_formatter(process, log_format))
        logger.addHandler(handler)


def _formatter(process: str, log_format: str) -> logging.Formatter:
    return JsonFormatter(process) if log_format == "json" else TextFormatter(process)


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        name = end.thread.name if end.thread else "unknown"
        trace = (end.exc_type, end.exc_value, end.exc_traceback)
        logging.getLogger(__name__).error("The thread %s has ended.", name, exc_info=trace)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call, `logger.info("sentence", extra=fields(rid=…))`, with values that only a JSON line shows."""
    return {"fields": values}


def details(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call with values that text and JSON lines both show."""
    return {"details": values}


class TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        shown = "".join(f" {name}={value!r}" for name, value in getattr(record, "details", {}).items())
        request_id = REQUEST_ID.get()
        return super().formatMessage(record) + shown + (f" [{request_id}]" if request_id else "")


class JsonFormatter(logging.Formatter):
    """Formats a record as `{"time": "2026-01-31T12:00:00.000Z", "level": "info", "process": "worker 0", "logger": …, "message": …}`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return json_line(
            record.created,
            record.levelname.lower(),
            self._process,
            record.getMessage(),
            logger=record.name,
            request_id=REQUEST_ID.get() or None,
            **getattr(record, "fields", {}),
            **getattr(record, "details", {}),
            traceback=self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None,
        )


def json_line(created_s: float, level: str, process: str, message: str, **values: object) -> str:
    """Return a log line in JSON; values that are None are left out."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s)) + f".{int(created_s % 1 * 1000):03}Z"
    line: dict[str, object] = {"time": at, "level": level, "process": process, "message": message}
    line |= {name: value for name, value in values.items() if value is not None}
    return json.dumps(line, default=str, ensure_ascii=False)
