"""The processes of a simulated server and the real Replacer over them, in the world's virtual time. What it decides must be right.

Processes start, send heartbeats, die, fall silent, get stuck, lose their link, blame each other and end when they are told to, or
do not. The supervisor may be stopped for a while, alone or with all of them. `verdicts.py` says what must follow.
"""

from __future__ import annotations

import heapq
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from srt.managers.process.child_process import ChildKey
from srt.managers.process.replica_layout import children_of
from srt.managers.process.watchdog import longest_step_s
from srt.managers.supervisor.events import (
    ChildExited,
    ChildSpoke,
    Effect,
    Event,
    Finish,
    Kill,
    LinkLost,
    Report,
    StopAsked,
    Tell,
)
from srt.managers.supervisor.replacer import Replacer
from srt.protocol.messages import Failed, Heartbeat, Progress, Ready, Stop
from tests.scheduler.settings import Settings
from tests.scheduler.verdicts import BLAME, Cause, Verdicts

BEAT_S = 1.0
LATE_S = 0.001  # that the supervisor wakes behind its time
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


@dataclass(slots=True, eq=False)
class Process:
    key: ChildKey
    is_alive: bool = True
    is_silent: bool = False  # sends no heartbeats
    stuck_since: float = inf
    beat_s: float = inf  # the last one
    is_deaf: bool = False  # does not end when it is told to


