"""A whole server in virtual time: the real Scheduler and RequestLedgers, a fake worker, and links that delay and break.

What dies, or stands still, is the scheduler or a worker, or a frontend (its requests are gone). The Replacer finds out, and all of
its processes end; then the world goes on with what a successor would do: a new generation, to which the ledgers resubmit.
Everything is drawn from the seed: the same seed is the same world.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from srt.protocol.messages import (
    AbortLabel,
    AckBatch,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FromFrontend,
    FrontendHello,
    GenerateRequest,
    GetState,
    PauseGeneration,
    PinResources,
    Resource,
    ToFrontend,
)
from tests.scheduler.alike import alike, alike_for_readers, alike_in_resources
from tests.scheduler.callers import Callers, draw_callers
from tests.scheduler.clients import Clients, Texts
from tests.scheduler.hostile import Hostile
from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.server import PROTOCOL, Link, Server
from tests.scheduler.settings import Settings
from tests.scheduler.supervision import Supervision
from tests.scheduler.traffic import Choice, Traffic
from tests.scheduler.windowed import with_windows

WAKE_S = 0.25  # so often the scheduler's process looks whether time alone brings something to do
PATIENCE_S = 20_000.0  # virtual; a world that takes longer hangs


def _drawn(rng: random.Random, seed: int) -> Settings:
    settings = alike(Settings.draw(rng, random.Random(f"graphs in {seed}")), seed)
    settings = alike_in_resources(alike_for_readers(settings, seed), seed)
    return with_windows(draw_callers(settings, random.Random(f"callers in {seed}")), seed)


class World:
    """Runs until nothing is left to happen. A broken promise is an AssertionError.

    After every step the worker checks the plan against all that it has seen, and frontends check what is delivered. The
    scheduler's own books are checked in full at one tick of `check_every`, by chance, and at the end.
    """

    def __init__(self, seed: int, settings: Settings | None = None, *, check_every: int = 16) -> None:
        self.rng = random.Random(seed)
        self.settings = s = settings or _drawn(self.rng, seed)
        self.statistics: Counter[str] = Counter()
        self.rows_per_step: list[int] = []
        self.now = 0.0
        self.check_every = check_every
        self.is_draining = False
        self._traffic = Traffic(s, seed)  # the same requests, whatever else happens
        self._events: list[tuple[float, int, Link | None, Callable[[], None]]] = []
        self._num_events = 0
        self.by_seed: dict[int, Choice] = {}
        self.by_rid: dict[int, list[Choice]] = {}
        self._by_label: dict[str, list[Choice]] = {}
        self.texts = Texts(seed, s)
        self._ended: list[Clients] = []  # with their process
        self._callers = Callers(self, seed)
        self._traffic.num_poisons += self._callers.num_poisons
        self.resources_rng = random.Random(f"what becomes of resources in {seed}")
        self.calls_rng = random.Random(f"answers to calls of {seed}")
        self.pins = PinResources(0, [])  # as all frontends know it
        self.frontends = [LedgerFrontend(n, self) for n in range(s.num_frontends)]
        self.server = Server(self, generation=1)
        self._server_of: list[Server] = [self.server] * s.num_frontends  # that each frontend is connected to
        self._links: list[Link] = [Link() for _ in self.frontends]  # from frontends
        self._trouble = random.Random(f"trouble of {seed}")
        self._supervision = self._supervise()
        self._is_hanging = False  # the server is replaced when the Replacer has found out
        self._is_of_request = False  # what it dies of
        self._is_new = False  # it was replaced, and starts when all of the old one have ended
        self._next_rid = 1

    def run(self) -> None:
        self._begin()
        self._run_events()
        for frontend in self.frontends:
            frontend.check_complete()
        self._end()
        for clients in self._ended:
            clients.check_read()
        self._supervision.run_until(self.now)
        self._supervision.end_in_order()
        self.statistics.update(self._supervision.verdicts.rules)

    # ---- Time

    def at(self, when: float, action: Callable[[], None], link: Link | None = None) -> None:
        """Do it then, if the link is not cut before."""
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, link, action))

    def _run_events(self) -> None:
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, link, action = pop(events)
            if link is None or self.now <= link.cut_at:
                action()
        self.statistics["events"] += self._num_events
        self._num_events = 0

    def _wake(self) -> None:
        if self.now > PATIENCE_S:
            raise AssertionError(f"after {self.now:.0f} virtual seconds there are still {self._live()}")
        self._look_after_processes()
        self.server.wake()
        if (
            self._events
            or self._supervision.cause
            or (self.server.has_more_to_do and any(frontend.live for frontend in self.frontends))
        ):
            self.at(self.now + WAKE_S, self._wake)

    @property
    def resources(self) -> list[Resource]:
        """All that requests may need."""
        return self._traffic.resources

    def _hello(self, frontend: LedgerFrontend) -> list[FromFrontend]:
        pins = [self.pins] if self.pins.version else []
        return [FrontendHello(frontend.number, PROTOCOL, frontend.process), *pins]

    def _live(self) -> list[str]:
        return [choice.name for frontend in self.frontends for choice in frontend.live_choices()]

    def _begin(self) -> None:
        s, when = self.settings, 0.0
        self.server.start()
        for frontend in self.frontends:
            self._say(frontend, self._hello(frontend))
        times = []
        for index in range(s.num_requests):
            if index % 7 == 0 or self.rng.random() < 0.5:  # the others come together with the one before
                when += self.rng.expovariate(1.0) * s.arrival_gap * 2
            times.append(when)
            self.at(when, self._arrive)
        end = times[-1] + s.step_time * (s.longest_answer + 20)
        disturbances = (
            (self.die, s.num_deaths),
            (self._return, s.num_returns),
            (self._ask_something, s.num_questions),
            (self._slow_down, s.num_slow_steps),
        )
        if s.drains:
            self.at(end * self.rng.random(), self.drain)
        self._callers.begin(end)
        for action, count in disturbances:
            for _ in range(count):
                self.at(self.rng.random() * end, action)
        self.at(WAKE_S, self._wake)

    def _end(self) -> None:
        """Everything is over: all memory must be free, and every book must say so."""
        assert self.server.is_drained, "something is left to do, or to be said"
        self.server.control.lies = False
        state = self._ask(lambda call: GetState(call, deep=True))
        assert state.ok, state.message
        assert self._ask(FlushCache).ok
        after = self._ask(lambda call: GetState(call, deep=False)).values
        wanted = {"num_free_pages": self.settings.num_pages, "num_free_slots": self.settings.num_slots}
        wanted |= {"num_waiting_for_resources": 0, "num_waiting": 0, "num_pinned": 0, "num_in_flight": 0}
        wanted |= {f"live_requests_of_frontend_{frontend.number}": 0 for frontend in self.frontends}
        self.statistics["rule: nothing is left at the end"] += 1
        for name, value in wanted.items():
            assert after[name] == value, f"at the end {name} is {after[name]} instead of {value}"
        core = self.server._scheduler._core
        for pages in core.memory.windows if core is not None else ():
            assert (pages.num_available, pages.num_evictable) == (pages.num_pages, 0), "a window keeps pages at the end"
        self.server.count()

    def _ask(self, make: Callable[[int], FromFrontend]) -> ControlReply:
        self._say(self.frontends[0], [self.frontends[0].call(make)])
        self._run_events()
        reply = self.frontends[0].last_reply
        assert reply is not None
        return reply

    # ---- Frontends

    def _say(self, frontend: LedgerFrontend, messages: Sequence[FromFrontend]) -> None:
        """To the server that this frontend is connected to; in vain if that has died."""
        link, server = self._links[frontend.number], self._server_of[frontend.number]
        for message in messages:
            mean = self.settings.ack_delay if isinstance(message, AckBatch) else self.settings.delay
            when = link.next_arrival(self.now, self.rng.random() * 2 * mean)
            self.at(when, partial(server.hear, frontend, message), link)

    def send(self, frontend: LedgerFrontend, messages: Sequence[FromFrontend | Hostile], delay: float) -> None:
        """Likewise, for whoever draws for itself how long that takes."""
        link, server = self._links[frontend.number], self._server_of[frontend.number]
        for message in messages:
            self.at(link.next_arrival(self.now, delay), partial(server.hear, frontend, message), link)

    def deliver(self, frontend: LedgerFrontend, message: ToFrontend) -> None:
        """A frontend that has died hears nothing."""
        if self.frontends[frontend.number] is frontend:
            self._say(frontend, frontend.receive(message))

    def waits_to_acknowledge(self, frontend: LedgerFrontend) -> bool:
        """It may first see what else comes."""
        if self.rng.random() < 0.7:
            return False
        self.at(self.now + 2 * self.settings.ack_delay * self.rng.random(), partial(self._acknowledge, frontend))
        return True

    def _acknowledge(self, frontend: LedgerFrontend) -> None:
        if self.frontends[frontend.number] is frontend:
            self._say(frontend, frontend.acknowledge())

    def _arrive(self) -> None:
        frontend = self.rng.choice(self.frontends)
        rid = self.new_rid()
        choices = self._traffic.next_request(rid)
        self.enter(rid, choices)
        self._say(frontend, frontend.add(choices))
        if self.rng.random() < self.settings.abort_share:
            self._plan_abort(frontend, choices)

    def new_rid(self) -> int:
        self._next_rid += 1
        return self._next_rid - 1

    def enter(self, rid: int, choices: list[Choice]) -> None:
        """Of a request that a frontend is about to send."""
        self.by_rid[rid] = choices
        namesakes = self._by_label.setdefault(choices[0].request.label, [])
        namesakes += choices
        for choice in namesakes if len(namesakes) > len(choices) else ():
            choice.has_namesake = True
        self.by_seed.update((choice.seed, choice) for choice in choices)

    def note_reply(self, frontend: LedgerFrontend, asked: FromFrontend, reply: ControlReply) -> None:
        self._callers.note_reply(frontend, asked, reply)

    def note_conviction(self, frontend: LedgerFrontend, convicted: GenerateRequest) -> None:
        self._callers.note_conviction(frontend, convicted)

    def note_trial(self, server: Server) -> None:
        self._callers.note_trial(server)

    def _plan_abort(self, frontend: LedgerFrontend, choices: list[Choice]) -> None:
        chosen = self.rng.choice(choices)
        if self.rng.random() < 0.6:
            chosen.leave_at = self.rng.randrange(max(len(chosen.answer.ids), 1))
            return
        mean = self.rng.choice((0.0, self.settings.delay, self.settings.step_time * len(chosen.answer.ids)))
        action = partial(self.abort, frontend, chosen.request.rid, self.rng.choice((-1, chosen.choice)))
        self.at(self.now + 2 * mean * self.rng.random(), action)

    def abort(self, frontend: LedgerFrontend, rid: int, choice: int) -> None:
        if self.frontends[frontend.number] is frontend:
            self._say(frontend, frontend.abort(rid, choice))

    def _ask_something(self) -> None:
        frontend = self.rng.choice(self.frontends)
        kind = self.rng.choice(("deep", "deep", "state", "flush", "label", "label", "all", "pause"))
        if kind in ("deep", "state"):
            self._say(frontend, [frontend.call(lambda call: GetState(call, deep=kind == "deep"))])
        elif kind == "flush":
            self._flush(frontend.number)
        elif kind == "pause":
            self._pause(frontend)
        else:
            owner = self.rng.choice(self.frontends)
            live = (
                [choice for f in self.frontends for choice in f.live_choices()]
                if kind == "all"
                else owner.live_choices()
            )
            if live and (kind == "label" or self.rng.random() < 0.1):
                label = "" if kind == "all" else self.rng.choice(live).request.label
                self._say(frontend, [frontend.call(lambda call: AbortLabel(call, label))])

    def _pause(self, frontend: LedgerFrontend) -> None:
        self.statistics["pauses"] += 1
        mode = self.rng.choice(("retract", "retract", "in_place", "in_place", "abort"))
        self._say(frontend, [frontend.call(lambda call: PauseGeneration(call, mode))])
        if mode == "retract":
            self.at(self.now + 0.1, partial(self._flush, frontend.number))
        self.at(self.now + self.rng.random(), partial(self._continue, frontend.number))

    def _flush(self, number: int) -> None:
        self._say(self.frontends[number], [self.frontends[number].call(FlushCache)])

    def _continue(self, number: int) -> None:
        self._say(self.frontends[number], [self.frontends[number].call(ContinueGeneration)])

    def drain(self) -> None:
        """SIGTERM: whoever comes from now on is refused."""
        self.is_draining = True
        self.server.drain()

    # ---- Deaths

    def _return(self) -> None:
        """A frontend dies and comes again: nothing of the old one may reach the new one."""
        self.statistics["frontend deaths"] += 1
        number = self.rng.randrange(len(self.frontends))
        self._callers.note_leaving(self.frontends[number])
        self.at(self.now + 0.02 * self.calls_rng.random(), partial(self._replace_frontend, number))

    def _replace_frontend(self, number: int) -> None:
        self._supervision.run_until(self.now)
        if self._supervision.cause is None:
            self._supervision.break_frontend(number)
        old = self.frontends[number]
        if self.rng.random() < 0.8:
            self._say(old, [old.call(lambda call: PauseGeneration(call, "in_place"))])  # and it will not end it
        new = self.frontends[number] = LedgerFrontend(number, self)
        if self.rng.random() < 0.5:  # the scheduler's process finds that it is gone before it comes again
            self._links[number].cut_at = self.now
            self._server_of[number].lose(old)
        else:  # and its last messages arrive
            self._links[number].cut_at = self.now + self.settings.delay
        self._links[number] = self._links[number].next()
        self._server_of[number] = self.server
        self._say(new, self._hello(new))
        old.clients.end_process()
        self._ended.append(old.clients)
        self.at(self.now + self.rng.random(), self._arrive)  # those who lost their answer ask again

    def die_of_request(self, server: Server) -> None:
        """Its workers do, if it is not dying already."""
        if server is self.server and server.is_alive and not self._is_hanging:
            self.statistics["deaths of poison"] += 1
            self._is_of_request = True
            if self._supervision.cause is None:
                self.die()
            else:
                self._replace_server()

    def die(self) -> None:
        """The scheduler or a worker dies, or hangs. Of what it had sent, each frontend still hears a part; then all begin anew."""
        self._supervision.run_until(self.now)
        if self._supervision.cause is not None:
            self.at(self.now + 1.0, self.die)  # one trouble at a time
            return
        self.statistics["deaths"] += 1
        cause = self._supervision.break_worker_or_scheduler()
        self.statistics[f"{cause.kind} {cause.culprit.role}s"] += 1
        self._is_hanging = cause.culprit.role == "worker" and cause.kind in ("silent", "stuck", "unlinked")
        if self._is_hanging:
            self.server.mute()
        else:
            self._replace_server()

    def _look_after_processes(self) -> None:
        self._supervision.run_until(self.now)
        if not self._supervision.is_finished:
            return
        self.statistics.update(self._supervision.verdicts.rules)
        if self._is_hanging:
            self._replace_server()
        if self._is_new:
            self.server.start()
        self._is_hanging = self._is_new = False
        self._supervision = self._supervise()

    def _supervise(self) -> Supervision:
        return Supervision(self.settings, self._trouble, self.now, lambda now: self.server.progress_age_s(now))

    def _slow_down(self) -> None:
        """A step takes long, though not too long."""
        self.server.slow_down(0.8 * self._supervision.stuck_s * self.rng.random())

    def _replace_server(self) -> None:
        old = self.server
        # As the supervisor thinks: what a request does can look like the host's doing, as when memory runs out.
        by_request = self._trouble.random() < (0.7 if self._is_of_request else 0.5)
        self._is_of_request = False
        if old.is_ready and self._trouble.random() < 0.8:
            old.say_last_words()
        old.die()
        new = self.server = Server(self, generation=old.generation + 1, ledger=old.control.ledger)
        self._is_new = True
        if self.is_draining:
            new.drain()
        for frontend in self.frontends:
            heard_until = self.now + self.rng.choice((0.0, self.settings.delay, 1.0)) * self.rng.random()
            old.cut(frontend.number, heard_until)
            self.at(heard_until, partial(self._lose, frontend, old))
            waits_s = 0.05 * self.rng.random() + self.calls_rng.choice((0.0, 0.0, 0.5)) * self.calls_rng.random()
            self.at(heard_until + waits_s, partial(self._reconnect, frontend, new, by_request))

    def _lose(self, frontend: LedgerFrontend, server: Server) -> None:
        """A frontend learns that this server is gone, unless it has gone on to the next one already."""
        if self._server_of[frontend.number] is server:
            frontend.note_lost()

    def _reconnect(self, frontend: LedgerFrontend, server: Server, by_request: bool) -> None:
        if server is not self.server or self.frontends[frontend.number] is not frontend:
            return  # another one has died meanwhile
        self._server_of[frontend.number].cut(frontend.number, self.now)
        self._links[frontend.number].cut_at = self.now
        self._links[frontend.number] = Link(self.now)
        self._server_of[frontend.number] = server
        self._say(
            frontend,
            [*self._hello(frontend), *frontend.resume(by_request=by_request)],
        )
        self._callers.call_again(frontend)
