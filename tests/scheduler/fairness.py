"""Who is admitted before whom, who loses its slot to whom, and whether what is known is sent: looked at after each tick."""

from __future__ import annotations

from math import inf

import numpy as np

from srt.managers.replica import Replica
from srt.managers.request import Request, Status
from srt.managers.scheduler_state import Scheduler
from tests.scheduler.settings import Settings

MAX_PASSED = 64  # by `lpm`
Running = list[tuple[Request, int]]  # with the number of the admission


class Fairness:
    """Compares a replica before and after a tick.

    - fcfs: nobody is admitted before one who came earlier and waits. priority: likewise, where each step of priority counts as
      `aging` seconds of earlier arrival; without aging whoever is less important may starve, but only for the more important.
      lpm: the earliest is passed by at most 64.
    - Two kinds of request may be passed: those that lost their slot and have rows in flight, and those that wait for another one
      to compute their prefix.
    - Whoever loses its slot is the last in rank of all that run, or less important than one that comes.
    - A frontend that has acknowledged enough is sent all that is known.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._earliest: Request | None = None
        self._num_passed = 0

    def rank(self, request: Request) -> tuple[float, int]:
        s = self._settings
        if s.policy != "priority":
            return 0.0, request.serial
        if s.aging == inf:
            return -float(request.priority), request.serial
        return request.arrived_s - request.priority * s.aging, request.serial

    def before(self, replica: Replica) -> tuple[Running, int, int]:
        incarnations = replica.slots.incarnation.tolist()
        running = [(request, incarnations[request.slot]) for request in replica.planner.running()]
        return running, replica.counters.num_preempted, replica.counters.num_held_back

    def after(self, scheduler: Scheduler, replica: Replica, before: tuple[Running, int, int]) -> None:
        running, num_preempted, num_held_back = before
        if replica.counters.num_preempted != num_preempted:
            self._check_victims(running)
        known = {number for _, number in running}
        admitted = [request for request in replica.planner.running() if request.incarnation not in known]
        if admitted and replica.counters.num_held_back == num_held_back:
            self._check_admitted(scheduler, replica, admitted)
        elif admitted:
            self._earliest = None

    def _check_victims(self, before: Running) -> None:
        stayed = [r for r, number in before if r.status is Status.RUNNING and r.incarnation == number]
        for victim, number in before:
            if victim.status is Status.ENDED or (victim.status is Status.RUNNING and victim.incarnation == number):
                continue
            for other in stayed:
                assert self.rank(other) < self.rank(victim) or other.priority > victim.priority, (
                    f"request {victim.key} was preempted instead of {other.key}, which is behind it"
                )

    def _check_admitted(self, scheduler: Scheduler, replica: Replica, admitted: list[Request]) -> None:
        waiting = [
            request
            for client in scheduler._clients.values()
            for request in client.all_requests()
            if request.status is Status.WAITING and replica.planner.preempted.find(request.incarnation) is not request
        ]
        if not waiting:
            return
        first = min(waiting, key=self.rank)
        passing = [request for request in admitted if self.rank(first) < self.rank(request)]
        if self._settings.policy != "lpm":
            assert not passing, f"request {passing[0].key} was admitted before {first.key}, which is before it"
            return
        if first is not self._earliest:
            self._earliest, self._num_passed = first, 0
        self._num_passed += len(passing)
        assert self._num_passed <= MAX_PASSED, f"request {first.key} was passed by {self._num_passed} others"

    def check_sent(self, replica: Replica, frontend: int) -> None:
        """After a tick, for a frontend that may be sent something."""
        slots = replica.slots
        owed = np.flatnonzero((slots.num_output > slots.sent) & (slots.frontend == frontend) & (slots.incarnation != 0))
        assert not len(owed), f"frontend {frontend} is not told what is known of request {slots.rid[owed[0]]}"
