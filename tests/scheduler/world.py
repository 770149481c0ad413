"""A whole replica in virtual time: the real Scheduler between a fake worker and fake frontends, on links that delay."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

from srt.managers.effects import Effect, Frontend, HandshakeDone, Source, ToFrontend, ToWorkers, Worker
from srt.managers.scheduler_state import Scheduler
from srt.protocol import messages
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AckBatch,
    ControlReply,
    FlushCache,
    FromFrontend,
    FrontendHello,
    GetState,
    Message,
    Refused,
    StepAck,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkDone,
    WorkerHello,
    WorkPlan,
)
from tests.scheduler.fake_frontend import FakeFrontend
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.plan_watcher import PlanWatcher
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Traffic

PROTOCOL = "simulated"
MAX_UNACKNOWLEDGED = 8
_COUNTED = (
    "num_steps num_mixed_steps num_rows num_finished num_failed num_refused num_aborted_waiting num_aborted_prefill"
    " num_aborted_decode num_cached_tokens num_dropped_rows num_evicted_pages num_held_back num_preempted"
).split()


class World:
    """Runs until nothing is left to happen. A broken promise is an AssertionError."""

    def __init__(self, seed: int, settings: Settings | None = None) -> None:
        self._rng = random.Random(seed)
        self.settings = s = settings or Settings.draw(self._rng)
        self.statistics: Counter[str] = Counter()
        self.now = 0.0
        self._scheduler = Scheduler(s.server_args(), PROTOCOL)
        self._worker = FakeWorker(s.num_slots, s.num_pages, s.page_size, s.vocab_size, breaks_down=s.breaks_down)
        self._traffic = Traffic(s, random.Random(seed))  # the same requests, whatever else happens
        self._watcher = PlanWatcher(s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._link_ends: dict[str, float] = {}
        self._tick_is_due = False
        self._make_frontend = LedgerFrontend if s.keeps_ledger else FakeFrontend
        self._frontends: dict[int, FakeFrontend] = {
            n: self._make_frontend(n, self._rng) for n in range(s.num_frontends)
        }
        self._connected = dict(self._frontends)  # as the scheduler's process knows them
        self._last_ack = dict.fromkeys(self._frontends, -1)
        self._retired: list[FakeFrontend] = []
        self._next_rid = 1
        self._next_call = 1

    def run(self) -> None:
        self._begin()
        self._run_events()
        for frontend in self._frontends.values():
            frontend.check_complete()
        self._end()

    # ---- Time and links

    def _run_events(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def _send(self, link: str, delay: float, action: Callable[[], None]) -> None:
        """Over the link of this name, behind all that was sent before."""
        when = max(self._link_ends.get(link, 0.0), self.now + self._rng.random() * 2 * delay)
        self._link_ends[link] = when
        self._at(when, action)

    def _begin(self) -> None:
        s, when = self.settings, 0.0
        for rank in range(s.tp_size):
            sizes = (s.page_size, s.num_pages, s.num_slots, s.max_request_tokens, s.vocab_size)
            hello = WorkerHello(rank, PROTOCOL, "config", "float32", *sizes)
            self._send(f"from worker {rank}", s.delay, self._delivery(Worker(rank), hello))
        for number in self._frontends:
            self._say(number, FrontendHello(number, PROTOCOL))
        for index in range(s.num_requests):
            when += self._rng.expovariate(1.0) * s.arrival_gap
            self._at(when, self._arrive)
            if s.is_disturbed and index % 4 == 3:
                self._at(when, self._disturb)

    def _end(self) -> None:
        """Everything is over: all memory must be free, and every book must say so."""
        frontend = next(iter(self._frontends.values()))
        state = self._ask(frontend, GetState(self._call(), deep=True))
        assert state.ok, state.message
        assert self._ask(frontend, FlushCache(self._call())).ok
        after = self._ask(frontend, GetState(self._call(), deep=False)).values
        wanted = {"num_free_pages": self.settings.num_pages, "num_free_slots": self.settings.num_slots}
        wanted |= {"num_waiting": 0, "num_pinned": 0, "num_in_flight": 0}
        wanted |= {f"live_requests_of_frontend_{number}": 0 for number in self._frontends}
        for name, value in wanted.items():
            assert after[name] == value, f"at the end {name} is {after[name]} instead of {value}"
        self._count(state)

    def _count(self, state: ControlReply) -> None:
        for name in _COUNTED:
            value = state.values[name]
            assert isinstance(value, int)
            self.statistics[name] += value
        for frontend in [*self._frontends.values(), *self._retired]:
            self.statistics["num_crossing_aborts"] += frontend.num_crossing_aborts
            self.statistics["num_catch_ups"] += frontend.num_catch_ups
            self.statistics["num_asked_again"] += frontend.num_asked_again

    def _ask(self, frontend: FakeFrontend, message: GetState | FlushCache) -> ControlReply:
        self._say(frontend.number, message)
        self._run_events()
        return frontend.replies[message.call]

    # ---- Frontends

    def _say(self, number: int, message: FromFrontend, delay: float | None = None) -> None:
        delay = self.settings.delay if delay is None else delay
        sender = self._frontends[number]

        def deliver() -> None:
            if isinstance(message, FrontendHello):
                self._meet(sender)
            self._deliver(Frontend(number), message)

        self._send(f"from frontend {number}", delay, deliver)

    def _meet(self, frontend: FakeFrontend) -> None:
        """The scheduler's process hears of this frontend, and forgets the one before it."""
        before = self._connected[frontend.number]
        if before is not frontend:
            for rid in before.sent:
                self._watcher.end(frontend.number, rid, -1)
            self._last_ack[frontend.number] = -1
        self._connected[frontend.number] = frontend

    def _arrive(self) -> None:
        number = self._rng.randrange(self.settings.num_frontends)
        planted = self._traffic.next_request(self._next_rid, may_resume=self._frontends[number].may_resume)
        self._next_rid += 1
        self._watcher.add(number, planted)
        self._frontends[number].add(planted.request, planted.answers)
        self._say(number, planted.request)
        if self._rng.random() < self.settings.abort_share:
            after = (
                self._rng.choice((0.0, 2.0, 5.0, 20.0))
                * self._rng.random()
                * (self.settings.step_time + self.settings.delay)
            )
            choice = self._rng.choice([-1, *planted.answers])
            frontend = self._frontends[number]
            self._at(self.now + after, lambda: self._abort(frontend, planted.request.rid, choice))

    def _abort(self, frontend: FakeFrontend, rid: int, choice: int) -> None:
        if self._frontends[frontend.number] is frontend:
            for message in frontend.abort(rid, choice):
                self._say(frontend.number, message)

    def _disturb(self) -> None:
        """Now and then: a question, an abort by label, a frontend that begins anew."""
        number = self._rng.randrange(self.settings.num_frontends)
        kind = self._rng.choice(("deep", "state", "flush", "label", "return", "abort all"))
        if kind in ("deep", "state"):
            self._say(number, GetState(self._call(), deep=kind == "deep"))
        elif kind == "flush":
            self._say(number, FlushCache(self._call()))
        elif kind == "label":
            self._abort_label(number)
        elif kind == "return" and self.settings.frontends_return:
            self._replace(number)
        elif kind == "abort all" and self._rng.random() < 0.2:
            self._say(number, AbortLabel(self._call(), ""))

    def _abort_label(self, number: int) -> None:
        owner = self._rng.choice(list(self._frontends.values()))
        live = owner.live()
        if live:
            rid, _ = self._rng.choice(live)
            owner.expect_abort(rid)
            self._say(number, AbortLabel(self._call(), owner.sent[rid].request.label))

    def _replace(self, number: int) -> None:
        """The frontend dies and comes again: nothing of the old one may reach the new one."""
        self._retired.append(self._frontends[number])
        self._frontends[number] = self._make_frontend(number, self._rng)
        self._say(number, FrontendHello(number, PROTOCOL))

    def _call(self) -> int:
        self._next_call += 1
        return self._next_call - 1

    def _to_frontend(self, number: int, message: messages.ToFrontend) -> None:
        receiver = self._connected[number]

        def deliver() -> None:
            if self._frontends[number] is receiver:
                for back in receiver.receive(message):
                    self._say(number, back, self.settings.ack_delay)

        if isinstance(message, TokenBatch):
            assert message.number - self._last_ack[number] <= MAX_UNACKNOWLEDGED, f"frontend {number} is flooded"
            for done in message.done:
                self._watcher.end(number, done.rid, done.choice)
        if isinstance(message, Refused):
            self._watcher.end(number, message.rid, -1)
        self._send(f"to frontend {number}", self.settings.delay, deliver)

    # ---- The scheduler's process

    def _delivery(self, source: Source, message: Message) -> Callable[[], None]:
        return lambda: self._deliver(source, message)

    def _deliver(self, source: Source, message: Message) -> None:
        self._watch(source, message)
        self._apply(self._scheduler.handle(source, message, self.now))
        if not self._tick_is_due:  # a host process may find more messages before it ticks
            self._tick_is_due = True
            self._at(self.now + self._rng.choice((0.0, 0.0, 0.002)), self._tick)

    def _watch(self, source: Source, message: Message) -> None:
        """What the scheduler learns by this message about the end of requests."""
        match source, message:
            case Frontend(number), Abort(rid, choice) if self._scheduler.is_ready:
                self._watcher.end(number, rid, choice)
            case _, AbortLabel(_, ""):
                for frontend in self._frontends.values():
                    frontend.expect_aborts()
            case Frontend(number), AckBatch(batch):
                self._last_ack[number] = batch
            case _, StepResult():
                self._watcher.see_result()

    def _tick(self) -> None:
        self._tick_is_due = False
        self._apply(self._scheduler.tick(self.now))
        self._scheduler.check()

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToWorkers(work):
                    self._to_workers(work)
                case ToFrontend(number, message):
                    self._to_frontend(number, message)
                case HandshakeDone():
                    pass
                case _:
                    raise AssertionError(f"the scheduler gave up: {effect}")

    # ---- The workers: one that works, and ranks that say the same

    def _to_workers(self, work: StepPlan | WorkPlan) -> None:
        if isinstance(work, StepPlan):
            self._watcher.see(work)
        self._send("to workers", self.settings.delay, lambda: self._work(work))

    def _work(self, work: StepPlan | WorkPlan) -> None:
        answer = self._worker.do(work) if isinstance(work, WorkPlan) else self._worker.execute(work)
        duration = self.settings.step_time * self._rng.choice((0.5, 1.0, 3.0))
        for rank in range(self.settings.tp_size):
            self._send(f"from worker {rank}", duration, self._delivery(Worker(rank), _of_rank(answer, rank)))


def _of_rank(answer: StepResult | WorkDone, rank: int) -> StepResult | StepAck | WorkDone:
    if isinstance(answer, WorkDone):
        return WorkDone(answer.step, rank, answer.values)
    return answer if rank == 0 else StepAck(answer.step, rank, answer.ids_hash, answer.step_us)
