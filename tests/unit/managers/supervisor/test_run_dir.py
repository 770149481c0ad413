"""The run directory and the sweep of what dead servers left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from srt.managers.supervisor.run_dir import RunDir, is_in_use, sweep
from srt.utils.errors import StartError


def leave_behind(parent: Path, name: str) -> Path:
    """What a killed server leaves: its folder with a lock that nobody holds."""
    folder = parent / name
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(0o600)
    (folder / "f1").touch()
    return folder


def test_it_is_private_and_gone_after_remove(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    (run_dir.path / "rendezvous").touch()
    run_dir.remove()
    run_dir.remove()
    assert list(tmp_path.iterdir()) == []


def test_who_tidies_up_temporary_files_sees_that_it_is_in_use(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder_fd = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run_dir.remove()
    fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder_fd)


def test_the_next_start_sweeps_what_a_killed_server_left(tmp_path: Path) -> None:
    left = leave_behind(tmp_path, "srt-dead")
    run_dir = RunDir(tmp_path)
    assert not left.exists()
    run_dir.remove()


def test_two_servers_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    assert first.path != second.path
    assert sweep(tmp_path) == []
    assert first.path.exists()
    first.remove()
    second.remove()


def test_a_folder_whose_lock_is_held_stays(tmp_path: Path) -> None:
    left = leave_behind(tmp_path, "srt-alive")
    with (left / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [left]


def test_it_can_be_told_whether_a_server_runs_in_a_folder(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    left = leave_behind(tmp_path, "srt-dead")
    assert is_in_use(run_dir.path)
    assert not is_in_use(left)
    assert not is_in_use(tmp_path / "missing")
    run_dir.remove()


def test_what_is_not_a_servers_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "srt-without-lock").mkdir(mode=0o700)
    open_to_all = leave_behind(tmp_path, "srt-open")
    open_to_all.chmod(0o755)
    target = leave_behind(tmp_path, "elsewhere")
    (tmp_path / "srt-link").symlink_to(target)
    assert sweep(tmp_path) == []
    assert (target / "f1").exists()


def test_a_temporary_folder_with_too_long_a_name_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / ("x" * 90)
    parent.mkdir()
    with pytest.raises(StartError, match="TMPDIR"):
        RunDir(parent)
    assert list(parent.iterdir()) == []


def test_a_temporary_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="TMPDIR"):
        RunDir(tmp_path / "missing")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(lock: int, how: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fcntl, "flock", no_space)
    with pytest.raises(StartError, match=rf"{tmp_path} cannot be used \(No space left on device\): set TMPDIR"):
        RunDir(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_temporary_folder_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_found)
    with pytest.raises(StartError, match=r"No temporary folder can be used .* set TMPDIR"):
        RunDir()
