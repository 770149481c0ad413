"""sd_notify, with a socket of the test's in systemd's place."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srt.managers.supervisor.systemd import ServiceManager


@contextmanager
def systemd(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)
        yield sock


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_is_told_and_children_do_not_find_the_socket(tmp_path: Path, is_abstract: bool) -> None:
    name = f"srt-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": f"@{name}" if is_abstract else name, "WATCHDOG_USEC": "2000000", "OTHER": "x"}
    with systemd(f"\0{name}" if is_abstract else name) as sock:
        manager = ServiceManager(environment)
        assert environment == {"OTHER": "x"}
        manager.ready("Ready at http://x")
        assert sock.recv(100) == b"READY=1\nSTATUS=Ready at http://x"
        manager.beat(10.0)
        manager.beat(10.1)
        manager.beat(10.5)
        manager.stopping()
        manager.failed("Worker 0 was killed.")
        said = [sock.recv(100) for _ in range(4)]
        assert said == [b"WATCHDOG=1", b"WATCHDOG=1", b"STOPPING=1\nSTATUS=Stopping", b"STATUS=Worker 0 was killed."]


def test_without_systemd_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        manager = ServiceManager(environment)
        manager.ready("Ready")
        manager.beat(1.0)


def test_a_watchdog_that_is_meant_for_another_process_is_not_fed(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    with systemd(name) as sock:
        manager = ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"})
        manager.beat(1.0)
        with pytest.raises(BlockingIOError):
            sock.recv(100)
