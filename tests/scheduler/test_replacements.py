"""The real Replacer over a server whose processes go wrong again and again: told in virtual time, a story for each seed.

Whatever goes wrong, and when: only the group of the culprit ends (a frontend; or the scheduler and all workers), nothing of it is left
when others are started, the reason is one that there was, who is told of it is told once, and whoever is well is left alone. In the end
all are there and ready, unless more had to be replaced than may be.
"""

from __future__ import annotations

import heapq
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from srt.managers.process.child_process import ChildKey
from srt.managers.process.replica_layout import children_of
from srt.managers.supervisor.events import (
    BecameReady,
    ChildExited,
    ChildSpoke,
    Effect,
    Event,
    Finish,
    HostBack,
    HostLost,
    Kill,
    LinkLost,
    Report,
    ServesAgain,
    Start,
    StopAsked,
    Tell,
    TellRuntime,
)
from srt.managers.supervisor.replacer import CALM_S, ENDING_S, SETTLE_S, SILENT_S, Replacer
from srt.protocol.messages import EngineLost, EngineReplaced, Failed, Heartbeat, Ready, ServerReady, Stop

NUM_STORIES = 1500
KINDS = ("killed", "crashed", "ended", "failed", "unlinked", "gibberish", "silent", "stuck")
OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
STUCK_S = 60.0
BEAT_S = 1.0
HOST_GONE = "Host 1 is gone."
AT_REST_S = 3 * (SILENT_S + STUCK_S + ENDING_S)


@dataclass(eq=False, slots=True)
class Process:
    key: ChildKey
    number: int  # all that were ever started are numbered
    generation: int
    engines: list[int]  # the generations of the engines at its start, by replica
    is_alive: bool = True
    is_ready: bool = False
    is_silent: bool = False
    stuck_since_s: float = float("inf")
    is_deaf: bool = False
    greetings: int = 0
    told: list[int] = field(default_factory=list)  # generations


