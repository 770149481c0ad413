"""The scheduler's process over real sockets, run in a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from srt.managers.process.child import Child
from srt.managers.scheduler.engine_status import EngineStatus
from srt.managers.scheduler.process import Links, SchedulerProcess
from srt.protocol.codec import protocol_hash
from srt.protocol.links import DealerLink, frontend_path, worker_path
from srt.protocol.messages import (
    AckBatch,
    ChildStart,
    ControlReply,
    FrontendHello,
    GetState,
    Heartbeat,
    Message,
    Ready,
    Refused,
    Rejected,
    RequestDone,
    Scalar,
    SchedulerHello,
    StepPlan,
    Stop,
    TokenBatch,
    WorkerFault,
)
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from tests.support.simple_worker import FakeWorker
from tests.unit.managers.scheduler.scheduler_host import VOCAB, expected_ids, request, worker_hello

GENERATION = 1
PATIENCE_MS = 60_000
M = TypeVar("M")


class Peer:
    """A frontend or a worker, at the other end of a real link."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str, name: bytes) -> None:
        self.link = DealerLink(context, path, GENERATION, name)

    def wait_for(self, kind: type[M]) -> M:
        """The next message of this type; others are skipped."""
        while True:
            message = self.link.receive()
            if isinstance(message, kind):
                return message
            if message is None:
                assert self.link.socket.poll(PATIENCE_MS), f"no {kind.__name__} has come"


