"""A child's link, with a test in the supervisor's place."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from srt.managers.process.child import AwakeTime
from srt.managers.process.child_process import CHILD_FD, PARENT_PID, ChildKey, environment_of, spawn
from srt.managers.process.replica_layout import children_of
from srt.protocol.link_errors import PeerGone
from srt.protocol.messages import ChildStart, Failed, Heartbeat, Message, Progress, Ready, ServerReady, Stop
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.checkpoint import version_of
from tests.support.server_process import END_S, ROOT

START = ChildStart("worker", 3, 1, "/run", "/model", 1, ServerArgs(model_path="m"))
OBEDIENT = """
import select
from srt.managers.process.child import run_child
from srt.protocol.messages import Stop
from srt.utils.errors import StartError

def main(child):
    child.report_phase("weights", 1, 4)
    child.report_ready({"num_pages": 7})
    while True:
        select.select([child.fileno()], [], [])
        while (message := child.receive()) is not None:
            if isinstance(message, Stop):
                return

run_child(main)
"""


@contextmanager
def child_of(script: str, parent_pid: int | None = None) -> Iterator[tuple[subprocess.Popen[str], MessageStream]]:
    """A process that runs `script` as a child, and our end of its link."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, CHILD_FD: str(theirs.fileno()), PARENT_PID: str(parent_pid or os.getpid())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    with process, ours:
        yield process, MessageStream(ours, 1)
        process.kill()


def next_message(stream: MessageStream) -> Message:
    """Waits for it; heartbeats are skipped."""
    while (message := stream.receive()) is None or isinstance(message, Heartbeat):
        assert message or select.select([stream.fileno()], [], [], END_S)[0]
    return message


def all_messages(stream: MessageStream) -> list[Message]:
    """Everything up to the end of the link."""
    said = []
    while True:
        try:
            said.append(next_message(stream))
        except PeerGone:
            return said


def last_word(main: str, start: ChildStart = START) -> tuple[list[Message], int, str]:
    """All that a child with this body of `main` says, its exit code, and its standard error."""
    script = f"{OBEDIENT.partition('def main')[0]}def main(child):\n    {main}\n\nrun_child(main)\n"
    with child_of(script) as (process, stream):
        stream.send(start)
        said = all_messages(stream)
        _, errors = process.communicate(timeout=END_S)
        return said, process.returncode, errors


def test_a_child_learns_what_it_is_reports_and_stops() -> None:
    with child_of(OBEDIENT) as (process, stream):
        stream.send(START)
        progress = next_message(stream)
        assert isinstance(progress, Progress)
        assert (progress.phase, progress.done, progress.total) == ("weights", 1, 4)
        assert next_message(stream) == Ready({"num_pages": 7})
        stream.send(ServerReady(1.0))
        stream.send(Stop(1.0))
        assert process.wait(END_S) == 0


def test_a_start_error_is_its_last_word_and_no_traceback() -> None:
    assert last_word("raise StartError('Too big.')") == ([Failed("Too big.")], 1, "")


def test_a_child_with_another_checkpoint_ends_for_good(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    start = replace(START, model_folder=str(tmp_path), checkpoint_version=version_of(tmp_path))
    assert last_word("pass", start) == ([], 0, "")
    (tmp_path / "config.json").write_text("{ }")
    sentence = f"The files in {tmp_path} have changed since the server was started: start it anew."
    assert last_word("pass", start) == ([Failed(sentence, is_final=True)], 1, "")


def test_any_other_error_is_a_sentence_and_a_traceback() -> None:
    said, code, errors = last_word("raise ValueError('3 pages')")
    assert said == [Failed("Internal error in worker 3: ValueError: 3 pages")]
    assert code == 1
    assert "Traceback" in errors


def test_a_thread_that_never_ends_does_not_keep_a_child_that_is_done() -> None:
    assert last_word("import threading; threading.Thread(target=threading.Event().wait).start()") == ([], 0, "")


def test_heartbeats_come_with_the_age_that_the_child_gives() -> None:
    script = OBEDIENT.replace('child.report_phase("weights", 1, 4)', "child.start_heartbeats(lambda: 2.5)")
    with child_of(script) as (_, stream):
        stream.send(START)
        while (message := stream.receive_blocking()) != Heartbeat(2.5):
            assert isinstance(message, Ready)


def test_a_child_ends_when_its_supervisor_closes_the_link() -> None:
    with child_of(OBEDIENT) as (process, stream):
        stream.send(START)
        next_message(stream)
        stream.close()
        assert process.wait(END_S) == 1


def test_a_child_whose_parent_is_gone_ends_before_it_does_anything() -> None:
    with child_of(OBEDIENT, parent_pid=1) as (process, stream):
        stream.send(START)
        assert process.wait(END_S) == 1
        with pytest.raises(PeerGone):
            next_message(stream)


def test_a_module_of_that_name_in_the_users_folder_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    child = spawn(ChildKey("worker", 0), "tests.support.fake_children", {}, None)
    with child.socket, child.popen:
        stream = MessageStream(child.socket, 1)
        stream.send(START)
        assert isinstance(next_message(stream), Progress)
        stream.send(Stop(0.0))
        assert child.popen.wait(END_S) == 0


def test_workers_are_started_first() -> None:
    assert [str(key) for key in children_of(2, 1, pp_size=2)] == [str(key) for key in children_of(2, 2)]
    assert [str(key) for key in children_of(2, 2)] == [
        "worker 0",
        "worker 1",
        "scheduler 0",
        "frontend 0",
        "frontend 1",
    ]


def test_workers_share_the_cores_and_do_not_spin_where_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert environment_of("worker", num_workers=2, num_processes=5, cores=64)["OMP_NUM_THREADS"] == "31"  # one to spare
    assert environment_of("worker", num_workers=1, num_processes=4, cores=3)["OMP_NUM_THREADS"] == "3"
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment_of("worker", 2, 5, 64))
    few = environment_of("worker", 2, 5, 2)
    assert (few["OMP_NUM_THREADS"], few["OMP_WAIT_POLICY"], few["GOMP_SPINCOUNT"]) == ("1", "PASSIVE", "10000")
    assert environment_of("worker", 4, 7, 2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # which a number of spins would take precedence over
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment_of("worker", 2, 5, 2))
    assert "OMP_NUM_THREADS" not in environment_of("frontend", 2, 5, 64)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in environment_of("worker", 2, 5, 64)


def test_the_time_in_which_a_process_was_stopped_does_not_count_as_awake() -> None:
    awake = AwakeTime(100.0)
    assert [awake.seconds(now_s) for now_s in (101.0, 102.5, 105.0)] == [float("inf")] * 3
    assert [awake.seconds(now_s) for now_s in (705.0, 706.0)] == [0.0, 1.0]