class Story:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.most = rng.choice((0, 1, 3, 10))
        self.num_replicas = rng.choice((1, 1, 2))
        ranks = rng.choice((1, 2, 4)) // self.num_replicas or 1
        keys = children_of(rng.choice((1, 2, 3)), ranks, self.num_replicas)
        # Processes on another host: a replica, or half of the only one's workers.
        half = [
            key for key in keys if (key.replica == 1 if self.num_replicas > 1 else key.role == "worker" and key.index)
        ]
        self._elsewhere = tuple(half) if rng.random() < 0.4 else ()
        # Two replicas without such a host may be attention groups, which end and start together.
        self._shares_experts = self.num_replicas > 1 and not self._elsewhere and rng.random() < 0.5
        self._is_host_away = self._is_without_replica = False
        self.now = 0.0
        self._replacer = Replacer(keys, 0.0, STUCK_S, self.most, shares_experts=self._shares_experts)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_started = 0
        self._processes: dict[ChildKey, Process] = {}
        self._words: dict[tuple[ChildKey, ...], list[str]] = {}  # what is wrong with a group, in the words of a reason
        self._outside: dict[tuple[ChildKey, ...], bool] = {}  # whether one was killed by somebody else
        self._starts_s: dict[tuple[ChildKey, ...], list[float]] = {}
        self._started_with: dict[tuple[ChildKey, ...], int] = {}
        self._is_stopping = False
        self.is_ready = False
        self.end: Finish | None = None
        self.statistics: Counter[str] = Counter()
        for key in keys:
            self._start(key, 1 + key.replica)

    # ---- What happens

    def tell(self) -> None:
        rng = self.rng
        self._run_until(2.0)
        for _ in range(rng.randint(0, 8)):
            if self._elsewhere and rng.random() < 0.3:
                self._lose_host()
            else:
                self._break(rng.choice([p for p in self._processes.values() if p.is_alive] or [None]))
            self._run_until(self.now + rng.choice((0.0, 0.1, 0.5, 2.0, 20.0, 2 * CALM_S)) * rng.random())
        if rng.random() < 0.7:
            self._run_until(self.now + AT_REST_S)
            self._check_at_rest()
        if self._elsewhere and rng.random() < 0.2:
            self._at(self.now + rng.random(), self._lose_host)
        if self.end is None:
            self._is_stopping = True
            self._hear(StopAsked(rng.choice((0.0, 5.0))))
        self._run_until(self.now + AT_REST_S)
        assert self.end is not None, "it never ends"
        self.statistics["failed" if self.end.exit_code else "ended in order"] += 1

    def _check_at_rest(self) -> None:
        if self.end is not None:
            return
        for process in self._processes.values():
            assert process.is_alive and process.is_ready, f"{process.key} is not there"
            assert process.greetings == 1, f"{process.key} was told {process.greetings} times that the server is ready"
            if process.key.role == "frontend":
                self._check_told(process)
            else:
                assert process.generation == self._replacer.generations[process.key.replica]
        assert not any(self._words.values()), "something is wrong, and nothing follows"
        self.statistics["at rest again"] += bool(self._starts_s)

    def _check_told(self, frontend: Process) -> None:
        """It was told of each engine that began since its own start, once and in order."""
        for replica, latest in enumerate(self._replacer.generations):
            told = [generation for generation in frontend.told if (generation - 1) % self.num_replicas == replica]
            first = frontend.engines[replica]
            newer = list(range(first + self.num_replicas, latest + 1, self.num_replicas))
            assert told == newer, f"{frontend.key} was told of {told}, not of {newer}"

    def _break(self, process: Process | None) -> None:
        if process is None or self.end is not None:
            return
        rng, name = self.rng, str(process.key).capitalize()
        kind = rng.choice(KINDS if process.is_ready else KINDS[:6])
        self.statistics[f"{kind} {process.key.role}"] += 1
        if kind in ("killed", "crashed"):
            number = rng.choice(OUTSIDE) if kind == "killed" else signal.SIGSEGV
            self._wrong(process, f"{name} was killed by {number.name}", is_outside=kind == "killed")
            self._exit(process, -number)
        elif kind == "ended":
            self._wrong(process, f"{name} ended")
            self._exit(process, rng.choice((0, 3)))
        elif kind == "failed":
            self._wrong(process, "No memory is left.")
            self._say(process, Failed("No memory is left."))
            self._at(self.now + 0.2 * rng.random(), partial(self._exit, process, 1))
        elif kind in ("unlinked", "gibberish"):
            what = "closed its link" if kind == "unlinked" else "sent what cannot be read"
            self._wrong(process, f"{name} {what}")
            self._hear(LinkLost(process.key, None if kind == "unlinked" else "nonsense"))
        elif kind == "silent":
            self._wrong(process, f"{name} has given no sign of life")
            process.is_silent = True
        else:
            self._wrong(process, f"{name} has made no progress")
            process.stuck_since_s = self.now

    def _lose_host(self) -> None:
        """All processes of the other host are gone at once, and nobody says how they ended. It comes back some time later."""
        if self._is_host_away or self.end is not None:
            return
        rng, self._is_host_away = self.rng, True
        self.statistics["host lost"] += 1
        groups = {self._group_of(key) for key in self._elsewhere}
        for group in groups:
            self._words.setdefault(group, []).append(HOST_GONE)
            self._outside[group] = True
        for key in self._elsewhere:
            self._processes[key].is_alive = False
        self._is_without_replica |= len(groups) == self.num_replicas
        self._at(self.now + rng.choice((0.1, 1.0, 20.0, SILENT_S)) * rng.random(), self._bring_host_back)
        self._hear(HostLost(self._elsewhere, HOST_GONE))

    def _bring_host_back(self) -> None:
        self._is_host_away = False
        self._hear(HostBack(self._elsewhere))

    def _wrong(self, process: Process, words: str, *, is_outside: bool = False) -> None:
        group = self._group_of(process.key)
        self._words.setdefault(group, []).append(words)
        self._outside[group] = self._outside.get(group, False) or is_outside

    def _group_of(self, key: ChildKey) -> tuple[ChildKey, ...]:
        if key.role == "frontend":
            return (key,)
        parts = (other for other in self._processes if other.role != "frontend")
        return tuple(other for other in parts if self._shares_experts or other.replica == key.replica)

    # ---- Processes

    def _start(self, key: ChildKey, generation: int) -> None:
        self._num_started += 1
        is_deaf = self.rng.random() < 0.1
        engines = self._replacer.generations
        process = self._processes[key] = Process(key, self._num_started, generation, engines, is_deaf=is_deaf)
        self._at(self.now + self.rng.random(), partial(self._get_ready, process))

    def _get_ready(self, process: Process) -> None:
        if process.is_alive:
            self._beat(process)  # from its first one on silence counts
            process.is_ready = True
            self._say(process, Ready({}))

    def _beat(self, process: Process) -> None:
        if process.is_alive and not process.is_silent:
            self._say(process, Heartbeat(max(0.0, self.now - process.stuck_since_s)))
            self._at(self.now + BEAT_S, partial(self._beat, process))

    def _say(self, process: Process, message: Report) -> None:
        if process.is_alive:
            self._hear(ChildSpoke(process.key, message))

    def _exit(self, process: Process, code: int) -> None:
        if process.is_alive:
            process.is_alive = False
            if self.rng.random() < 0.5:
                self._hear(LinkLost(process.key, None))
            self._hear(ChildExited(process.key, code))

    # ---- The Replacer

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def _run_until(self, end_s: float) -> None:
        while self.end is None:
            tick_s = self._replacer.next_tick_s()
            tick_s = float("inf") if tick_s is None else max(tick_s, self.now) + 1e-3
            next_s = min(tick_s, self._events[0][0] if self._events else float("inf"))
            if next_s > end_s:
                break
            self.now = next_s
            if next_s == tick_s:
                self._apply(self._replacer.tick(self.now))
            else:
                heapq.heappop(self._events)[2]()
        self.now = end_s

    def _hear(self, event: Event) -> None:
        if self.end is None:
            self._apply(self._replacer.handle(event, self.now))

    def _apply(self, effects: list[Effect]) -> None:
        said: list[EngineReplaced | EngineLost] = []
        for effect in effects:
            match effect:
                case Tell(child, message):
                    self._take(self._processes[child], message)
                    said += [message] if isinstance(message, EngineReplaced | EngineLost) else []
                case TellRuntime(message):
                    said.append(message)
                case Kill(child):
                    process = self._processes[child]
                    self._check_may_end(process)
                    self._at(self.now + 0.05 * self.rng.random(), partial(self._exit, process, -signal.SIGKILL))
                case Start():
                    self._check_start(effect)
                    for child in effect.children:
                        self._start(child, effect.generation)
                case ServesAgain(children, after_s):
                    assert all(self._processes[child].is_ready for child in children)
                    assert after_s > 0
                    self.statistics["serves again"] += 1
                case BecameReady():
                    self.is_ready = True
                case Finish():
                    self._check_finish(effect)
                    self.end = effect
                case _:
                    pass
        for kind in (EngineReplaced, EngineLost):
            of_kind = {(message.replica, message.by_request) for message in said if isinstance(message, kind)}
            assert len(of_kind) <= self.num_replicas, f"one is told otherwise than others: {of_kind}"

    def _take(self, process: Process, message: ServerReady | EngineReplaced | EngineLost | Stop) -> None:
        match message:
            case ServerReady():
                assert process.is_ready
                process.greetings += 1
            case EngineReplaced(generation):
                assert process.key.role == "frontend"
                process.told.append(generation)
            case EngineLost(replica, by_request, is_final):
                self._check_lost(process, replica, by_request=by_request, is_final=is_final)
            case Stop(grace_s):
                self._check_may_end(process)
                if not process.is_deaf:
                    self._at(self.now + min(grace_s, 0.2) * self.rng.random(), partial(self._exit, process, 0))

    def _check_lost(self, process: Process, replica: int, *, by_request: bool, is_final: bool) -> None:
        """A replica is lost for a reason that there is, and others are left."""
        assert process.key.role == "frontend" and self.num_replicas > 1
        assert is_final or not self._shares_experts, "no other group is left that could go on"
        assert is_final == self._is_stopping
        group = next(self._group_of(key) for key in self._processes if key.role == "worker" and key.replica == replica)
        assert self._words.get(group) or self._is_stopping, f"replica {replica} is called lost, and is well"
        if not is_final:
            assert by_request or self._outside[group], "nobody from outside has killed one of it"
        self.statistics["lost while others serve"] += 1

    def _check_may_end(self, process: Process) -> None:
        assert process.is_alive, f"{process.key} is to end, which has ended"
        is_lost = bool(self._words.get(self._group_of(process.key))) or self._is_without_replica
        assert is_lost or self._is_stopping or self._is_too_often(), f"{process.key} is to end, and is well"

    def _is_too_often(self) -> bool:
        """A group is lost that was replaced as often as may be."""
        return any(
            sum(self.now - start_s < CALM_S + SETTLE_S + ENDING_S for start_s in self._starts_s.get(group, ()))
            >= self.most
            for group, words in self._words.items()
            if words
        )

    def _check_start(self, start: Start) -> None:
        group = self._group_of(start.children[0])
        assert self.is_ready and not self._is_stopping and not self._is_without_replica
        assert not self._is_host_away or set(start.children).isdisjoint(self._elsewhere), "its host is away"
        members = tuple(key for key in group if key.replica == start.children[0].replica)
        assert start.children == members, f"{start.children} are started, and {members} belong together"
        started = self._started_with.pop(group, 0)  # processes of the group that were started at this moment
        assert sum(self._processes[key].is_alive for key in group) == started, "something is left of what is replaced"
        words = self._words.get(group, [])
        assert any(start.reason.startswith(one) for one in words), f"{start.reason!r} is said of {words}"
        is_engine = group[0].role != "frontend"
        before = max(self._processes[key].generation for key in members)
        assert start.generation == before + self.num_replicas or not is_engine
        if started + len(members) < len(group):
            self._started_with[group] = started + len(members)
            return
        self._words.pop(group)
        starts_s = self._starts_s.setdefault(group, [])
        assert sum(self.now - start_s < CALM_S - 10.0 for start_s in starts_s) < self.most, "that is too often"
        starts_s.append(self.now)
        self.statistics["groups started together"] += self._shares_experts and is_engine
        self._outside.pop(group, None)

    def _check_finish(self, finish: Finish) -> None:
        assert not any(process.is_alive for process in self._processes.values()), "it is over, and one lives"
        if finish.exit_code:
            assert self._is_too_often() or not self.is_ready or self._is_stopping or self._is_without_replica
            words = [one for words in self._words.values() for one in words]
            assert any((finish.reason or "").startswith(one) for one in words), f"{finish.reason!r} is said of {words}"
        else:
            assert self._is_stopping


def tell_all() -> Counter[str]:
    """All stories, and what was in them. AssertionError for the first that is wrong."""
    statistics: Counter[str] = Counter()
    for seed in range(NUM_STORIES):
        story = Story(seed)
        try:
            story.tell()
        except AssertionError as error:
            raise AssertionError(f"story {seed} at {story.now:.3f} s: {error}") from error
        statistics += story.statistics
    return statistics


@pytest.mark.full
def test_whatever_goes_wrong_again_and_again_only_what_must_be_is_replaced() -> None:
    statistics = tell_all()
    roles = ("frontend", "scheduler", "worker")
    expected = {
        "failed",
        "ended in order",
        "at rest again",
        "serves again",
        "lost while others serve",
        "host lost",
        "groups started together",
        *(f"{k} {r}" for k in KINDS for r in roles),
    }
    assert statistics.keys() == expected
    assert min(statistics.values()) >= 50, statistics
