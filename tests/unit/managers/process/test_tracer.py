"""Recording, and one file of all recordings, with processes and clocks of the test's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.managers.process import tracer as tracer_module
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.trace_file import default_folder, merge, missing_parts, new_file, read_summary, write_summary
from srt.managers.process.tracer import DEVICE, PART_PREFIX, REQUEST, STEP, Tracer, request_number
from srt.server_args import ServerArgs
from tests.support.trace_checks import check_trace

ARGS = ServerArgs(model_path="m")


class Server:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.control = ControlWords.create(run_dir, ARGS)
        self.frontend, self.worker = (
            Tracer(name, run_dir, ControlWords.open(run_dir, ARGS), lambda: 7.0, pid)
            for pid, name in ((11, "frontend 0"), (12, "worker 0"))
        )

    def finish(self) -> dict[str, Any]:
        number = self.control.trace
        self.control.stop_trace()
        for tracer in (self.frontend, self.worker):
            tracer.tend()
        processes = ["worker 0", "frontend 0"]
        assert missing_parts(self.run_dir, number, processes) == []
        path = new_file(self.run_dir / "out")
        told = merge(self.run_dir, number, processes, [], path)
        assert read_summary(self.run_dir, number) is None
        write_summary(self.run_dir, number, told)
        assert read_summary(self.run_dir, number) == told
        trace: dict[str, Any] = json.loads(path.read_text())
        assert len(trace["traceEvents"]) == told["num_events"]
        return trace


def test_parts_of_all_processes_become_one_trace(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.control.start_trace(None)
    assert server.frontend.is_on and server.worker.is_on
    number = request_number(0, 5)
    server.frontend.begin(REQUEST, number, "request", 1.0)
    server.frontend.slice("submit", 1.0, 1.5, request="r")
    server.frontend.arrow("s", REQUEST, number, 1.2)
    server.frontend.mark(REQUEST, number, "first token", 3.0)
    server.frontend.end(REQUEST, number, "request", 4.0)
    server.worker.slice("launch", 2.0, 2.25, step=1)
    server.worker.arrow("t", STEP, 1, 2.0)
    server.worker.slice("forward", 2.0, 3.0, DEVICE)
    trace = server.finish()
    check_trace(trace)
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == [
        "frontend 0",
        "worker 0",
    ]
    (launch,) = (e for e in trace["traceEvents"] if e["name"] == "launch")
    assert (launch["ts"], launch["dur"], launch["args"]) == (2e6, 0.25e6, {"step": 1})
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"} == {"main", "device"}


def test_while_nothing_is_recorded_nothing_is_kept(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.frontend.tend()
    assert not server.frontend.is_on
    server.frontend.slice("late", 1.0)
    server.control.start_trace(None)
    server.frontend.tend()
    names = [event["name"] for event in server.finish()["traceEvents"]]
    assert "late" not in names
    assert not Tracer().is_on


def test_a_trace_does_not_hold_what_an_earlier_one_recorded(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.control.start_trace(None)
    server.worker.slice("first", 1.0)
    server.finish()
    server.control.start_trace(None)
    server.worker.slice("second", 1.0)
    names = [event["name"] for event in server.finish()["traceEvents"]]
    assert ("first" in names, "second" in names) == (False, True)


def test_a_trace_that_begins_before_the_last_is_written_erases_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.control.start_trace(num_steps=1)
    server.worker.slice("first", 1.0)
    server.control.count_step()
    assert server.control.start_trace(None) == 2
    server.worker.slice("second", 2.0)
    for tracer in (server.worker, server.frontend):
        tracer.tend()
    assert missing_parts(tmp_path, 1, ["worker 0", "frontend 0"]) == []
    path = new_file(tmp_path / "out")
    merge(tmp_path, 1, ["worker 0"], [], path)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert ("first" in names, "second" in names) == (True, False)
    names = [event["name"] for event in server.finish()["traceEvents"]]
    assert ("first" in names, "second" in names) == (False, True)


def test_a_part_that_cannot_be_written_is_missed_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path)
    number = server.control.start_trace(None)
    server.worker.slice("step", 1.0)
    server.control.stop_trace()
    hindrance = tmp_path / f"{PART_PREFIX}{number}-worker-0"
    hindrance.mkdir()  # as a full disk, of which root takes notice too
    files = sorted(tmp_path.iterdir())
    server.worker.tend()
    assert "Trace 1 lacks the events of this process, which could not be written: [Errno" in caplog.text
    assert sorted(tmp_path.iterdir()) == files
    server.worker.tend()
    assert len(caplog.records) == 1
    hindrance.rmdir()
    server.control.start_trace(None)
    server.worker.slice("step", 1.0)
    assert "step" in [event["name"] for event in server.finish()["traceEvents"]]


def test_a_trace_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        merge(tmp_path, 1, [], [], path)
    assert not list(tmp_path.iterdir())


def test_a_process_that_starts_while_others_record_has_no_earlier_traces_to_tell_of(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.control.start_trace(None)
    server.finish()
    server.control.start_trace(None)
    late = Tracer("worker 1", tmp_path, ControlWords.open(tmp_path, ARGS))
    late.tend()
    assert missing_parts(tmp_path, 1, ["worker 1"]) == ["worker 1"]


def test_memory_is_bounded_and_what_was_dropped_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_module, "MAX_EVENTS", 3)
    server = Server(tmp_path)
    server.control.start_trace(None)
    for _ in range(5):
        server.worker.slice("step", 1.0)
    trace = server.finish()
    assert [event["name"] for event in trace["traceEvents"]].count("step") == 3
    assert trace["otherData"] == {"num_dropped_events": 2}


def test_a_process_that_has_not_written_is_missed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    number = server.control.start_trace(None)
    server.control.stop_trace()
    server.worker.tend()
    assert missing_parts(tmp_path, number, ["worker 0", "frontend 0"]) == ["frontend 0"]
    told = merge(tmp_path, number, ["worker 0", "frontend 0"], ["frontend 0"], new_file(tmp_path))
    assert told["missing_processes"] == ["frontend 0"]


def test_a_recording_may_end_after_so_many_steps(tmp_path: Path) -> None:
    control = ControlWords.create(tmp_path, ARGS)
    control.count_step()
    assert control.start_trace(2) == 1
    control.count_step()
    assert control.trace == 1
    control.count_step()
    assert control.trace == -1
    assert control.start_trace(None) == 2
    control.count_step()
    assert control.trace == 2


def test_a_recording_may_begin_after_so_many_steps(tmp_path: Path) -> None:
    control = ControlWords.create(tmp_path, ARGS)
    assert control.start_trace(1, start_step=2) == 1
    for expected in ((0, True), (1, True), (-1, False), (-1, False)):
        control.count_step()
        assert (control.trace, control.is_trace_open) == expected
    assert [control.has_trace_ended(number) for number in (1, 2)] == [True, False]


def test_a_recording_that_is_stopped_before_it_begins_never_does(tmp_path: Path) -> None:
    server = Server(tmp_path)
    number = server.control.start_trace(None, start_step=1)
    assert not server.control.has_trace_ended(number)
    server.control.stop_trace()
    server.control.count_step()
    assert (server.control.trace, server.control.has_trace_ended(number)) == (-1, True)
    for tracer in (server.frontend, server.worker):
        tracer.tend()
    assert missing_parts(tmp_path, number, ["worker 0", "frontend 0"]) == []
    assert server.control.start_trace(None) == 2


def test_a_trace_is_named_as_was_asked(tmp_path: Path) -> None:
    assert new_file(tmp_path, "warm", "run-7").name == "warm-run-7.json"
    assert new_file(tmp_path, "warm", "run-7").name == "warm-run-7-1.json"
    assert new_file(tmp_path, "warm").name.startswith("warm-srt-trace-")


def test_traces_never_overwrite_one_another_and_their_folder_can_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_file(tmp_path / "a/b") != new_file(tmp_path / "a/b")
    monkeypatch.setenv("SRT_PROFILE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
