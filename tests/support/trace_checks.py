"""What a trace must be for Perfetto and Chrome to show it as it was meant: the Trace Event Format, and what it leaves to the writer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
PHASES = {"M", "X", "b", "e", "n", "s", "t", "f"}


def check_trace(trace: dict[str, Any]) -> None:
    """AssertionError if it is no such trace."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check_fields(event)
    _check_names(events)
    _check_slices(events)
    _check_spans(events)
    _check_arrows(events)


def _check_fields(event: Event) -> None:
    assert event["ph"] in PHASES, event
    assert isinstance(event["name"], str) and event["name"], event
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] != "M":
        assert isinstance(event["ts"], int | float) and event["ts"] > 0, event
        assert isinstance(event["cat"], str), event
    if event["ph"] == "X":
        assert event["dur"] >= 0, event
    if event["ph"] in "benstf":
        assert isinstance(event["id"], int) and 0 <= event["id"] < 1 << 53, event


def _check_names(events: list[Event]) -> None:
    """Every process and every row has one name."""
    named = [(e["pid"], e["tid"] if e["name"] == "thread_name" else None) for e in events if e["ph"] == "M"]
    threads = [one for one in named if one[1] is not None]
    assert len(set(threads)) == len(threads)
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= set(threads)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(set(names)) == len(names)


def _check_slices(events: list[Event]) -> None:
    """Slices of a row lie in one another or apart: anything else is drawn wrongly."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            began_ns = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append((began_ns, began_ns + round(event["dur"] * 1000)))
    for slices in rows.values():
        open_until: list[int] = []
        for began, ended in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1], (
                f"a slice from {began} ns to {ended} ns reaches over the end of another"
            )
            open_until.append(ended)


def _check_spans(events: list[Event]) -> None:
    """What ends has begun, unless that was before the recording."""
    begun: dict[tuple[str, int, str], float] = {}
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda e: e["ts"]):
        key = event["cat"], event["id"], event["name"]
        if event["ph"] == "b":
            assert key not in begun, f"{key} began twice"
            begun[key] = event["ts"]
        else:
            begun.pop(key, None)


def _check_arrows(events: list[Event]) -> None:
    """Each arrow starts once, and binds to slices: its moments lie in one."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    starts = [(e["cat"], e["id"]) for e in events if e["ph"] == "s"]
    assert len(set(starts)) == len(starts)
    for event in events:
        if event["ph"] in "st" or (event["ph"] == "f" and event["cat"] != "request"):  # who leaves does so at any time
            row = slices[event["pid"], event["tid"]]
            assert any(began <= event["ts"] <= ended for began, ended in row), f"an arrow without a slice: {event}"
