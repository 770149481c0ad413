"""Who is admitted before whom, who loses its slot to whom, whose time is up, what is sent and what is evicted: looked at after ticks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.scheduler import LOAD_INTERVAL_S, Scheduler
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Load
from tests.scheduler.settings import Settings

MAX_PASSED = 64  # by `lpm`
MOST_STALE = 3  # looks at a load that nobody was told
CHECK_EVERY = 4  # steps: what costs more than it finds
Running = list[tuple[Request, int]]  # with the number of the admission
Slots = list[Request | None]
Leaves = dict[int, tuple[int, int]]  # prefixes that may be evicted next: hits and last use, by serial


@dataclass(frozen=True, slots=True)
class Before:
    """A replica before a tick."""

    slots: Slots
    incarnations: list[int]
    num_admitted: int
    num_preempted: int
    num_steps: int
    suspects: set[int]  # that wait for their trial, by serial
    leaves: Leaves  # not always looked at
    num_live: int

    def running(self) -> Running:
        return [(r, number) for r, number in zip(self.slots, self.incarnations, strict=True) if r is not None]


class Fairness:
    """Compares a replica before and after a tick.

    - fcfs: nobody is admitted before one who came earlier and waits. priority: likewise, where each step of priority counts as
      `aging` seconds of earlier arrival; without aging whoever is less important may starve, but only for the more important.
      lpm: the earliest is passed by at most 64.
    - Two kinds of request may be passed: those that lost their slot and have rows in flight, and those that wait for another one
      to compute their prefix.
    - Suspects come before all others, and whoever is on trial takes anybody's place.
    - Whoever loses its slot is the last in rank of all that run, or less important than one that comes.
    - Nobody is displaced but by one that is more important by the threshold.
    - Nobody waits or runs beyond its time.
    - Urgent requests come before all others, and are never displaced.
    - Nobody is turned away for want of room while a slot is free, or few wait.
    - What was computed for a request that failed is not cached, unless others made use of it.
    - A frontend is told the load not long after it has changed.
    - A frontend that has acknowledged enough is sent all that is known.
    - Of the prefixes that nobody uses, the one used longest ago (or least often) is evicted first.
    """

    def __init__(
        self, settings: Settings, statistics: Counter[str], is_ready: Callable[[Request], bool] = lambda _: True
    ) -> None:
        self.is_ready = is_ready  # the workers have what the request needs
        self._settings = settings
        self._statistics = statistics  # which counts how often each rule had something to judge
        self._earliest: Request | None = None
        self._num_passed = 0
        self._preempted_then = 0, 0
        self._started: dict[int, float] = {}  # by serial: first admission
        self._stale: dict[
            int, float
        ] = {}  # frontends that were told another load than was there at the last look, and when
        self._num_stale = 0  # looks since that

    def rank(self, request: Request) -> tuple[float, int]:
        s = self._settings
        if request.urgent:
            return -inf, request.serial
        if s.policy != "priority":
            return 0.0, request.serial
        if s.aging == inf:
            return -float(request.priority), request.serial
        return request.arrived_s - request.priority * s.aging, request.serial

    def before(self, core: SchedulerCore, *, with_tree: bool) -> Before:
        counters, planner = core.counters, core.planner
        return Before(
            planner._running.copy(),
            core.slots.incarnation.tolist(),
            planner._num_admitted,
            counters.num_preempted,
            counters.num_steps,
            {request.serial for request in planner.trials._queue},
            self._leaves(core) if with_tree else {},
            planner.num_waiting + len(planner._running) - planner._running.count(None),
        )

    def after(self, scheduler: Scheduler, core: SchedulerCore, before: Before, now: float) -> None:
        admitted: list[Request] = []
        if core.planner._num_admitted != before.num_admitted:
            admitted = [r for r in core.planner.running() if r.progress.incarnation > before.num_admitted]
        for request in admitted:
            self._started.setdefault(request.serial, now)
        tried = core.planner.trials._on_trial
        if before.suspects:
            self._statistics["rule: suspects go first"] += 1
        admitted = [request for request in admitted if request.serial not in before.suspects]
        assert not admitted or not core.planner.trials._queue, (
            f"request {admitted[0].key} was admitted before a suspect" if admitted else ""
        )
        if core.counters.num_preempted != before.num_preempted:
            victims = self._check_victims(before.running(), tried)
            # Who was alone and ran out of memory may come back at once.
            others = [request for request in admitted if request not in victims]
            if others and core.counters.num_steps == before.num_steps + 1:
                self._check_displaced(scheduler, victims, others)
        if before.leaves:
            self._check_evicted(core, before.leaves)
        if admitted and self._settings.policy == "lpm":
            self._count_passing(scheduler, core, admitted)
        elif admitted and (core.counters.num_steps % CHECK_EVERY == 0 or any(r.urgent for r in admitted)):
            self._check_admitted(scheduler, core, admitted)

    def _check_victims(self, before: Running, tried: Request | None) -> list[Request]:
        victims = []
        stayed = [
            r
            for r, n in before
            if r.progress.status is Status.RUNNING and r.progress.incarnation == n and r is not tried
        ]
        for victim, number in before:
            if victim.progress.status is Status.ENDED or (
                victim.progress.status is Status.RUNNING and victim.progress.incarnation == number
            ):
                continue
            victims.append(victim)
            self._statistics["rule: the last in rank is preempted"] += bool(stayed)
            for other in stayed:
                assert self.rank(other) < self.rank(victim) or other.priority > victim.priority, (
                    f"request {victim.key} was preempted instead of {other.key}, which is behind it"
                )

        return victims

    def _check_displaced(self, scheduler: Scheduler, victims: list[Request], admitted: list[Request]) -> None:
        """By one that is admitted, or waits for its turn."""
        everybody = [request for client in scheduler._clients.values() for request in client.all_requests()]
        coming = [r for r in everybody if r.progress.status is Status.WAITING and r not in victims]
        if any(request.urgent for request in (*admitted, *coming)):
            return
        highest = max(request.priority for request in (*admitted, *coming))
        self._statistics["rule: displaced only by the more important"] += len(victims)
        for victim in victims:
            assert highest - victim.priority >= self._settings.threshold, (
                f"request {victim.key} of priority {victim.priority} was displaced, at most by one of priority {highest}"
            )

    def may_follow(self, core: SchedulerCore, request: Request) -> bool:
        """May it be that another request computes what this one needs first? Whoever has had a token has computed its prompt."""
        if not self._settings.caches:
            return False
        size = ITEM * self._settings.page_size
        page = request.progress.id_bytes[:size]
        num_output = core.slots.num_output
        return any(
            other.salt == request.salt
            and other.prompt_len + int(num_output[other.progress.slot]) == other.progress.num_known
            and other.progress.id_bytes[:size] == page
            for other in core.planner.running()
        )

    def check_all(self, scheduler: Scheduler, core: SchedulerCore, may_be_sent: list[int], now: float) -> None:
        """What needs a look at every request."""
        s = self._settings
        for client in scheduler._clients.values():
            for request in client.all_requests():
                if request.progress.status is Status.ENDED:
                    continue
                started = self._started.get(request.serial)
                if started is None:
                    waits = (
                        s.waiting_timeout is not None and request.progress.started_s is None
                    )  # else it has a slot, and no chunk yet
                    late = waits and now > request.arrived_s + (s.waiting_timeout or 0.0)
                else:
                    late = s.running_timeout is not None and now > started + s.running_timeout
                self._statistics["rule: nobody is there beyond its time"] += (
                    s.running_timeout if started is not None else s.waiting_timeout
                ) is not None
                assert not late, f"the time of request {request.key} was up before {now:.3f} s"
                if request.progress.status is Status.WAITING and client.number in may_be_sent:
                    self._statistics["rule: what is known of the preempted is sent"] += request.progress.num_output > 0
                    assert request.delivery.sent >= request.progress.num_output, (
                        f"frontend {client.number} is not told what is known of request {request.key}, which waits"
                    )
        for request in core.planner.running():
            self._statistics["rule: no page more than a request can use"] += 1
            held = int(core.slots.num_pages[request.progress.slot])
            assert (held - 1) * s.page_size < request.max_tokens, f"request {request.key} has {held} pages"
        for node in core.memory.tree.nodes():
            self._statistics["rule: a prefix is used as often as what follows it"] += bool(node.children)
            assert all(node.parent is None or child.num_hits <= node.num_hits for child in node.children.values()), (
                "a prefix was used more often than what comes before it"
            )

    def _leaves(self, core: SchedulerCore) -> Leaves:
        is_lfu = self._settings.eviction == "lfu"
        return {
            node.serial: (node.num_hits if is_lfu else 0, node.last_used)
            for node in core.memory.tree.nodes()
            if not node.pins and not node.children and node.parent is not None
        }

    def _check_evicted(self, core: SchedulerCore, before: Leaves) -> None:
        """Of those that could be evicted before, whoever is untouched was worth as much as anyone who is gone, or more."""
        there, after = {node.serial for node in core.memory.tree.nodes()}, self._leaves(core)
        gone = [worth for serial, worth in before.items() if serial not in there]
        untouched = [worth for serial, worth in before.items() if after.get(serial) == worth]
        self._statistics["rule: the least useful prefix is evicted"] += bool(gone and untouched)
        assert not gone or not untouched or max(gone) <= min(untouched), (
            f"a prefix worth {max(gone)} was evicted (hits, last use), one worth {min(untouched)} was kept"
        )

    def first_waiting(self, scheduler: Scheduler, core: SchedulerCore) -> Request | None:
        waiting = [
            request
            for client in scheduler._clients.values()
            for request in client.all_requests()
            if request.progress.status is Status.WAITING
            and core.planner.preempted.find(request.progress.incarnation) is not request
            and self.is_ready(request)
        ]
        return min(waiting, key=self.rank, default=None)

    def _check_admitted(self, scheduler: Scheduler, core: SchedulerCore, admitted: list[Request]) -> None:
        first = self.first_waiting(scheduler, core)
        if first is None or self.may_follow(core, first):
            return
        for request in admitted:
            self._statistics["rule: admitted in order"] += 1
            self._statistics["rule: the urgent go first"] += request.urgent and request.serial > first.serial
            assert self.rank(request) < self.rank(first), (
                f"request {request.key} was admitted before {first.key}, which is before it"
            )

    def _count_passing(self, scheduler: Scheduler, core: SchedulerCore, admitted: list[Request]) -> None:
        # Such a one may come back before the earliest, when its rows in flight are answered.
        preempted = core.counters.num_preempted, len(core.planner.preempted._away)
        if (
            self._earliest is None
            or self._earliest.progress.status is not Status.WAITING
            or preempted != self._preempted_then
        ):
            first = self.first_waiting(scheduler, core)
            is_new, self._earliest, self._preempted_then = first is not self._earliest, first, preempted
            if is_new:  # these may have been admitted before the earliest was that
                self._num_passed = 0
                return
        if self._earliest is None or self.may_follow(core, self._earliest):
            return
        if any(request.serial < self._earliest.serial for request in admitted):
            self._num_passed = 0  # one that had lost its slot was the earliest for a moment
        num_passing = sum(self._earliest.serial < r.serial and not r.urgent for r in admitted)
        self._num_passed += num_passing
        self._statistics["rule: nobody is passed for ever (lpm)"] += num_passing > 0
        assert self._num_passed <= MAX_PASSED, f"request {self._earliest.key} was passed by {self._num_passed} others"

    def check_sent(self, core: SchedulerCore, frontend: int) -> None:
        """After a tick, for a frontend that may be sent something."""
        slots = core.slots
        owed = ((slots.num_output > slots.sent) & (slots.frontend == frontend) & (slots.incarnation != 0)).nonzero()[0]
        self._statistics["rule: what is known is sent"] += bool((slots.frontend == frontend).any())
        assert not len(owed), f"frontend {frontend} is not told what is known of request {slots.rid[owed[0]]}"

    def check_crowded(self, scheduler: Scheduler) -> None:
        """A request was turned away for want of room."""
        everybody = [request for client in scheduler._clients.values() for request in client.all_requests()]
        num_waiting = sum(request.progress.status is Status.WAITING for request in everybody)
        num_free = self._settings.num_slots - sum(request.progress.status is Status.RUNNING for request in everybody)
        self._statistics["rule: turned away only when too many wait"] += 1
        assert num_waiting - num_free >= self._settings.max_queued, (
            f"{num_waiting} wait for {num_free} free slots, and a request was turned away"
        )

    def check_distrusted(self, core: SchedulerCore, failed: Request) -> None:
        self._statistics["rule: what failed is not cached"] += self._settings.caches
        ids, salt = failed.bytes_with_outputs(), failed.salt.encode()
        for leaf in core.memory.tree.nodes():
            if leaf.pins or leaf.children or leaf.parent is None:
                continue
            path, node = leaf.ids, leaf
            while node.parent is not None and node.parent.parent is not None:
                node = node.parent
                path = node.ids + path
            is_of_it = ids.startswith(path) and node.key == salt + path[: len(node.key) - len(salt)]
            assert not is_of_it, f"what was computed for request {failed.key}, which failed, is cached for others"

    def check_load(self, core: SchedulerCore, told: dict[int, tuple[float, Load]], now: float) -> None:
        load = core.load()
        for number, (told_at, last) in told.items():
            self._statistics["rule: the load is told"] += now - told_at >= LOAD_INTERVAL_S
            assert last == load or now - told_at < LOAD_INTERVAL_S, (
                f"frontend {number} was last told {last}, not {load}"
            )

    def look_for_stale_load(self, core: SchedulerCore, told: dict[int, tuple[float, Load]]) -> None:
        """Now and then, also when no message comes: who was told another load than is now is told that before long."""
        load = core.load()
        stale = {number: when for number, (when, last) in told.items() if last != load}
        self._num_stale = self._num_stale + 1 if stale and stale == self._stale else 0
        self._stale = stale
        self._statistics["rule: the load is told"] += bool(stale)
        assert self._num_stale < MOST_STALE, f"frontends {[*stale]} are not told that the load is {load}"
