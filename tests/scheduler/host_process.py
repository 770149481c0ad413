"""The real scheduler's process around a simulated server's Scheduler: its links are lists, and its clock is the world's.

A simulated server calls it as it would call the Scheduler. What it says arrives by a link, from a peer, and goes through the
process's hands; what it gets is what the process sent by its links, to whoever is meant by that. So whatever the process loses,
sends elsewhere or forgets is seen like any other fault. Beside that: ranks are sent the same, the process wakes in time, says once
that it is ready, names those that are late, and ends when all is done.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from srt.managers.process.child import Child
from srt.managers.scheduler.effects import (
    Effect,
    Fatal,
    Frontend,
    HandshakeDone,
    Record,
    Source,
    ToFrontend,
    ToWorkers,
    Worker,
)
from srt.managers.scheduler.engine_status import EngineStatus
from srt.managers.scheduler.process import Links, SchedulerProcess
from srt.protocol.codec import protocol_hash
from srt.protocol.engine_work import CaptureGraph, EngineLedger
from srt.protocol.links import PeerGone, Received
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    ChildStart,
    FrontendHello,
    Message,
    Prepare,
    RecordLedger,
    Refused,
    Rejected,
    Release,
    Scalar,
    StepAck,
    StepPlan,
    StepResult,
    Stop,
    TokenBatch,
    ToWorker,
    WorkDone,
    WorkPlan,
)
from srt.protocol.views import RequestView
from srt.utils.errors import StartError
from tests.scheduler.settings import Settings

GRACE_S = 1e6  # of a stop: nothing is broken off
ANSWERS = (StepResult, StepAck, WorkDone)


class _Router:
    """In the place of a RouterLink."""

    def __init__(self, note: Callable[[bytes, Message], None]) -> None:
        self.inbox: deque[Received] = deque()
        self.gone: set[bytes] = set()
        self._note = note

    def receive(self) -> Received | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, peer: bytes, message: Message) -> None:
        if peer in self.gone:
            raise PeerGone
        self._note(peer, message)

    def forget(self, peer: bytes) -> None:
        pass


class _Supervisor:
    """In the place of a Child: the end of its link that is in the process."""

    def __init__(
        self,
        start: ChildStart,
        note_ready: Callable[[dict[str, Scalar]], None],
        note_record: Callable[[RecordLedger], None],
    ) -> None:
        self.start = start
        self.words: deque[Stop] = deque()
        self.report_ready = note_ready
        self.send = note_record
        self.tracer = SimpleNamespace(is_on=False)
        self.control = SimpleNamespace(count_step=lambda: None)

    def receive(self) -> Stop | None:
        return self.words.popleft() if self.words else None


class _Status:
    """In the place of an EngineStatus: nobody looks."""

    due_s = math.inf

    def is_due(self, now_s: float) -> bool:
        return True

    def record_step(self, step_us: int) -> None:
        pass


class _Process(SchedulerProcess):
    complaint: str | None = None

    def forget_complaint(self) -> None:
        self.complaint = None

    def _settle(self) -> None:
        pass  # it would collect what all worlds have left

    def _publish(self) -> None:
        pass

    def _check_deadline(self) -> None:
        """The supervision of the world finds that for itself."""
        try:
            super()._check_deadline()
        except StartError as error:
            self.complaint = str(error)


@dataclass(slots=True)
class _Owed:
    """Work that was sent to all ranks."""

    step: int
    may_take_s: float
    ranks: set[int]


@dataclass(slots=True)
class _Answers:
    """What ranks owe, one piece of work after the other."""

    owed: deque[_Owed] = field(default_factory=deque)
    since_s: float = 0.0  # that the first is worked at

    @property
    def due_s(self) -> float:
        return self.since_s + self.owed[0].may_take_s if self.owed else math.inf

    def take(self, rank: int, now: float) -> None:
        for one in self.owed:
            if rank in one.ranks:
                one.ranks.discard(rank)
                break
        while self.owed and not self.owed[0].ranks:
            self.owed.popleft()
            self.since_s = now


class HostedScheduler:
    """Whatever it has not itself is the Scheduler's."""

    def __init__(
        self, settings: Settings, now: Callable[[], float], statistics: Counter[str], ledger: EngineLedger
    ) -> None:
        self._settings = settings
        self._now = now
        self._statistics = statistics
        self._effects: list[Effect] = []  # of the call at hand
        self._peers: dict[int, bytes] = {}  # that frontends are now
        self._number_of: dict[bytes, int] = {}
        self._at_ranks: list[int] = []  # that have the message at hand
        self._answers = _Answers()
        self._num_ready = 0
        self._is_stopping = False
        self._owed: dict[int, set[tuple[int, int]]] = {}  # by frontend: choices that must be told their end
        args = settings.server_args()
        start = ChildStart("scheduler", 0, 1, "", "", settings.num_frontends, args, ledger=ledger)
        self._supervisor = _Supervisor(start, self._note_ready, self._note_record)
        self._frontends, self._workers = _Router(self._note_to_frontend), _Router(self._note_to_rank)
        links = SimpleNamespace(frontends=self._frontends, workers=self._workers)
        self._process = _Process(
            cast("Child", self._supervisor), cast("Links", links), cast("EngineStatus", _Status()), now
        )
        self._scheduler = self._process._scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    # ---- What the Scheduler would be asked

    def handle(self, source: Source, message: Message | RequestView, now: float) -> list[Effect]:
        if isinstance(source, Frontend):
            is_new = isinstance(message, FrontendHello) and message.protocol_hash == protocol_hash()
            peer = self._peer_of(source.number, is_new=is_new)
            self._frontends.inbox.append(Received(peer, message))
            effects = self._do(self._process._hear_frontends)
            told = [effect.message for effect in effects if isinstance(effect, ToFrontend)]
            if source.number in self._peers and not any(isinstance(one, Rejected | Refused) for one in told):
                self._note_heard(source.number, message)
            return effects
        return self._hear_worker(source, message, now)

    def _hear_worker(self, worker: Worker, message: Message | RequestView, now: float) -> list[Effect]:
        if isinstance(message, ANSWERS):
            self._answers.take(worker.rank, now)
        self._workers.inbox.append(Received(f"worker {worker.rank}".encode(), message))
        effects = self._do(self._process._hear_workers)
        assert self._num_ready == self._scheduler.is_ready, f"it was said {self._num_ready} times that all is ready"
        return effects

    def tick(self, now: float) -> list[Effect]:
        self._process.forget_complaint()
        is_late, owed = self._answers.due_s <= now, self._answers.owed
        late = [f"{rank}" for rank in sorted(owed[0].ranks)] if is_late else []
        step = owed[0].step if is_late else -1
        effects = self._do(self._process._run_turn)
        self._check_stop()
        complaint = self._process.complaint
        self._statistics["rule: workers are complained of when they are late"] += bool(owed)
        assert (complaint is not None) == is_late, f"workers {late} are late with step {step}, and it says: {complaint}"
        if complaint is not None:
            wanted = (
                f"{' '.join(('Workers', ', '.join(late), 'have') if len(late) > 1 else ('Worker', late[0], 'has'))}"
            )
            assert complaint.startswith(f"{wanted} not answered step {step} "), f"{complaint} {late}, {step}"
        return effects

    def _check_stop(self) -> None:
        """A process that was told to end does so when nobody waits for an end any more."""
        if not self._is_stopping or not self._scheduler.is_ready:
            return
        owed = sorted(key for keys in self._owed.values() for key in keys)
        self._statistics["rule: a process that stops tells all ends before"] += bool(owed)
        assert not owed or not self._process._has_ended(), f"the process ends, and owes the ends of {owed}"

    def last_words(self) -> list[Effect]:
        """The supervisor says that workers are lost: that is heard before all else, and is the end."""
        self._supervisor.words.append(Stop(0.0, "a worker has ended"))
        effects = self._do(self._process._run_turn)
        assert self._process._is_lost and not effects, f"its workers are lost, and it goes on: {effects}"
        return self._do(self._process._say_last_words)

    def drain(self) -> None:
        self._supervisor.words.append(Stop(GRACE_S))
        self._do(self._process._hear_supervisor)
        self._is_stopping = True

    def frontend_gone(self, number: int) -> None:
        """Its end of the link is closed, which shows when something is sent."""
        self._frontends.gone.add(self._peers[number])
        self._owed.pop(number, None)
        self._statistics["rule: who is gone is found when something is sent"] += 1
        lost = ToFrontend(number, AbortLabel(0, "nobody"))
        assert self._process._apply([lost]), f"frontend {number} is gone, and nobody notes it"
        assert not self._process._apply([lost]), f"frontend {number} is gone, and is found so again"

    @property
    def is_drained(self) -> bool:
        """So a process ends that was told to."""
        if self._is_stopping and self._scheduler.is_ready:
            return self._process._has_ended()
        return self._scheduler.is_drained

    @property
    def next_tick_s(self) -> float | None:
        """The process wakes then; when workers are late, too."""
        now, due = self._now(), self._scheduler.next_tick_s
        first = min(math.inf if due is None else due, self._answers.due_s)
        if first < math.inf:
            timeout_ms = self._process._timeout_ms()
            self._statistics["rule: the process wakes when time brings something"] += 1
            least_s = max(first - now, 0.0)
            assert timeout_ms is not None and least_s - 1e-6 <= timeout_ms / 1000 < least_s + 0.0011, (
                f"the process sleeps for {timeout_ms} ms, where there is something to do in {first - now} s"
            )
        return due

    # ---- What the process does

    def _do(self, action: Callable[[], object]) -> list[Effect]:
        self._effects = []
        try:
            action()
        except StartError as error:
            self._effects.append(Fatal(str(error)))
        assert not self._at_ranks, f"only the ranks {self._at_ranks} were sent something"
        return self._effects

    def _peer_of(self, number: int, *, is_new: bool) -> bytes:
        if is_new or number not in self._peers:
            peer = f"frontend {number}, process {len(self._number_of)}".encode()
            self._number_of[peer] = number
            if not is_new:
                return peer  # a stranger: whoever says hello first is met
            self._peers[number] = peer
        return self._peers[number]

    def _note_heard(self, number: int, message: Message | RequestView) -> None:
        owed = self._owed.setdefault(number, set())
        match message:
            case FrontendHello() if message.protocol_hash == protocol_hash():
                owed.clear()
            case RequestView() if message.rid not in {rid for rid, _ in owed}:  # else it is not taken
                owed.update((message.rid, index) for index in np.frombuffer(message.choices, np.int32).tolist())
            case Abort(rid, choice):
                owed.difference_update([key for key in owed if key[0] == rid and choice in (-1, key[1])])

    def _note_told(self, number: int, message: Message) -> None:
        owed = self._owed.get(number, set())
        if isinstance(message, TokenBatch):
            owed.difference_update((done.rid, done.choice) for done in message.done)
        elif isinstance(message, Refused):
            owed.difference_update([key for key in owed if key[0] == message.rid])

    def _note_ready(self, values: dict[str, Scalar]) -> None:
        self._num_ready += 1
        self._effects.append(HandshakeDone(values))

    def _note_record(self, message: RecordLedger) -> None:
        self._effects.append(Record(message.ledger))

    def _note_to_frontend(self, peer: bytes, message: Message) -> None:
        number = self._number_of[peer]
        self._statistics["rule: only the latest process of a frontend is sent anything"] += 1
        assert self._peers.get(number, peer) == peer, f"frontend {number} has another process by now: {message}"
        self._note_told(number, message)
        self._effects.append(ToFrontend(number, cast("Any", message)))

    def _note_to_rank(self, peer: bytes, message: Message) -> None:
        self._at_ranks.append(int(peer.split()[1]))
        if len(self._at_ranks) < self._settings.num_ranks:
            return
        self._statistics["rule: all ranks are sent the same"] += 1
        assert sorted(self._at_ranks) == list(range(self._settings.num_ranks)), f"{self._at_ranks} are sent {message}"
        self._at_ranks.clear()
        work = cast("ToWorker", message)
        self._effects.append(ToWorkers(work))
        if isinstance(work, Prepare | Release):
            return
        if not self._answers.owed:
            self._answers.since_s = self._now()
        self._answers.owed.append(_Owed(work.step, self._may_take_s(work), set(range(self._settings.num_ranks))))

    def _may_take_s(self, work: StepPlan | WorkPlan) -> float:
        """As --watchdog-timeout is meant: of 256 tokens, in proportion if there are more, and ten times of a capture."""
        times = 10.0 if isinstance(work, WorkPlan) and isinstance(work.work, CaptureGraph) else 1.0
        if isinstance(work, StepPlan):
            counts = [int(section.extend_counts.sum()) + len(section.decode_slots) for section in work.sections]
            times = max(1.0, sum(counts) / 256)
        return self._settings.watchdog_timeout * times
