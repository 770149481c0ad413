"""A real supervisor with children that serve nothing: how they start, stop and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from srt.managers.process.heartbeats import HeartbeatReader
from tests.support.server_process import ServerProcess, all_gone

ALL = ["worker-0", "worker-1", "scheduler-0", "frontend-0", "frontend-1"]
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor of two frontends, a scheduler and two workers; `start({"worker 1": "fail"})`."""
    pids, servers = tmp_path / "pids", []
    pids.mkdir()

    def launch(
        behaviours: dict[str, str] | None = None, max_replacements: int = 0, log_level: str = "info"
    ) -> ServerProcess:
        environment = {"FAKE_PIDS": str(pids), "FAKE_BEHAVIOUR": json.dumps(behaviours or {})}
        words = ["launch", "0", "2", "2", str(max_replacements), log_level]
        server = ServerProcess("tests.support.fake_children", words, tmp_path, environment)
        servers.append(server)
        return server.__enter__()

    yield launch
    for server in servers:
        server.__exit__()


def processes_of(server: ServerProcess) -> dict[str, psutil.Process]:
    return {name: psutil.Process(int((server.tmp / "pids" / name).read_text().split()[0])) for name in ALL}


def run_dirs(server: ServerProcess) -> list[Path]:
    return server.left_behind()


def orders(server: ServerProcess) -> list[str]:
    return sorted((server.tmp / "pids" / "orders").read_text().splitlines())


def stops(server: ServerProcess) -> list[str]:
    return (server.tmp / "pids" / "stops").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_ends_frontends_then_scheduler_then_workers(start: Start, number: signal.Signals) -> None:
    server = start()
    server.wait_ready()
    server.send(number)
    assert server.wait() == 0
    order = stops(server)
    assert sorted(order[:2]) == ["frontend 0", "frontend 1"]
    assert order[2] == "scheduler 0"
    assert sorted(order[3:]) == ["worker 0", "worker 1"]
    assert run_dirs(server) == []


