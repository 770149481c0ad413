"""What a trace must be for Perfetto and Chrome to show it as it was meant: the Trace Event Format, and what it leaves to the writer."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
COMMON = {"ph", "name", "pid", "tid"}
FIELDS = {
    "M": COMMON | {"args"},
    "X": COMMON | {"cat", "ts", "dur", "args"},
    **dict.fromkeys("bne", COMMON | {"cat", "id", "ts", "args"}),
    **dict.fromkeys("st", COMMON | {"cat", "id", "ts"}),
    "f": COMMON | {"cat", "id", "ts", "bp"},
}
NAMES = {"process_name": {"name": str}, "process_sort_index": {"sort_index": int}, "thread_name": {"name": str}}


def check_trace(trace: dict[str, Any]) -> None:
    """AssertionError if it is no such trace."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check_fields(event)
    _check_names(events)
    _check_order(events)
    _check_slices(events)
    _check_spans(events)
    _check_arrows(events)


def _check_fields(event: Event) -> None:
    assert set(event) == FIELDS[event["ph"]], event
    assert isinstance(event["name"], str) and event["name"], event
    assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0, event
    args = event.get("args", {})
    assert isinstance(args, dict) and all(isinstance(name, str) for name in args), event
    if event["ph"] == "M":
        assert {name: type(value) for name, value in args.items()} == NAMES[event["name"]], event
        return
    assert type(event["ts"]) in (int, float) and event["ts"] > 0, event
    assert isinstance(event["cat"], str) and event["cat"], event
    assert event.get("dur", 0) >= 0, event
    assert event.get("bp", "e") == "e", event
    if "id" in event:
        assert type(event["id"]) is int and 0 <= event["id"] < 1 << 53, event  # what a JavaScript number holds


def _check_names(events: list[Event]) -> None:
    """Every process and every row has one name, and all of them stand before what they are names of."""
    num_names = sum(event["ph"] == "M" for event in events)
    assert all(event["ph"] == "M" for event in events[:num_names])
    named: dict[str, list[Any]] = defaultdict(list)
    for event in events[:num_names]:
        named[event["name"]].append((event["pid"], event["tid"]) if event["name"] == "thread_name" else event["pid"])
    for ids in named.values():
        assert len(set(ids)) == len(ids)
    assert set(named["process_name"]) == set(named["process_sort_index"]) == {pid for pid, _ in named["thread_name"]}
    assert {(e["pid"], e["tid"]) for e in events[num_names:]} <= set(named["thread_name"])
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(set(names)) == len(names)


def _check_order(events: list[Event]) -> None:
    """In the order of time over all processes."""
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


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
    """Spans with the same kind and number begin and end like brackets; their marks lie in them."""
    open_names: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "bne":
            names = open_names[event["cat"], event["id"]]
            if event["ph"] == "b":
                assert event["name"] not in names, f"{event} began twice"
                names.append(event["name"])
            elif event["ph"] == "e":
                assert names and names.pop() == event["name"], f"{event} ends what is not the innermost"
            else:
                assert names, f"{event} marks nothing"
    assert not any(open_names.values()), "some do not end"


def _check_arrows(events: list[Event]) -> None:
    """Each arrow starts once and before all else of it, ends once at most and last, and each of its moments lies in a slice."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    phases: dict[tuple[str, int], str] = defaultdict(str)
    for event in events:
        if event["ph"] in "stf":
            phases[event["cat"], event["id"]] += event["ph"]
            row = slices[event["pid"], event["tid"]]
            before = row[: bisect_right(row, (event["ts"], float("inf")))]
            assert any(event["ts"] <= ended for _, ended in reversed(before)), f"an arrow without a slice: {event}"
    for arrow, order in phases.items():
        assert order[0] == "s" and order.count("s") == 1, (arrow, order)
        assert "f" not in order[:-1], (arrow, order)
