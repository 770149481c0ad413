"""One generation of a simulated server: the real Scheduler, the host process around it, its workers and its links."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, cast

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.effects import Effect, Frontend, HandshakeDone, Record, Source, Worker
from srt.managers.scheduler.effects import ToFrontend as SendToFrontend
from srt.managers.scheduler.effects import ToWorkers as SendToWorkers
from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol.codec import protocol_hash
from srt.protocol.engine_work import CaptureGraph, EngineLedger
from srt.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    AckBatch,
    ControlReply,
    FromFrontend,
    FrontendHello,
    GenerateRequest,
    LastWord,
    Load,
    Message,
    PinResources,
    Prepare,
    Prepared,
    Refused,
    Rejected,
    Release,
    StepAck,
    StepPlan,
    StepResult,
    ToFrontend,
    TokenBatch,
    ToWorker,
    WorkDone,
    WorkerHello,
)
from tests.scheduler.captures import Captures
from tests.scheduler.control_rules import ControlRules, Said, check_facts
from tests.scheduler.fairness import CHECK_EVERY, Fairness
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.host_process import HostedScheduler
from tests.scheduler.hostile import HOSTILE_RIDS, Hostile, Progress, break_off, check_handshake
from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.obligations import Obligations
from tests.scheduler.resource_rules import ResourceRules
from tests.scheduler.room import Room
from tests.scheduler.traffic import Choice
from tests.support.wire import at_scheduler

if TYPE_CHECKING:
    from tests.scheduler.world import World

PROTOCOL = protocol_hash()
MAX_UNACKNOWLEDGED = 8
COUNTED = (
    "num_mixed_steps num_rows num_failed num_aborted_waiting num_aborted_prefill num_aborted_decode num_cached_tokens"
    " num_dropped_rows num_evicted_pages num_held_back num_preempted num_preemptions"
).split()


class Link:
    """Messages arrive in order, until it is cut."""

    __slots__ = ("_begin", "_end", "cut_at")

    def __init__(self, begin: float = 0.0) -> None:
        self._begin = self._end = begin
        self.cut_at = math.inf

    def next(self) -> Link:
        """For whoever comes after its cut: all that arrives by this one, and by those before it, arrives earlier."""
        return Link(max(self._begin, self.cut_at))

    def next_arrival(self, now: float, delay: float) -> float:
        """Of a message that is sent now: behind all that was sent before."""
        self._end = max(self._end, now + delay)
        return self._end


class Server:
    """Owns what dies with the scheduler. The world tells it what its frontends say."""

    def __init__(self, world: World, generation: int, ledger: EngineLedger | None = None) -> None:
        s, ledger = world.settings, ledger or EngineLedger()
        self.generation = generation
        self.is_alive = True
        self._world = world
        self._settings = s
        hosted = HostedScheduler(s, lambda: world.now, world.statistics, ledger)
        self._scheduler = cast("Scheduler", hosted)  # behind the hands of its process
        self.resources = ResourceRules(s, world.statistics, world.resources_rng)
        self.resources.waits = self._waits
        self._worker = FakeWorker(s, world.by_seed, self.resources)
        self._connected: dict[int, LedgerFrontend] = {}
        self._last_ack: dict[int, int] = {}
        self._next_batch: dict[int, int] = {}
        self._to_frontends = [Link(world.now) for _ in range(s.num_frontends)]
        self._from_ranks = [Link(world.now) for _ in range(s.num_ranks)]
        self._tick_at = math.inf
        self._num_in_flight = 0
        self._answered = 0  # the last step of which the scheduler has the result
        self._first_stage_free_at = world.now
        self._busy_since = math.inf  # the workers, with the step that was not answered for longest
        self._is_mute = False  # a worker
        self._takes_early = False  # all that came before they were, at once: what was in between is not seen
        self._extra_s = 0.0  # that the next step takes longer than it says
        self.control = ControlRules(
            s,
            world.calls_rng,
            world.statistics,
            lambda request: [world.by_rid[request.rid][index] for index in request.choices.tolist()],
            self._worker.end,
            ledger,
        )
        self._fairness = Fairness(s, world.statistics, self.resources.is_ready)
        self._obligations = Obligations(s, world.statistics)
        self._room = Room(s, world.statistics, self._worker, self._fairness)
        self._num_preempted = 0  # when it was last asked who was
        self._next_answer = [1] * s.num_ranks
        self._last_sent = 0
        self._captures = Captures(world.statistics, s.num_ranks, lambda: self._worker.num_graphs_left)
        self._told_load: dict[int, tuple[float, Load]] = {}  # by frontend
        self._busy_at = world.now  # something was heard
        self._says_last_words = False
        # By step: the rows with their ids, how many ranks are to answer, and what is answered.
        self._unanswered: dict[int, tuple[list[tuple[Choice, int]], int, StepResult]] = {}
        self._to_be_tried: dict[int, int] = {}  # suspects by seed, and the outputs with which they are through

    def start(self) -> None:
        """The workers come up."""
        s = self._settings
        sizes = (s.page_size, s.num_pages, s.num_slots, s.max_request_tokens, s.vocab_size)
        for rank in range(s.num_ranks):
            counts = (s.row_tokens, s.num_stages, s.num_graphs, s.most_resources)
            groups = [window.tokens for window in s.windows], [window.num_pages for window in s.windows]
            hello = WorkerHello(rank, PROTOCOL, "config", "float32", *sizes, *counts, *groups)
            self._from_rank(rank, s.delay, hello)
        self._world.statistics["rule: ranks that differ are no replica"] += 1
        check_handshake(s, self._world.calls_rng, hello)

    def die(self) -> None:
        """By a fault of a worker, or all at once."""
        if self._scheduler.is_ready and self._world.rng.random() < 0.5:
            if self._world.calls_rng.random() < 0.3:
                self.control.ended_grace(_said(self._scheduler.break_off()))
            progress = self._progress()
            num_words = break_off(self._scheduler, progress, self._settings, self._world.calls_rng, self._world.now)
            self._world.statistics["rule: a worker's fault ends it"] += num_words
        self.is_alive = False
        self.count()

    def _progress(self) -> Progress:
        first, last = self._next_answer[0], self._next_answer[-1]
        owed, other = self._unanswered.get(first), self._unanswered.get(last)
        return Progress(
            self._next_answer,
            self._last_sent,
            owed[2] if owed is not None else None,
            other[2].ids_hash if other is not None and first > last else None,
        )

    def say_last_words(self) -> None:
        """The host process ends before its time, in order."""
        in_flight = {choice.seed: choice for rows, _, _ in self._unanswered.values() for choice, _ in rows}
        self._says_last_words = True
        effects = self._scheduler.last_words()
        words = [effect.message for effect in effects if isinstance(effect, SendToFrontend)]
        named = [word for word in words if isinstance(word, LastWord)]
        keys = [key for word in named for key in zip(word.rids.tolist(), word.choices.tolist(), strict=True)]
        live = {
            request.key
            for client in self._scheduler._clients.values()
            for request in client.all_requests()
            if request.progress.status is not Status.ENDED
        }
        wanted = live.intersection((choice.request.rid, choice.choice) for choice in in_flight.values())
        self._world.statistics["rule: last words name what is in flight"] += bool(self._connected)
        assert sorted(keys) == sorted(wanted), f"{sorted(keys)} are said to be in flight, and {sorted(wanted)} are"
        for word in named:
            assert not word.is_alone or len(in_flight) == 1, "who is said to be alone was not"
            assert word.is_alone or len(in_flight) != 1 or self._settings.num_ranks > 1, (
                "who was alone is not said to be"
            )
        self._apply(effects)

    def mute(self) -> None:
        """A worker answers no more."""
        self._is_mute = True

    def slow_down(self, seconds: float) -> None:
        """The next step takes so much longer, for no fault of its own."""
        self._extra_s = seconds

    def progress_age_s(self, now: float) -> float:
        """Of the workers."""
        return max(0.0, now - self._busy_since) if self.is_alive else 0.0

    def cut(self, frontend: int, when: float) -> None:
        """What would reach this frontend later does not."""
        self._to_frontends[frontend].cut_at = when

    def _waits(self, request: Request) -> bool:
        core = self._scheduler._core
        return core is not None and core.resources.waits(request)

    def count(self) -> None:
        statistics, worker = self._world.statistics, self._worker
        self._world.rows_per_step += worker.rows_per_step
        statistics["steps"] += len(worker.rows_per_step)
        statistics["prefix hits"] += worker.num_prefix_hits
        statistics["preemptions"] += worker.num_readmissions
        statistics.update(worker.rules)
        core = self._scheduler._core
        if core is not None:
            values = core.state()
            statistics.update({name: int(values[name] or 0) for name in COUNTED if name in values})

    # ---- Messages in

    def hear(self, frontend: LedgerFrontend, message: FromFrontend | Hostile) -> None:
        number = frontend.number
        is_gone = self._connected.get(number) is not frontend and not isinstance(message, FrontendHello)
        if not self.is_alive or is_gone:
            return
        if (
            isinstance(message, Hostile)
            and message.is_duplicate
            and not self.control.books.of_request(number, message.rid)
        ):
            return  # what it repeats was refused meanwhile, so it would be a request like any other
        self._busy_at = self._world.now
        if isinstance(message, FrontendHello):
            self._meet(frontend)
        elif isinstance(message, Abort):
            for choice in self._world.by_rid.get(message.rid, ()):
                self._world.statistics["crossing aborts"] += choice.is_done and message.choice in (-1, choice.choice)
        elif isinstance(message, AckBatch):
            self._last_ack[number] = message.number
        elif isinstance(message, GenerateRequest):
            known = self._world.by_rid[message.rid]
            choices = [known[index] for index in message.choices.tolist()]
            is_early = not self._scheduler.is_ready
            self._obligations.arrive(message, choices, self._world.now, is_early=is_early)
            if message.suspect:
                for choice, ids in zip(choices, message.output_ids, strict=True):
                    self._to_be_tried[choice.seed] = len(ids) + TRIAL_TOKENS
        effects = self._handle(Frontend(number), message)
        if isinstance(message, GenerateRequest) and not any(isinstance(word, Refused) for _, word in _said(effects)):
            self.resources.want(message)
        elif isinstance(message, PinResources):
            self.resources.pin(message)
        if not isinstance(message, FrontendHello):
            self.control.heard(frontend, message, _said(effects))
            self._forget_flushed()
        self._apply(effects)
        self._look_for_preempted()
        self.control.check_drained(self._scheduler.is_drained, self._num_in_flight)
        self._tick_soon(self._settings.tick_delay if isinstance(message, AckBatch) else 0.0)

    def hear_stranger(self, message: FromFrontend) -> None:
        """From a frontend that has not said hello."""
        if self.is_alive:
            number = self._settings.num_frontends + 7
            said = _said(self._handle(Frontend(number), message))
            self._world.statistics["rule: strangers are rejected"] += 1
            assert len(said) == 1 and said[0][0] == number and isinstance(said[0][1], Rejected), f"{message}: {said}"

    def _forget_flushed(self) -> None:
        if self.control.has_flushed:
            self._worker.forget_cached()

    def lose(self, frontend: LedgerFrontend) -> None:
        """The scheduler's process finds that this frontend is gone."""
        if self.is_alive and self._connected.get(frontend.number) is frontend:
            self._forget(frontend)
            self._scheduler.frontend_gone(frontend.number)
            self._tick_by(self._world.now)

    def drain(self) -> None:
        self._scheduler.drain()
        self.control.drain()

    @property
    def is_ready(self) -> bool:
        return self._scheduler.is_ready

    @property
    def is_drained(self) -> bool:
        return self._scheduler.is_drained

    def _check_idle(self) -> None:
        """What time alone brings, without a message."""
        core = self._scheduler._core
        if core is None or self._is_mute:
            return
        self._fairness.look_for_stale_load(core, self._told_load)
        if not self.control.books.num_live and not self._num_in_flight:
            self._captures.check_idle(self._world.now, self._busy_at)

    def wake(self) -> None:
        if self.is_alive:
            self._obligations.look_at_time(self._requests(), self._world.now)
            self._check_idle()
        when = self._scheduler.next_tick_s if self.is_alive else None
        if when is not None and when <= self._world.now:
            self._tick_by(self._world.now)

    @property
    def has_more_to_do(self) -> bool:
        return self.is_alive and self._scheduler.next_tick_s is not None

    def _meet(self, frontend: LedgerFrontend) -> None:
        before = self._connected.get(frontend.number)
        if before is not None:
            self._forget(before)
        self._connected[frontend.number] = frontend
        self.control.meet(frontend)
        self._last_ack[frontend.number], self._next_batch[frontend.number] = -1, 0
        link = self._to_frontends[frontend.number]
        self._to_frontends[frontend.number] = Link(max(link.next_arrival(self._world.now, 0.0), self._world.now))

    def _forget(self, frontend: LedgerFrontend) -> None:
        del self._connected[frontend.number]
        self._told_load.pop(frontend.number, None)
        self.control.lose(frontend.number)
        for choice in frontend.live_choices():
            self._worker.end(choice)

    def _handle(self, source: Source, message: Message | Hostile) -> list[Effect]:
        received = message.message if isinstance(message, Hostile) else message
        received = at_scheduler(received) if isinstance(received, GenerateRequest) else received
        self._takes_early = not self._scheduler.is_ready
        effects = self._note_recorded(self._scheduler.handle(source, received, self._world.now))
        if self._takes_early and self._scheduler.is_ready:
            self._obligations.become_ready(self._world.now)
        return effects

    def _tick_soon(self, within: float) -> None:
        """A host process may find more messages before it ticks."""
        self._tick_by(self._world.now + (within or self._world.rng.choice((0.0, 0.0, 0.002))))

    def _look_for_preempted(self) -> None:
        core = self._scheduler._core
        if core is not None and core.counters.num_preempted != self._num_preempted:
            self._num_preempted = core.counters.num_preempted
            self._obligations.see_preemptions(self._requests())
            self._room.sync(core)

    def _requests(self) -> list[Request]:
        """All that the scheduler has, with those that ended and are not forgotten yet."""
        return [request for client in self._scheduler._clients.values() for request in client.all_requests()]

    def _tick_by(self, when: float) -> None:
        if when < self._tick_at:
            self._tick_at = when
            self._world.at(when, self._tick)

    def _tick(self) -> None:
        world = self._world
        if not self.is_alive or world.now < self._tick_at:
            return  # it was done earlier
        self._tick_at = math.inf
        core = self._scheduler._core
        if core is None:
            return
        is_checked = world.rng.random() * world.check_every < 1.0
        evicts_often = self._settings.is_alike and self._settings.rarely_new  # and its tree is small
        before = self._fairness.before(core, with_tree=is_checked or evicts_often)
        world.statistics["rule: no plans in a pause"] += bool(self.control.paused_by and before.num_live)
        may_be_sent = [n for n in self._connected if self._next_batch[n] - self._last_ack[n] <= MAX_UNACKNOWLEDGED]
        must_capture = self._captures.is_missed and self._captures.may_begin(world.now)
        glance = self._room.look(core, self._requests)
        effects = self._note_recorded(self._scheduler.tick(world.now))
        plans = [e.message for e in effects if isinstance(e, SendToWorkers) and isinstance(e.message, StepPlan)]
        is_calm = self._room.judge(core, glance, plans, self._requests)
        self._apply(effects)
        self._look_for_preempted()
        self._check_waiting(core, plans, is_calm=is_calm)
        self._captures.check_begun(must_begin=must_capture)
        self.control.ticked(_said(effects), self._num_in_flight, min(self._next_answer) > self._last_sent)
        self.control.check_drained(self._scheduler.is_drained, self._num_in_flight)
        self._fairness.after(self._scheduler, core, before, world.now)
        if self._settings.num_resources:
            self.resources.ticked(self._requests(), world.now)
        for number in may_be_sent if core.counters.num_steps % CHECK_EVERY == 1 else ():
            self._fairness.check_sent(core, number)
        if is_checked:
            self._scheduler.check()
            self._room.check_figures(core)
            self._fairness.check_load(core, self._told_load, world.now)
            self._worker.check_written([bytes(node.pages) for node in core.memory.tree.nodes()])
            self._worker.check_windows(core)
            self._fairness.check_all(self._scheduler, core, may_be_sent, world.now)

    def _check_waiting(self, core: SchedulerCore, plans: list[StepPlan], *, is_calm: bool) -> None:
        """Who waits behind a tick has to; and if no step is under way, nobody is there."""
        planner = core.planner
        if (
            not self.control.paused_by
            and not self._num_in_flight
            and (core.stream.is_empty or not planner.trials.are_some_left)
        ):
            self._world.statistics["rule: who is there is worked on"] += 1
            left = [r for r in self._requests() if r.progress.status is not Status.ENDED and self.resources.is_ready(r)]
            assert not left, f"nothing is under way, and request {left[0].key} is there"
        if is_calm and planner.num_waiting and core.slots.num_free and not self._settings.windows:
            waiting = [
                r for r in self._requests() if r.progress.status is Status.WAITING and self.resources.is_ready(r)
            ]
            first = self._fairness.first_waiting(self._scheduler, core)
            if first is None:
                return
            examined = [first] if self._settings.policy != "lpm" else waiting  # before it, and they may stand aside
            if not any(self._fairness.may_follow(core, request) for request in examined):
                self._room.check_waiting(core, plans[-1], first, waiting)

    # ---- Effects out

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToWorkers(work):
                    self._to_workers(work)
                case SendToFrontend(number, message):
                    self._to_frontend(number, message)
                case Record():
                    pass  # it was noted before the answers were judged
                case HandshakeDone(facts):
                    check_facts(self._settings, facts)
                case _:
                    raise AssertionError(f"the scheduler gave up: {effect}")

    def _note_recorded(self, effects: list[Effect]) -> list[Effect]:
        """What the supervisor is to keep goes out before any answer."""
        is_answered = False
        for effect in effects:
            is_answered |= isinstance(effect, SendToFrontend) and isinstance(effect.message, ControlReply)
            if isinstance(effect, Record):
                assert not is_answered or self._takes_early, f"a call is answered before {effect.ledger} is recorded"
                self.control.ledger = effect.ledger
        return effects

    def _to_frontend(self, number: int, message: ToFrontend) -> None:
        world, receiver = self._world, self._connected.get(number)
        if receiver is None:
            return
        match message:
            case Rejected():  # which is right, and its sender's affair
                return
            case Load():
                self._told_load[number] = world.now, message
            case Refused(status=429) if not self._takes_early:
                self._fairness.check_crowded(self._scheduler)
        if isinstance(message, TokenBatch):
            most = MAX_UNACKNOWLEDGED + self._says_last_words  # all that is known goes with them
            world.statistics["rule: frontends are not flooded"] += message.number - self._last_ack[number] == most
            assert message.number - self._last_ack[number] <= most, f"frontend {number} is flooded"
            self._next_batch[number] = message.number + 1
            self._obligations.see_batch(message, world.now)
            self.control.sent_batch(number)
            self._check_ranges(message)
            for done in message.done:
                self.control.sent_end(number, done, message.number)
                if done.rid >= HOSTILE_RIDS:
                    continue
                choice = world.by_rid[done.rid][done.choice]
                world.statistics["rule: cached tokens are told"] += choice.cached_prompt_tokens > 0
                assert done.cached_tokens == choice.cached_prompt_tokens, (
                    f"{choice.name}: {done}, not {choice.cached_prompt_tokens}"
                )
                self._worker.end(choice)
                choice.is_done = True
                if world.rng.random() < 0.1 * self._settings.abort_share:  # its client leaves while the end travels
                    world.at(world.now, partial(world.abort, receiver, done.rid, done.choice))
        link = self._to_frontends[number]
        when = link.next_arrival(world.now, world.rng.random() * 2 * self._settings.delay)
        world.at(when, partial(world.deliver, receiver, message), link)

    def _check_ranges(self, batch: TokenBatch) -> None:
        """Each token is sent once, in order, unless it was asked for again."""
        statistics = self._world.statistics
        columns = zip(
            *(batch.rids.tolist(), batch.choices.tolist(), batch.first.tolist(), batch.counts.tolist()),
            batch.cached.tolist(),
            strict=True,
        )
        for rid, index, first, count, cached in columns:
            choice = self._world.by_rid[rid][index]
            assert cached == choice.cached_prompt_tokens, (
                f"{choice.name}: {cached} tokens are told to be cached, not {choice.cached_prompt_tokens}"
            )
            assert first == choice.num_sent or choice.num_sent < 0 or choice.has_asked, (
                f"{choice.name}: tokens from {first} on were sent, where {choice.num_sent} were sent before"
            )
            choice.num_sent = first + count
            statistics["rule: each token is sent once"] += 1

    # ---- Workers

    def _to_workers(self, work: ToWorker) -> None:
        """What it makes of the work is known at once; when that is told is another matter."""
        if isinstance(work, Prepare | Release):
            for rank, delay, prepared in self.resources.hear(work, self._requests(), self._world.now):
                self._from_rank(rank, delay, prepared)
            return
        s, rng = self._settings, self._world.rng
        answer: StepResult | WorkDone
        step_us = 0
        self._last_sent = work.step
        if isinstance(work, StepPlan):
            assert not self.control.paused_by, "a plan was made in a pause"
            if not self._num_in_flight:
                self._busy_since = self._world.now
            self._num_in_flight += 1
            self._world.statistics["rule: no more plans than may be in flight"] += (
                self._num_in_flight == s.most_in_flight
            )
            assert self._num_in_flight <= s.most_in_flight, f"{self._num_in_flight} plans are in flight"
            step_us = self._step_us(work)
            self._obligations.see_plan(work, self._world.now)
            answer = self._worker.execute(work, step_us, self._answered, self._is_trial(work))
            rows = self._worker.rows_of(work, answer)
            self._unanswered[work.step] = rows, s.num_ranks, answer
            self.control.planned([choice for choice, _ in rows])
            self.control.counts.note_plan(work)
            self._check_trial(rows)
        else:
            answer = self._worker.do(work)
            if isinstance(work.work, CaptureGraph):
                self._check_capture()
                step_us = int(1e6 * s.step_time)
            else:
                self.control.asked_tables(work.step)
        begin = max(self._world.now, self._first_stage_free_at)
        self._first_stage_free_at = begin + step_us / 1e6 / s.num_stages
        duration = begin - self._world.now + step_us / 1e6 + self._extra_s
        self._extra_s = 0.0
        for rank in range(s.num_ranks):
            self._from_rank(rank, duration + s.delay * rng.random(), self._of_rank(answer, rank))

    def _is_trial(self, plan: StepPlan) -> bool:
        """Of the one suspect that is in it."""
        row = self._worker.only_row(plan)
        return row is not None and row[1] - row[0].prompt_len < self._to_be_tried.get(row[0].seed, 0)

    def _check_trial(self, rows: list[tuple[Choice, int]]) -> None:
        """Of a step that is sent: a suspect that is not through yet is alone in all that is under way. Poison works here, too."""
        world = self._world
        for choice, num_sampled in rows:
            num_outputs = self._worker.num_known(choice) - choice.prompt_len
            if num_outputs - num_sampled < self._to_be_tried.get(choice.seed, 0):
                others = [c.name for rows, _, _ in self._unanswered.values() for c, _ in rows if c is not choice]
                world.note_trial(self)
                world.statistics["rule: trials run alone"] += 1
                assert not others, f"{choice.name} is tried beside {others[0]}"
            if 0 <= choice.poison_at < num_outputs:
                world.at(world.now, partial(world.die_of_request, self))

    def _check_capture(self) -> None:
        core = self._scheduler._core
        assert core is not None
        state = core.state()
        is_there = not self.control.paused_by and (state["num_running"] or state["num_waiting"])
        self._captures.begin(self._world.now, is_busy=bool(self._num_in_flight or is_there))

    def _step_us(self, plan: StepPlan) -> int:
        s, (section,) = self._settings, plan.sections
        num_decodes, prompts_us = len(section.decode_slots), 0.0
        if len(section.extend_counts):
            chunks = zip(section.extend_starts.tolist(), section.extend_counts.tolist(), strict=True)
            prompts_us = sum(s.prompt_us(start, count) for start, count in chunks)
            most = s.most_prompt_us(num_decodes)
            num_streams = self._worker.num_streams(section.decode_slots)
            self._world.statistics["rule: prompts do not hold up streams"] += num_streams > 0
            assert not num_streams or prompts_us <= most, (
                f"the prompts in step {plan.step} delay {num_streams} streams by {prompts_us:.0f} µs, more than {most:.0f}"
            )
        jitter, row_tokens = self._world.rng.choice(s.jitter), section.row_tokens if num_decodes else 1
        return int(s.decode_us(num_decodes, jitter, row_tokens) + prompts_us)

    def _from_rank(self, rank: int, delay: float, message: Message) -> None:
        link = self._from_ranks[rank]
        world = self._world
        world.at(link.next_arrival(world.now, delay), partial(self._hear_rank, rank, message))

    def _hear_rank(self, rank: int, message: Message) -> None:
        if not self.is_alive or self._is_mute:
            return
        self._busy_at = self._world.now
        if isinstance(message, StepResult | StepAck):
            self._note_answer(rank, message)
        elif isinstance(message, WorkDone):
            self._next_answer[rank] = message.step + 1
            if "num_left" in message.values:
                core = self._scheduler._core
                is_compiling = core is not None and message.values["num_left"] == core.stream.num_graphs_left
                self._captures.end(rank, self._world.now, is_compiling=is_compiling)
        if isinstance(message, StepResult) and int(message.counts.min(initial=0)) < 0:
            self._hear_failure(rank, message)
            return
        elif isinstance(message, Prepared):
            self.resources.heard(rank, message)
        is_early = not self._scheduler.is_ready
        effects = self._handle(Worker(rank), message)
        if isinstance(message, WorkDone):
            self.control.heard_done(message, _said(effects), self._settings.num_ranks)
        elif is_early and self._scheduler.is_ready:
            self.control.began(_said(effects))
            self._forget_flushed()
        else:
            assert not effects, f"{effects} follow from {message}, before all that has come is heard"
        self._apply(effects)
        self._tick_soon(0.0)

    def _note_answer(self, rank: int, message: StepResult | StepAck) -> None:
        self._next_answer[rank] = message.step + 1
        rows, num_ranks, answer = self._unanswered.pop(message.step)
        if num_ranks > 1:
            self._unanswered[message.step] = rows, num_ranks - 1, answer
        if isinstance(message, StepResult):
            self._num_in_flight -= 1
            self._busy_since = self._world.now if self._num_in_flight else math.inf
            self._answered = message.step
            self._captures.is_missed = message.wants_capture
            self.control.books.take_result(rows)
            self.control.counts.note_result(message.step, message.step_us)

    def _hear_failure(self, rank: int, result: StepResult) -> None:
        """The model gave no finite logits for some rows."""
        core = self._scheduler._core
        assert core is not None
        started = core.planner.started()
        self._apply(self._handle(Worker(rank), result))
        self._tick_soon(0.0)
        for request in started:
            if (done := request.delivery.done) is not None and done.status == 500:
                self._fairness.check_distrusted(core, request)

    def _of_rank(self, answer: StepResult | WorkDone, rank: int) -> StepResult | StepAck | WorkDone:
        if isinstance(answer, WorkDone):
            return self.control.answer_of_rank(rank, answer)
        return answer if rank == 0 else StepAck(answer.step, rank, answer.ids_hash, answer.step_us)


def _said(effects: list[Effect]) -> Said:
    return [(effect.frontend, effect.message) for effect in effects if isinstance(effect, SendToFrontend)]