class Supervision:
    """From the start of the processes until the Replacer says that all have ended. `progress_age_s` tells what workers do."""

    def __init__(
        self, settings: Settings, rng: random.Random, now: float, progress_age_s: Callable[[float], float]
    ) -> None:
        keys = children_of(settings.num_frontends, settings.tp_size, pp_size=settings.num_stages)
        self.now = now
        self.stuck_s = longest_step_s(settings.server_args())
        self.verdicts = Verdicts(keys, self.stuck_s)
        self._rng = rng
        self._progress_age_s = progress_age_s
        self._replacer = Replacer(keys, now, self.stuck_s, most_replacements=0)
        self._processes = {key: Process(key, is_deaf=rng.random() < 0.05) for key in keys}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._tick_at = inf
        self._asleep_until = now
        self._is_all_paused = False
        self._backlog: list[Event] = []
        for process in self._processes.values():
            self._begin(process)

    @property
    def cause(self) -> Cause | None:
        """What is wrong, if anything is."""
        return self.verdicts.cause

    @property
    def is_finished(self) -> bool:
        return self.verdicts.is_finished

    def run_until(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, when)
        self.verdicts.check_time(self.now)

    def break_worker_or_scheduler(self) -> Cause:
        key = self._rng.choice([key for key in self._processes if key.role != "frontend"])
        return self._break(self._processes[key])

    def break_frontend(self, number: int) -> Cause:
        return self._break(self._processes[ChildKey("frontend", number)])

    def end_in_order(self) -> None:
        """Idle for a while, then a stop is asked for, and all that follows."""
        rng = self._rng
        if rng.random() < 0.5:
            self._nap(rng.choice((3.0, 40.0, 90.0)))
        self.run_until(self._asleep_until + rng.choice((0.0, 1.0, 45.0)))
        grace_s = rng.choice((0.0, 2.0, 25.0))
        self._ask_to_stop(grace_s)
        if rng.random() < 0.2:
            self._at(self.now + rng.random() * 2 * grace_s, partial(self._ask_to_stop, grace_s))
        if rng.random() < 0.7:  # one dies meanwhile
            victim = rng.choice(list(self._processes.values()))
            self._at(self.now + rng.random() * 2, partial(self._die_in_a_stop, victim))
        while not self.is_finished:
            assert self._events, f"nothing happens any more, and the server has not ended: {self._replacer.state}"
            self.run_until(self._events[0][0])

    def _die_in_a_stop(self, process: Process) -> None:
        if process.is_alive:
            self.verdicts.note_death_in_a_stop(process.key, self.now)
            self._exit(process, -signal.SIGKILL)

    # ---- Processes

    def _begin(self, process: Process) -> None:
        ready_at = self.now + self._rng.random() * 0.3
        self._at(self.now, partial(self._say, process, Progress("imports", 0, 0, self.now)))
        self._at(self.now + (ready_at - self.now) * self._rng.random(), partial(self._beat, process))
        self._at(ready_at, partial(self._say, process, Ready({})))

    def _say(self, process: Process, message: Report) -> None:
        if process.is_alive:
            if isinstance(message, Ready):
                self.verdicts.ready.add(process.key)
            self._hear(ChildSpoke(process.key, message))

    def _beat(self, process: Process) -> None:
        if not process.is_alive or process.is_silent or self.is_finished:
            return
        if not self._is_all_paused:
            process.beat_s = self.now
            age_s = max(0.0, self.now - process.stuck_since)
            if process.key.role == "worker" and self.cause is None:
                age_s = self._progress_age_s(self.now)
            self._say(process, Heartbeat(age_s))
        self._at(self.now + BEAT_S, partial(self._beat, process))

    def _exit(self, process: Process, code: int) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        self.verdicts.note_exit(process.key)
        if self._rng.random() < 0.5:
            self._hear(LinkLost(process.key, None))
        self._hear(ChildExited(process.key, code))

    def _exit_later(self, process: Process, code: int, within_s: float) -> None:
        self._at(self.now + self._rng.random() * within_s, partial(self._exit, process, code))

    def _break(self, process: Process) -> Cause:
        """One of the ways in which a process goes wrong, and sometimes another that goes wrong because of it."""
        rng = self._rng
        kinds = ["killed", "ended", "failed", "blamed", "unlinked", "gibberish"]
        if self.verdicts.is_ready:
            kinds += ["silent", "stuck", "silent", "stuck"]
        kind, number = rng.choice(kinds), rng.choice(SIGNALS)
        cause = self.verdicts.expect(kind, process.key, self.now, process.beat_s, number)
        others = [other for other in self._processes.values() if other is not process]
        if kind == "killed":
            self._exit(process, -number)
        elif kind == "ended":
            self._exit(process, 3)
        elif kind == "failed":
            self._say(process, Failed(cause.words))
            if rng.random() < 0.8:  # else it hangs as it ends
                self._exit_later(process, 1, 0.2)
        elif kind == "blamed":
            process.is_deaf = True
            self._blame(rng.choice(others))
            self._exit_later(process, -number, 0.25)
        elif kind == "unlinked":
            self._hear(LinkLost(process.key, None))
        elif kind == "gibberish":
            self._hear(LinkLost(process.key, "not MessagePack"))
        elif kind == "silent":
            process.is_silent = True
        else:
            process.stuck_since = self.now
        if kind in ("killed", "ended", "failed", "gibberish") and rng.random() < 0.5:
            self._at(self.now + rng.random() * 0.2, partial(self._blame, rng.choice(others)))
        return cause

    def _blame(self, process: Process) -> None:
        """It cannot go on without the one that is gone."""
        if process.is_alive:
            self._say(process, Failed(BLAME))
            self._exit(process, 1)

    # ---- The supervisor

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def _hear(self, event: Event) -> None:
        if self.now < self._asleep_until:
            self._backlog.append(event)
        else:
            self._apply(self._replacer.handle(event, self.now))

    def _ask_to_stop(self, grace_s: float) -> None:
        if not self.is_finished:
            self.verdicts.note_stop_asked(self.now, grace_s)
            self._hear(StopAsked(grace_s))

    def _nap(self, duration_s: float) -> None:
        """It is stopped from outside, alone or with all others; what was said meanwhile it hears when it wakes."""
        self._asleep_until = self.now + duration_s
        self._is_all_paused = self._rng.random() < 0.5
        self._at(self._asleep_until, self._wake)

    def _wake(self) -> None:
        self._is_all_paused = False
        self._replacer.excuse(self.now)
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self._hear(event)
        self._tick()

    def _tick(self) -> None:
        if self.now >= self._asleep_until:
            self._tick_at = inf
            self._apply(self._replacer.tick(self.now))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.verdicts.check(effect, self.now)
            match effect:
                case Tell(child, Stop(grace_s, _)):
                    if not self._processes[child].is_deaf:
                        self._exit_later(self._processes[child], 0, min(grace_s, 2.0))
                case Kill(child):
                    self._exit_later(self._processes[child], -signal.SIGKILL, 0.05)
                case Finish():
                    self._events.clear()
                    return
                case _:
                    pass
        due = self._replacer.next_tick_s()
        if due is not None and due + LATE_S < self._tick_at:
            self._tick_at = max(due + LATE_S, self.now)
            self._at(self._tick_at, self._tick)
