"""What is kept of the logs for a bug report."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from srt.utils import log_files
from srt.utils.log_files import last_lines, log_file_handler, log_folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def say(process: str, sentence: str, pid: int = 7, created_s: float = 1e9) -> None:
    handler = log_file_handler(process, pid)
    record = logging.LogRecord("srt.x", logging.INFO, __file__, 1, sentence, (), None)
    record.created, record.msecs = created_s, 0.0
    handler.handle(record)
    handler.close()


def test_lines_of_all_processes_come_in_the_order_of_time() -> None:
    say("worker 0", "second", created_s=1e9 + 2)
    say("supervisor", "first", created_s=1e9 + 1)
    say("worker 1", "fourth\n  in two lines", created_s=1e9 + 4)
    say("scheduler 0", "third", pid=8, created_s=1e9 + 3)
    lines = last_lines(10)
    assert [line.split(" ", 2)[2] for line in lines[:3]] == [
        "server 7 supervisor INFO: first",
        "server 7 worker 0 INFO: second",
        "server 8 scheduler 0 INFO: third",
    ]
    assert lines[4] == "  in two lines"
    assert last_lines(2) == lines[3:]


def test_nobody_else_may_read_them() -> None:
    say("worker 0", "hello")
    assert stat.S_IMODE(log_folder().stat().st_mode) == 0o700


def test_they_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_BYTES", 1000)
    for number in range(100):
        say("worker 0", f"line {number}")
    assert sum(path.stat().st_size for path in log_folder().iterdir()) <= 2200
    assert last_lines(1)[0].endswith("line 99")


def test_only_the_newest_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_FILES", 3)
    for number in range(6):
        say("worker 0", "hello", pid=number)
        path = log_folder() / f"{number}-worker-0.log"
        os.utime(path, (number, number))
    say("worker 0", "hello", pid=9)
    assert {path.name for path in log_folder().iterdir()} == {f"{pid}-worker-0.log" for pid in (3, 4, 5, 9)}


def test_where_they_cannot_be_kept_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    say("worker 0", "hello")
    assert last_lines(5) == []


def test_a_folder_that_is_deleted_before_the_first_line_is_nobodys_problem() -> None:
    handler = log_file_handler("worker 0", 7)
    log_folder().rmdir()
    handler.handle(logging.LogRecord("srt.x", logging.INFO, __file__, 1, "hello", (), None))
    handler.close()
    assert last_lines(5) == []


def test_a_full_disk_is_nobodys_problem() -> None:
    log_folder().mkdir(mode=0o700)
    (log_folder() / "7-worker-0.log").symlink_to("/dev/full")
    handler = log_file_handler("worker 0", 7)
    for _ in range(3):
        handler.handle(logging.LogRecord("srt.x", logging.INFO, __file__, 1, "hello", (), None))
    handler.close()


def test_a_folder_that_somebody_else_prepared_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    log_folder().symlink_to(tmp_path / "elsewhere")
    say("worker 0", "secret")
    assert list((tmp_path / "elsewhere").iterdir()) == []
