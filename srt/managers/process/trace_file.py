"""Files of a trace: the claim of the frontend that takes it, and the merging of the processes' parts into one file.

Perfetto and Chrome open that file (Trace Event Format, JSON).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from srt.managers.process.tracer import DEVICE, MAIN, PART_PREFIX
from srt.utils.host import is_exiting

FOLDER_VARIABLE = "SRT_PROFILE_DIR"
Event = dict[str, Any]
_SUMMARY_PREFIX = "trace-summary-"
_CLAIM_PREFIX = "trace-claim-"
_ROWS = {MAIN: "main", DEVICE: "device"}
_ORDER = ("frontend", "scheduler", "worker")


def default_folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())


def new_file(folder: Path, prefix: str = "", name: str = "") -> Path:
    """Create a new file; OSError if that fails. Without a `name`, it is named after the time."""
    folder.mkdir(parents=True, exist_ok=True)
    name = name or time.strftime("srt-trace-%Y%m%d-%H%M%S", time.gmtime())
    name = f"{prefix}-{name}" if prefix else name
    for attempt in range(1000):
        path = folder / f"{name}{f'-{attempt}' if attempt else ''}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{folder} has 1000 traces of this name")


def missing_parts(run_dir: Path, number: int, processes: Iterable[str]) -> list[str]:
    """Return the processes that have not written their part yet."""
    return [process for process in processes if not _part(run_dir, number, process).exists()]


def merge(run_dir: Path, number: int, processes: Sequence[str], missing: Sequence[str], path: Path) -> dict[str, Any]:
    """Write the trace, delete the parts, and return a summary. OSError, and no file, if there is no room for it."""
    names: list[Event] = []
    events: list[Event] = []
    num_dropped = 0
    for place, process in enumerate(sorted(processes, key=_place)):
        part_path = _part(run_dir, number, process)
        try:
            part = orjson.loads(part_path.read_bytes())
        except OSError:
            continue
        part_path.unlink(missing_ok=True)
        num_dropped += part["num_dropped"]
        names += _names(part, place)
        events += _on_one_clock(part)
    events = [*names, *_whole(sorted(events, key=_time))]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"num_dropped_events": num_dropped}}
    try:
        path.write_bytes(orjson.dumps(trace))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return {
        "path": str(path),
        "num_events": len(events),
        "num_dropped_events": num_dropped,
        "missing_processes": list(missing),
    }


def claim(run_dir: Path, number: int, path: Path) -> None:
    """Record that this process makes that trace, at `path`. If the record cannot be written, no process can take the trace over."""
    with contextlib.suppress(OSError):
        _claim(run_dir, number, os.getpid()).symlink_to(path)


def take_over(run_dir: Path, number: int) -> Path | None:
    """Claim a trace whose process has ended. Returns the path to write it to; None if there is none to take over."""
    for claimed in run_dir.glob(f"{_CLAIM_PREFIX}{number}-*"):
        if is_exiting(int(claimed.name.rpartition("-")[2])):
            ours = _claim(run_dir, number, os.getpid())
            with contextlib.suppress(OSError):  # another process was faster
                claimed.rename(ours)
                return ours.readlink()
    return None


def release(run_dir: Path, number: int) -> None:
    """Delete this process's claim: the trace is written."""
    _claim(run_dir, number, os.getpid()).unlink(missing_ok=True)


def write_summary(run_dir: Path, number: int, told: dict[str, Any]) -> None:
    """Publish the outcome of this trace, for `read_summary`."""
    summary = run_dir / f"{_SUMMARY_PREFIX}{number}"
    fresh = summary.with_name(f".{summary.name}")
    fresh.write_bytes(orjson.dumps(told))
    fresh.rename(summary)


def read_summary(run_dir: Path, number: int) -> dict[str, Any] | None:
    """Return the outcome of this trace; None until it is known."""
    try:
        told: dict[str, Any] = orjson.loads((run_dir / f"{_SUMMARY_PREFIX}{number}").read_bytes())
    except OSError:
        return None
    return told


def _names(part: dict[str, Any], place: int) -> list[Event]:
    pid = part["pid"]
    rows = sorted({event["tid"] for event in part["events"]} | {MAIN})
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": part["process"]}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": _ROWS[row]}} for row in rows),
    ]


def _on_one_clock(part: dict[str, Any]) -> list[Event]:
    events: list[Event] = part["events"]
    for event in events:
        event["pid"] = part["pid"]
        began_ns = round(event["ts"] * 1e9)
        event["ts"] = began_ns / 1000
        if event["ph"] == "X":
            # Round both ends, not the length: a slice then never overlaps the one that begins where it ends.
            event["dur"] = (round(event.pop("end") * 1e9) - began_ns) / 1000
            event["cat"] = "work"
    return events


def _time(event: Event) -> tuple[float, float]:
    """Return the sorting key of an event: of two slices that begin together, the longer, outer one comes first."""
    return event["ts"], -event.get("dur", 0.0)


def _whole(events: list[Event]) -> list[Event]:
    """Drop ends, marks and arrowheads of spans that began before the recording, and end spans still open with it."""
    whole: list[Event] = []
    open_spans: dict[tuple[str, int], list[Event]] = {}
    arrows: set[tuple[str, int]] = set()
    for event in events:
        key = event["cat"], event.get("id", 0)
        match event["ph"]:
            case "b":
                open_spans.setdefault(key, []).append(event)
            case "e":
                if not any(one["name"] == event["name"] for one in open_spans.get(key, ())):
                    continue
                open_spans[key] = [one for one in open_spans[key] if one["name"] != event["name"]]
            case "n" if not open_spans.get(key):
                continue
            case "s":
                arrows.add(key)
            case "t" | "f" if key not in arrows:
                continue
        whole.append(event)
    last = max((event["ts"] + event.get("dur", 0.0) for event in whole), default=0.0)
    for spans in open_spans.values():
        whole += [{**one, "ph": "e", "ts": last, "args": {"cut": True}} for one in reversed(spans)]
    return whole


def _part(run_dir: Path, number: int, process: str) -> Path:
    return run_dir / f"{PART_PREFIX}{number}-{process.replace(' ', '-')}"


def _claim(run_dir: Path, number: int, pid: int) -> Path:
    """Return the path of a claim, a symlink to the trace's path: renaming it succeeds for one process only."""
    return run_dir / f"{_CLAIM_PREFIX}{number}-{pid}"


def _place(process: str) -> tuple[int, str]:
    role = process.partition(" ")[0]
    return (_ORDER.index(role) if role in _ORDER else len(_ORDER)), process
