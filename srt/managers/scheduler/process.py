"""The scheduler's process: it connects the Scheduler, which decides everything, to its sockets and its supervisor.

python -m srt.managers.scheduler        (started by the supervisor)
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from typing import assert_never

import zmq

from srt.managers.process.child import Child
from srt.managers.process.replica_layout import ReplicaLayout, children_of, previous_generation
from srt.managers.process.watchdog import OVERSLEPT_S, least_step_s
from srt.managers.scheduler import scheduler as scheduler_state
from srt.managers.scheduler.effects import Effect, Fatal, Frontend, HandshakeDone, Record, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler.engine_status import EngineStatus
from srt.managers.scheduler.scheduler import Scheduler
from srt.managers.scheduler.scheduler_trace import SchedulerTrace
from srt.managers.scheduler.step_deadline import StepDeadline
from srt.protocol.codec import decode_view, protocol_hash
from srt.protocol.links import (
    Broken,
    Gatekeeper,
    PeerGone,
    Received,
    RouterLink,
    frontend_endpoint,
    remove_sockets,
    worker_endpoint,
)
from srt.protocol.messages import (
    Abort,
    ChildStart,
    EngineLost,
    EngineReplaced,
    FrontendHello,
    Message,
    RecordLedger,
    Rejected,
    ServerReady,
    StepAck,
    StepResult,
    Stop,
    TokenBatch,
    ToWorker,
    WorkDone,
    WorkerHello,
)
from srt.protocol.views import RequestView
from srt.utils.compiled import is_compiled
from srt.utils.errors import StartError
from srt.utils.host import usable_cores

MAX_MESSAGES_AT_ONCE = 512  # from frontends, before the next plan
LINGER_MS = 500  # time for the last messages to leave
AWAKE_S = 1e-3  # between steps shorter than this the process does not sleep: waking up would take a good part of one
SPARE_CORES = 2  # usable cores needed beyond one per process, for this process to stay awake

logger = logging.getLogger(__name__)


class Links:
    """The links on which a scheduler receives: its frontends, its workers, and the descriptor of its supervisor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], start: ChildStart, supervisor: int) -> None:
        remove_sockets(start.run_dir, previous_generation(start.generation, start.args.dp_size))
        address = "" if start.meeting is None else start.meeting.frontends[start.replica]
        frontends = frontend_endpoint(start.run_dir, start.generation, address, start.meeting)
        workers = worker_endpoint(start.run_dir, start.generation, start.meeting)
        self._gatekeeper = Gatekeeper(context, (frontends, workers))
        self.frontends = RouterLink(context, frontends.path, start.generation, decode_view, frontends.keys)
        self.workers = RouterLink(context, workers.path, start.generation, keys=workers.keys)
        self._poller = zmq.Poller()
        for source in (self.workers.socket, self.frontends.socket, supervisor):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> bool:
        """Wait for a message, at most `timeout_ms` if given. Return True if there is one."""
        return bool(self._poller.poll(timeout_ms))

    def close(self) -> None:
        """Close the sockets, with some time for the last messages to leave."""
        for link in (self.frontends, self.workers):
            link.socket.setsockopt(zmq.LINGER, LINGER_MS)
            link.socket.close()
        self._gatekeeper.close()