class Server:
    """A scheduler process with one frontend and one worker."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ours, theirs = socket.socketpair()
        self.supervisor = MessageStream(ours, GENERATION)
        start = ChildStart("scheduler", 0, GENERATION, str(folder), "", 1, ServerArgs(model_path="m", **options))
        child = Child(MessageStream(theirs, GENERATION), start, None)
        self._links = Links(self.context, start, child.fileno())
        self.process = SchedulerProcess(child, self._links, EngineStatus(folder, None))
        self.frontend = Peer(self.context, frontend_path(str(folder), GENERATION), b"frontend")
        self.worker = Peer(self.context, worker_path(str(folder), GENERATION), b"worker")
        self.failure: StartError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.process.run()
        except StartError as error:
            self.failure = error

    def greet(self) -> FakeWorker:
        hello = worker_hello(protocol_hash=protocol_hash())
        self.frontend.link.send(FrontendHello(0, protocol_hash()))
        self.worker.link.send(hello)
        self.frontend.wait_for(SchedulerHello)
        return FakeWorker(hello.num_slots, hello.num_pages, hello.page_size, VOCAB, breaks_down=False)

    def work_until_the_end(self, worker: FakeWorker) -> tuple[list[int], RequestDone]:
        """Execute plans until a request ends. Returns its tokens and its end."""
        ids: list[int] = []
        poller = zmq.Poller()
        for peer in (self.worker, self.frontend):
            poller.register(peer.link.socket, zmq.POLLIN)
        while True:
            assert poller.poll(PATIENCE_MS), "nothing happens any more"
            while (plan := self.worker.link.receive()) is not None:
                assert isinstance(plan, StepPlan)
                self.worker.link.send(worker.execute(plan))
            while (batch := self.frontend.link.receive()) is not None:
                if isinstance(batch, TokenBatch):
                    self.frontend.link.send(AckBatch(batch.number))
                    ids += batch.ids.tolist()
                    if batch.done:
                        return ids, batch.done[0]

    def ask_until(self, frontend: Peer, name: str, value: Scalar) -> None:
        """Return when this value is reported: what comes over different links comes in any order."""
        while True:
            frontend.link.send(GetState(1, False))
            if frontend.wait_for(ControlReply).values[name] == value:
                return

    def from_child(self, kind: type[M]) -> M:
        while True:
            message: Message = self.supervisor.receive_blocking()
            if isinstance(message, kind):
                return message

    def join(self) -> None:
        self._thread.join(PATIENCE_MS / 1000)
        assert not self._thread.is_alive(), "the process does not end"

    def close(self) -> None:
        if self._thread.is_alive():
            self.supervisor.send(Stop(0.0))
            self.join()
        self._links.close()
        self.frontend.link.close()
        self.worker.link.close()
        self.supervisor.close()
        self.context.term()


@pytest.fixture(params=[1, 64], ids=["sleeps", "stays awake"])
def server(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """On a host of one core, and on one of so many that the process need not sleep between short steps."""
    monkeypatch.setattr("srt.managers.scheduler.process.usable_cores", lambda: request.param)
    running = Server(tmp_path)
    yield running
    running.close()


def test_a_request_goes_through_the_sockets_and_back(server: Server) -> None:
    worker = server.greet()
    assert server.from_child(Ready).values["max_total_num_tokens"] == 256
    made = request(1, [1, 2, 3], max_new=5)
    server.frontend.link.send(made)
    ids, done = server.work_until_the_end(worker)
    assert ids == expected_ids(made)
    assert done.reason == "length"


def test_heartbeats_come_without_any_message(server: Server) -> None:
    assert server.from_child(Heartbeat).progress_age_s >= 0


def test_stop_lets_running_requests_finish_and_refuses_new_ones(server: Server) -> None:
    worker = server.greet()
    made = request(1, [1, 2, 3], max_new=3)
    server.frontend.link.send(made)
    plan = server.worker.wait_for(StepPlan)
    server.supervisor.send(Stop(600.0))
    server.ask_until(server.frontend, "is_draining", True)
    server.frontend.link.send(request(2, [1]))
    assert server.frontend.wait_for(Refused).status == 503
    server.worker.link.send(worker.execute(plan))
    ids, done = server.work_until_the_end(worker)
    assert done.num_output == len(expected_ids(made)) >= len(ids)
    server.join()
    assert server.failure is None


def test_stop_without_grace_aborts_what_runs(server: Server) -> None:
    server.greet()
    server.frontend.link.send(request(1, [1, 2, 3], max_new=50))
    server.worker.wait_for(StepPlan)
    server.supervisor.send(Stop(0.0))
    assert server.frontend.wait_for(TokenBatch).done[0].reason == "abort"
    server.join()
    assert server.failure is None


def test_stop_before_the_workers_are_ready_ends_at_once(server: Server) -> None:
    server.supervisor.send(Stop(30.0))
    server.join()
    assert server.failure is None


def test_a_broken_message_of_a_frontend_is_rejected_and_dropped(server: Server) -> None:
    server.greet()
    server.frontend.link.socket.send(b"garbage")
    assert "dropped" in server.frontend.wait_for(Rejected).reason


def test_a_broken_message_of_a_worker_ends_the_process_with_the_reason(server: Server) -> None:
    server.greet()
    server.worker.link.socket.send(b"garbage")
    server.join()
    assert "Worker 0 sent what cannot be read" in str(server.failure)


def test_the_fault_of_a_worker_ends_the_process_with_its_sentence(server: Server) -> None:
    server.greet()
    server.worker.link.send(WorkerFault(0, 3, "it broke"))
    server.join()
    assert str(server.failure) == "Worker 0 failed at step 3: it broke"


def test_a_frontend_that_is_gone_loses_its_requests(server: Server) -> None:
    worker = server.greet()
    server.frontend.link.send(request(1, [1, 2, 3], max_new=50))
    plans = [server.worker.wait_for(StepPlan), server.worker.wait_for(StepPlan)]
    server.frontend.link.close()  # noticed when something is sent to it: at the latest the next Load
    other = Peer(server.context, frontend_path(server.process._child.start.run_dir, GENERATION), b"other")
    other.link.send(FrontendHello(1, protocol_hash()))
    other.wait_for(SchedulerHello)
    for plan in plans:
        server.worker.link.send(worker.execute(plan))
    server.ask_until(other, "num_running", 0)
    made = request(7, [4, 5], max_new=3)
    other.link.send(made)
    server.frontend = other
    ids, done = server.work_until_the_end(worker)
    assert (done.rid, ids) == (7, expected_ids(made))


def test_a_frontend_of_another_version_takes_nobodys_place(server: Server) -> None:
    """Found by world 0 when the process came under the simulation's hostile frontends."""
    server.greet()
    other = Peer(server.context, frontend_path(server.process._child.start.run_dir, GENERATION), b"other")
    other.link.send(FrontendHello(0, "another"))
    assert "must come from the same installation" in other.wait_for(Rejected).reason
    other.link.close()
    server.ask_until(server.frontend, "num_running", 0)


def test_a_step_that_takes_too_long_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    server = Server(tmp_path, watchdog_timeout=0.2)
    server.greet()
    server.frontend.link.send(request(1, [1, 2, 3]))
    server.join()
    server.close()
    assert str(server.failure) == "Worker 0 has not answered step 1 (3 tokens) within 0.2 s (see --watchdog-timeout)."
