"""The start-up report and its display, with an invented clock."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

from srt.managers.process.child_process import ChildKey
from srt.managers.process.startup_report import StartupReport
from srt.managers.supervisor.progress_display import ProgressDisplay, render
from srt.protocol.messages import Heartbeat, Progress, Ready

WORKER, FRONTEND, SECOND = ChildKey("worker", 0), ChildKey("frontend", 0), ChildKey("frontend", 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report() -> StartupReport:
    return StartupReport(100.0, {WORKER: 100.1, FRONTEND: 100.2, SECOND: 100.2})


def test_phases_have_the_times_that_children_gave() -> None:
    start = report()
    start.record(WORKER, Progress("imports", 0, 0, 100.5), 100.6)
    start.record(WORKER, Progress("weights", 0, 10, 102.0), 102.1)
    start.record(WORKER, Progress("weights", 10, 10, 103.0), 103.1)
    start.record(WORKER, Heartbeat(0.0), 103.2)
    start.record(WORKER, Ready({"num_pages": 7}), 104.0)
    durations = [(phase, round(seconds, 6)) for phase, seconds in start.children[WORKER].durations()]
    assert durations == [("interpreter", 0.4), ("imports", 1.5), ("weights", 2.0)]
    assert "imports 1.50" in start.table()
    assert "weights 2.00" in start.table()


def test_the_file_counts_from_the_start_and_is_there_whole(tmp_path: Path) -> None:
    start = report()
    start.record(WORKER, Progress("imports", 0, 0, 100.5), 100.6)
    start.record(WORKER, Ready({"num_pages": 7}), 104.0)
    start.write(tmp_path / "startup.json", 104.5)
    written = json.loads((tmp_path / "startup.json").read_text())
    assert written["startup_s"] == 4.5
    assert written["children"]["worker 0"] == {
        "spawned_s": 0.1,
        "phases": [["imports", 0.5]],
        "ready_s": 4.0,
        "values": {"num_pages": 7},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["startup.json"]


def test_a_line_shows_every_process_and_weights_by_bytes() -> None:
    start = report()
    start.record(WORKER, Progress("weights", 1_200_000_000, 2_700_000_000, 102.0), 102.1)
    start.record(FRONTEND, Ready({}), 102.2)
    line = render(start, 103.24)
    assert line == "Starting 3.2 s | worker 0: weights 44 % of 2.7 GB | frontend 0: ready | frontend 1: starting"


def test_a_terminal_has_one_line_that_changes_and_is_cleared() -> None:
    stream, start = Terminal(), report()
    display = ProgressDisplay(quiet=False, stream=stream)
    for number in range(5):
        display.update(start, None, 101.0 + number)
    display.say("Ready at http://x after 5.0 s.")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().split("\r\x1b[K")[-1] == "Ready at http://x after 5.0 s.\n"


def test_elsewhere_there_are_few_lines_and_one_process_speaks_for_its_role() -> None:
    stream, start = io.StringIO(), report()
    display = ProgressDisplay(quiet=False, stream=stream)
    for _ in range(50):
        display.update(start, None, 101.0)
    display.update(start, WORKER, 101.0)
    display.update(start, SECOND, 101.0)
    assert stream.getvalue() == "  1.0 s  worker 0: starting\n"


def test_quiet_says_only_what_went_wrong() -> None:
    stream, start = Terminal(), report()
    display = ProgressDisplay(quiet=True, stream=stream)
    display.update(start, WORKER, 101.0)
    display.say("Ready.")
    display.error("The model does not fit.")
    assert stream.getvalue() == "The model does not fit.\n"


def test_a_reader_that_has_gone_does_not_end_the_server() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8", buffering=1) as stream:
        display = ProgressDisplay(quiet=False, stream=stream)
        display.say("Ready.")
        display.error("It failed.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
