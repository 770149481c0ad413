"""One trace from the parts of all processes, in the format that Perfetto and Chrome open (Trace Event Format, JSON)."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from srt.managers.tracer import DEVICE, MAIN, PART_PREFIX

FOLDER_VARIABLE = "SRT_PROFILE_DIR"
_SUMMARY_PREFIX = "trace-summary-"
_ROWS = {MAIN: "main", DEVICE: "device"}
_ORDER = ("frontend", "scheduler", "worker")


def default_folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())


def new_file(folder: Path) -> Path:
    """A file that did not exist; OSError if there cannot be one."""
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime("srt-trace-%Y%m%d-%H%M%S", time.gmtime())
    for attempt in range(1000):
        path = folder / f"{name}{f'-{attempt}' if attempt else ''}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{folder} has 1000 traces of this second")


def missing_parts(run_dir: Path, number: int, processes: Iterable[str]) -> list[str]:
    """Who has not written its part yet."""
    return [process for process in processes if not _part(run_dir, number, process).exists()]


def merge(run_dir: Path, number: int, processes: Sequence[str], missing: Sequence[str], path: Path) -> dict[str, Any]:
    """Write the trace, delete the parts, and say how much there is."""
    events: list[dict[str, Any]] = []
    num_dropped = 0
    for place, process in enumerate(sorted(processes, key=_place)):
        part_path = _part(run_dir, number, process)
        try:
            part = orjson.loads(part_path.read_bytes())
        except OSError:
            continue
        part_path.unlink(missing_ok=True)
        num_dropped += part["num_dropped"]
        events += _named(part, place)
    path.write_bytes(
        orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"num_dropped_events": num_dropped}})
    )
    return {
        "path": str(path),
        "num_events": len(events),
        "num_dropped_events": num_dropped,
        "missing_processes": list(missing),
    }


def write_summary(run_dir: Path, number: int, told: dict[str, Any]) -> None:
    """Tell whoever asks with `read_summary` what became of this trace."""
    summary = run_dir / f"{_SUMMARY_PREFIX}{number}"
    fresh = summary.with_name(f".{summary.name}")
    fresh.write_bytes(orjson.dumps(told))
    fresh.rename(summary)


def read_summary(run_dir: Path, number: int) -> dict[str, Any] | None:
    """What became of this trace; None before that is known."""
    try:
        told: dict[str, Any] = orjson.loads((run_dir / f"{_SUMMARY_PREFIX}{number}").read_bytes())
    except OSError:
        return None
    return told


def _named(part: dict[str, Any], place: int) -> list[dict[str, Any]]:
    pid = part["pid"]
    rows = sorted({event["tid"] for event in part["events"]} | {MAIN})
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": part["process"]}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}},
    ]
    named += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": _ROWS[row]}} for row in rows]
    for event in part["events"]:
        event["pid"] = pid
        began_ns = round(event["ts"] * 1e9)
        event["ts"] = began_ns / 1000
        if event["ph"] == "X":
            # Both ends rounded, not the length: so a slice never reaches into the one that begins where it ends.
            event["dur"] = (round(event.pop("end") * 1e9) - began_ns) / 1000
            event["cat"] = "work"
    return [*named, *part["events"]]


def _part(run_dir: Path, number: int, process: str) -> Path:
    return run_dir / f"{PART_PREFIX}{number}-{process.replace(' ', '-')}"


def _place(process: str) -> tuple[int, str]:
    role = process.partition(" ")[0]
    return (_ORDER.index(role) if role in _ORDER else len(_ORDER)), process