class SchedulerProcess:
    """Moves messages from the links into the Scheduler, and its effects back onto the links."""

    def __init__(
        self, child: Child, links: Links, status: EngineStatus, now: Callable[[], float] = time.monotonic
    ) -> None:
        start = child.start
        self._child = child
        self._now = now
        self._scheduler = Scheduler(start.args, protocol_hash(), start.ledger)
        self._links = links
        self._frontends, self._workers = links.frontends, links.workers
        self._peer_of_frontend: dict[int, bytes] = {}
        self._frontend_of_peer: dict[bytes, int] = {}
        self._rank_of_peer: dict[bytes, int] = {}
        self._deadline = StepDeadline(least_step_s(start.args), ReplicaLayout.of(start.args).num_ranks)
        self._trace = SchedulerTrace(child.tracer, child.control, self._scheduler.request_in)
        self._status = status
        self._is_unpublished = False
        self._stop_at: float | None = None
        self._is_lost = False  # True once the workers are lost
        self._busy_since: float | None = None
        sizes = start.args.attention_ranks, start.args.dp_size, start.args.pp_size
        num_processes = len(children_of(start.num_frontends, *sizes)) + 1
        self._has_core = usable_cores() >= num_processes + SPARE_CORES  # so it may poll without sleep
        self._awake_until_s = 0.0  # it does not sleep before this time

    def run(self) -> None:
        """Serve until the supervisor says Stop and all is done. StartError if the workers cannot continue."""
        try:
            self._serve()
        except StartError:
            self._say_last_words()
            raise
        if self._is_lost:
            self._say_last_words()

    def _serve(self) -> None:
        self._child.start_heartbeats(self.progress_age_s, lambda: self._deadline.is_nearly_over(self._now()))
        self._child.report_phase("workers")
        while not (self._is_lost or self._has_ended()):
            self._wait()
            self._run_turn()

    def _run_turn(self) -> None:
        """Receive the messages that have come, and do what follows from them."""
        self._busy_since = self._now()
        self._hear_supervisor()
        self._hear_workers()
        if self._is_lost:
            return
        self._hear_frontends()
        while self._tick():
            pass  # a frontend is gone, which leaves room for other requests
        self._check_deadline()
        self._publish()
        self._busy_since = None

    def _say_last_words(self) -> None:
        """Tell frontends which requests the lost workers had. Not after a defect of this process itself, which is no request's fault."""
        self._apply(self._scheduler.last_words())

    def progress_age_s(self) -> float:
        """Return the seconds for which the present messages have been worked on. Called by the heartbeat's thread."""
        since = self._busy_since
        return 0.0 if since is None else self._now() - since

    def _tick(self) -> bool:
        now = self._now()
        watch = self._trace.watch_tick(now) if self._trace.is_on else None
        return self._apply(self._scheduler.tick(now, watch))

    def _publish(self) -> None:
        """Publish the counters, if it is time."""
        now = self._now()
        self._is_unpublished = not self._status.is_due(now)
        if not self._is_unpublished and (counters := self._scheduler.counters()) is not None:
            self._status.publish(counters, now)

    def _wait(self) -> None:
        """Wait for a message, or until time alone brings something to do."""
        while self._now() < self._awake_until_s:
            if self._links.wait(0):
                return
        timeout_ms = self._timeout_ms()
        asleep_since = self._now()
        self._links.wait(timeout_ms)
        now = self._now()
        if timeout_ms is not None and now - asleep_since > timeout_ms / 1000 + OVERSLEPT_S:
            self._deadline.excuse(now)

    # ---- Messages in

    def _hear_supervisor(self) -> None:
        while (message := self._child.receive()) is not None:
            match message:
                case Stop(grace_s, ""):
                    self._stop_at = self._now() + grace_s
                    self._scheduler.drain()
                case Stop():
                    self._is_lost = True
                case ServerReady() | EngineReplaced() | EngineLost():
                    pass
                case _:
                    assert_never(message)

    def _hear_workers(self) -> None:
        while (received := self._workers.receive()) is not None:
            if isinstance(received, Broken):
                raise StartError(f"{self._worker_name(received.peer)} sent what cannot be read: {received.reason}.")
            message = received.message
            if isinstance(message, WorkerHello):
                self._rank_of_peer[received.peer] = message.rank
            rank = self._rank_of_peer.get(received.peer)
            if rank is None:
                raise StartError(f"A worker sent {type(message).__name__} before its WorkerHello.")
            now = self._now()
            if isinstance(message, (StepResult, StepAck, WorkDone)):
                self._deadline.answered(rank, message.step, now)
            if isinstance(message, StepResult):
                self._status.record_step(message.step_us)
                self._awake_until_s = now + AWAKE_S if self._has_core and message.step_us < AWAKE_S * 1e6 else 0.0
            self._apply(self._scheduler.handle(Worker(rank), message, now))
            if isinstance(message, StepResult):
                self._trace.answered(message, now)

    def _check_deadline(self) -> None:
        complaint = self._deadline.complaint(self._now())
        if complaint is not None:
            raise StartError(complaint)

    def _hear_frontends(self) -> None:
        for _ in range(MAX_MESSAGES_AT_ONCE):
            received = self._frontends.receive()
            if received is None:
                return
            if isinstance(received, Broken):
                self._send_to_peer(received.peer, Rejected(f"Your message was dropped: {received.reason}."))
            else:
                self._hear_frontend(received)

    def _hear_frontend(self, received: Received) -> None:
        peer, message = received.peer, received.message
        if isinstance(message, FrontendHello):
            reason = self._scheduler.why_not(message)
            if reason:  # and it takes nobody's place
                self._send_to_peer(peer, Rejected(reason))
                return
            self._meet(peer, message.frontend)
        number = self._frontend_of_peer.get(peer)
        if number is None:
            self._send_to_peer(peer, Rejected("The first message must be FrontendHello."))
            return
        now = self._now()
        self._apply(self._scheduler.handle(Frontend(number), message, now))
        if self._trace.is_on and isinstance(message, RequestView | Abort):
            self._trace.heard(number, message, now)

    def _meet(self, peer: bytes, number: int) -> None:
        """Record that this peer is now the frontend `number`, and no other peer is."""
        before = self._peer_of_frontend.pop(number, None)
        if before is not None:
            del self._frontend_of_peer[before]
        other = self._frontend_of_peer.pop(peer, None)
        if other is not None:
            del self._peer_of_frontend[other]
            self._scheduler.frontend_gone(other)
        self._peer_of_frontend[number] = peer
        self._frontend_of_peer[peer] = number

    # ---- Effects out

    def _apply(self, effects: list[Effect]) -> bool:
        """Carry out the Scheduler's effects. Return True if a frontend turned out to be gone."""
        is_gone = False
        for effect in effects:
            match effect:
                case ToWorkers(message):
                    self._send_to_workers(message)
                case ToFrontend(number, message):
                    is_gone |= not self._send_to_frontend(number, message)
                case HandshakeDone(values):
                    self._settle()
                    self._child.report_ready(values)
                case Record(ledger):
                    self._child.send(RecordLedger(ledger))
                case Fatal(reason):
                    raise StartError(reason)
                case _:
                    assert_never(effect)
        return is_gone

    def _settle(self) -> None:
        """Exempt all objects that exist now from garbage collection, since they stay until the end."""
        gc.collect()
        gc.freeze()

    def _send_to_workers(self, message: ToWorker) -> None:
        self._deadline.sent(message, self._now())
        for peer, rank in self._rank_of_peer.items():
            try:
                self._workers.send(peer, message)
            except PeerGone as error:
                raise StartError(f"Worker {rank} is gone.") from error

    def _send_to_frontend(self, number: int, message: Message) -> bool:
        """Send a message. Return False if the frontend turns out to be gone; then forget it."""
        peer = self._peer_of_frontend.get(number)
        if peer is None:
            return True  # the effect is from before the frontend was found gone
        now = self._now()
        try:
            self._frontends.send(peer, message)
        except PeerGone:
            del self._peer_of_frontend[number], self._frontend_of_peer[peer]
            self._frontends.forget(peer)
            self._scheduler.frontend_gone(number)
            return False
        if self._trace.is_on and isinstance(message, TokenBatch):
            self._trace.sent(number, message, now)
        return True

    def _send_to_peer(self, peer: bytes, message: Message) -> None:
        try:
            self._frontends.send(peer, message)
        except PeerGone:
            self._frontends.forget(peer)

    # ---- The end

    def _has_ended(self) -> bool:
        """Return whether to end. After Stop: when nothing is left to do, or when the grace is over and the rest was aborted."""
        if self._stop_at is None:
            return False
        if not self._scheduler.is_ready or self._scheduler.is_drained:
            return True
        now = self._now()
        if now < self._stop_at:
            return False
        self._apply(self._scheduler.break_off())
        return True

    def _timeout_ms(self) -> int | None:
        """Return the time to sleep if no message comes: until time alone brings something to do. None: without limit."""
        now = self._now()
        publish_s = self._status.due_s if self._is_unpublished else None
        due = (self._stop_at, self._scheduler.next_tick_s, self._deadline.due_s, publish_s)
        times = [at for at in due if at is not None]
        return max(0, math.ceil((min(times) - now) * 1000)) if times else None

    def _worker_name(self, peer: bytes) -> str:
        rank = self._rank_of_peer.get(peer)
        return "A worker" if rank is None else f"Worker {rank}"


def main(child: Child) -> None:
    if not is_compiled(scheduler_state):
        logger.info("The scheduler is not compiled and takes more than twice the time. `make compile` compiles it.")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, child.start, child.fileno())
    status = EngineStatus(child.start.run_dir, child.start.args.decode_log_interval, child.start.replica)
    try:
        SchedulerProcess(child, links, status).run()
    finally:
        links.close()
        context.term()
