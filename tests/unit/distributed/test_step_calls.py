"""Workers that run steps together call each other, whether the called one listens to anything else or not."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from srt.distributed.errors import CollectiveError
from srt.distributed.step_calls import StepCalls
from tests.support.server_process import END_S


def test_calls_are_heard_in_any_order_and_the_latest_step_counts(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    first, second = (StepCalls(path, END_S) for path in paths)
    all_heard = threading.Semaphore(0)
    second.notify(all_heard.release)
    assert all_heard.acquire(timeout=END_S), "for calls that came before"
    steps = [*range(100), 42]  # more than the system keeps for a socket that nobody reads
    for step in steps:
        first.call(step, paths[1:])
    for _ in steps:
        assert all_heard.acquire(timeout=END_S)
    assert (first.latest, second.latest) == (-1, 99)
    for calls in (first, second, second):
        calls.close()
    assert not list(tmp_path.iterdir())


def test_a_worker_that_has_ended_is_named(tmp_path: Path) -> None:
    calls = StepCalls(str(tmp_path / "a"), END_S)
    with pytest.raises(CollectiveError, match=r"^b does not hear calls to steps: No such file or directory$"):
        calls.call(1, [str(tmp_path / "b")])
    calls.close()


def test_a_worker_that_reads_no_calls_is_named(tmp_path: Path) -> None:
    calls = StepCalls(str(tmp_path / "a"), 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "b"))
        with pytest.raises(CollectiveError, match=r"^b does not hear calls to steps: timed out$"):
            calls.call(1, [str(tmp_path / "b")] * 10_000)  # more than the socket holds
    calls.close()


def test_a_socket_that_an_ended_worker_left_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    left = StepCalls(path, END_S)
    calls = StepCalls(path, END_S)
    calls.call(3, [path])
    calls.close()
    assert calls.latest == 3
    left.close()