def test_the_port_is_taken_before_anything_is_started_and_passed_to_frontends(start: Start) -> None:
    server = start()
    port = int(server.wait_ready().rpartition(":")[2])
    listening = [c.laddr.port for c in psutil.Process(server.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert listening == [port]
    for name, process in processes_of(server).items():
        ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"]
        assert ports == ([port] if name.startswith("frontend") else [])


def test_every_child_is_in_a_session_of_its_own(start: Start) -> None:
    server = start()
    server.wait_ready()
    sessions = {os.getsid(process.pid) for process in processes_of(server).values()}
    assert len(sessions) == len(ALL)
    assert os.getsid(server.pid) not in sessions


def test_a_stop_signal_to_the_whole_group_does_not_break_the_order(start: Start) -> None:
    server = start()
    server.wait_ready()
    for process in processes_of(server).values():
        process.terminate()
        process.send_signal(signal.SIGINT)
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert len(stops(server)) == len(ALL)


def test_a_second_stop_signal_ends_who_would_not_listen(start: Start) -> None:
    server = start({"frontend 0": "deaf", "worker 1": "deaf"})
    server.wait_ready()
    processes = list(processes_of(server).values())
    server.send(signal.SIGINT)
    server.wait_for("Stopping")
    server.send(signal.SIGINT)
    assert server.wait() == 0
    assert all_gone(processes)


def test_who_is_killed_from_outside_while_the_server_ends_is_named(start: Start) -> None:
    server = start({"frontend 0": "deaf"}, max_replacements=1)
    server.wait_ready()
    frontend = processes_of(server)["frontend-0"]
    server.send(signal.SIGTERM)
    server.wait_for("Stopping")
    frontend.kill()
    assert server.wait() == 1
    assert server.lines[-1] == "Frontend 0 was killed by SIGKILL (out of memory?)."
    assert len(stops(server)) == len(ALL) - 1


def test_a_stop_during_the_start_is_in_order_too(start: Start) -> None:
    server = start({"worker 1": "mute"})
    server.wait_for("frontend 0: ready")
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert run_dirs(server) == []


def test_a_failed_start_ends_everything_with_its_sentence(start: Start) -> None:
    server = start({"worker 1": "fail", "scheduler 0": "mute"})
    assert server.wait() == 1
    assert server.lines[-1] == "The weights are made of cheese."
    assert server.lines.count("The weights are made of cheese.") == 1
    assert not any("Traceback" in line for line in server.lines)
    assert run_dirs(server) == []


def test_a_start_on_a_disk_that_is_almost_full_ends_with_one_sentence(start: Start) -> None:
    server = start({"supervisor": "full"})
    assert server.wait() == 1
    (line,) = server.lines
    assert line.endswith(" cannot be written (File too large): set TMPDIR to another folder.")
    assert run_dirs(server) == []


def test_a_death_at_the_start_is_named(start: Start) -> None:
    server = start({"worker 0": "die"})
    assert server.wait() == 1
    assert server.lines[-1] == "Worker 0 was killed by SIGKILL at its start (loading) (out of memory?)."


def test_a_crash_shows_its_traceback_and_one_sentence(start: Start) -> None:
    server = start({"scheduler 0": "crash"})
    assert server.wait() == 1
    assert server.lines[-1] == "Internal error in scheduler 0: ValueError: a page was lost"
    assert any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(("child", "named"), [("worker 0", "Worker 0"), ("frontend 1", "Frontend 1")])
def test_a_child_that_ends_for_no_reason_ends_the_server(start: Start, child: str, named: str) -> None:
    server = start({child: "quit"})
    assert server.wait() == 1
    assert server.lines[-1] == f"{named} ended with exit code 3."


@pytest.mark.parametrize("name", ["worker-1", "scheduler-0", "frontend-0"])
def test_a_killed_child_ends_the_server_cleanly_and_is_named(start: Start, name: str) -> None:
    server = start()
    server.wait_ready()
    processes = processes_of(server)
    processes[name].kill()
    assert server.wait() == 1
    who = name.replace("-", " ").capitalize()
    assert server.lines[-1] == f"{who} was killed by SIGKILL (out of memory?)."
    assert all_gone(list(processes.values()))
    assert run_dirs(server) == []


def test_a_killed_worker_is_replaced_with_the_scheduler_and_all_workers(start: Start) -> None:
    server = start(max_replacements=1)
    server.wait_ready()
    before = processes_of(server)
    before["worker-1"].kill()
    server.wait_for("Worker 0, worker 1 and scheduler 0 are at work again after ")
    assert (
        "Worker 1 was killed by SIGKILL (out of memory?). Worker 0, worker 1 and scheduler 0 are replaced."
        in server.lines
    )
    after = processes_of(server)
    (supervisor,) = [
        status for status in HeartbeatReader(run_dirs(server)[0], 60.0).read(0.0) if status.process == "supervisor"
    ]
    assert supervisor.num_replaced == 3
    assert all_gone([before[name] for name in ALL[:3]])
    assert [before[name].pid for name in ALL[3:]] == [after[name].pid for name in ALL[3:]]
    # And it is supervised like the one before.
    after["scheduler-0"].kill()
    assert server.wait() == 1
    assert server.lines[-1] == (
        "Scheduler 0 was killed by SIGKILL (out of memory?)."
        " It was replaced once within 300 s (see --max-replacements)."
    )
    assert all_gone(list(after.values()))
    # Both frontends have read this by the time of their ends.
    assert orders(server) == [f"{name.replace('-', ' ')}: EngineReplaced 2" for name in ALL[3:]]


def test_helpers_of_a_worker_that_dies_are_gone_before_it_is_replaced(start: Start) -> None:
    server = start({"worker 0": "helped"}, max_replacements=1)
    server.wait_ready()
    (helper,) = processes_of(server)["worker-0"].children()
    processes_of(server)["worker-0"].kill()
    server.wait_for("are at work again")
    assert all_gone([helper])


def test_a_worker_is_replaced_though_somebody_has_deleted_the_folder_of_logs(start: Start) -> None:
    server = start({"worker 0": "tidy"}, max_replacements=1, log_level="error")  # nothing was logged before
    server.wait_for("The folder of logs is gone.")
    processes_of(server)["worker-1"].kill()
    server.wait_for("Worker 0, worker 1 and scheduler 0 are replaced.")
    server.wait_for("The folder of logs is gone.", 2)
    server.send(signal.SIGTERM)
    assert server.wait() == 0


def test_a_killed_frontend_is_replaced_and_gets_the_port(start: Start) -> None:
    server = start(max_replacements=1)
    port = int(server.wait_ready().rpartition(":")[2])
    before = processes_of(server)
    before["frontend-1"].kill()
    server.wait_for("Frontend 1 is at work again after ")
    after = processes_of(server)
    assert [name for name in ALL if before[name].pid != after[name].pid] == ["frontend-1"]
    assert port in [c.laddr.port for c in after["frontend-1"].net_connections("tcp") if c.status == "LISTEN"]
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert len(stops(server)) == len(ALL)


def test_a_worker_that_is_replaced_is_told_how_much_memory_there_was(start: Start) -> None:
    server = start(max_replacements=1)
    server.wait_ready()
    processes_of(server)["worker-0"].kill()
    server.wait_for("are at work again")
    told = (server.tmp / "pids" / "starts").read_text().splitlines()
    assert sorted(line for line in told if line.startswith("worker")) == [
        "worker 0 1 0",
        "worker 0 2 112",
        "worker 1 1 0",
        "worker 1 2 112",
    ]


def test_every_generation_is_told_what_the_one_before_was_told(start: Start) -> None:
    server = start(max_replacements=9)
    server.wait_ready()
    for generation in range(2):
        processes_of(server)["worker-1"].kill()
        server.wait_for("at work again", generation + 1)
    told = (server.tmp / "pids" / "ledgers").read_text().splitlines()
    engine = ("scheduler 0", "worker 0", "worker 1")
    expected = [f"{name} 1 []" for name in ("frontend 0", "frontend 1", *engine)]
    expected += [f"{name} 2 [1]" for name in engine] + [f"{name} 3 [1, 2]" for name in engine]
    assert sorted(told) == sorted(expected)


def test_who_cannot_be_started_in_the_place_of_another_is_started_when_that_can_be_done_again(start: Start) -> None:
    server = start(max_replacements=10)
    server.wait_ready()
    supervisor = psutil.Process(server.pid)
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (0, limits[1]))
    processes_of(server)["worker-1"].kill()
    # The scheduler and both workers, for the same reason.
    server.wait_for("could not be started: Too many open files.")
    supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    server.wait_for("Worker 0, worker 1 and scheduler 0 are at work again after ")
    assert len(server.lines_with("could not be started")) < 10
    server.send(signal.SIGTERM)
    assert server.wait() == 0


def test_a_child_that_cannot_be_understood_is_ended(start: Start) -> None:
    server = start({"worker 0": "garble"})
    assert server.wait() == 1
    assert server.lines[-1].startswith("Worker 0 sent what cannot be read: ")


def test_nothing_survives_a_killed_supervisor(start: Start) -> None:
    server = start({"frontend 0": "deaf", "worker 1": "deaf"})
    server.wait_ready()
    processes = list(processes_of(server).values())
    server.send(signal.SIGKILL)
    assert all_gone(processes)
    server.wait()


def test_what_a_killed_server_left_is_swept_by_the_next(start: Start) -> None:
    first = start()
    first.wait_ready()
    left = run_dirs(first)
    first.send(signal.SIGKILL)
    first.wait()
    assert run_dirs(first) == left
    second = start()
    second.wait_ready()
    assert len(run_dirs(second)) == 1
    assert run_dirs(second) != left


def test_a_child_is_not_started_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fake_children"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "This module is a part of the server: run `python -m srt.launch_server` instead.\n"
