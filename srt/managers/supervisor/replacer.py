"""Which processes live, and what follows when one speaks, falls silent or ends. Decides only: it does no I/O and reads no clock.

    effects = replacer.handle(event, now_s)        now and then: effects = replacer.tick(now_s)

Before the server is ready every process is needed: the first that ends, ends the server, with the reason. Later those that cannot go
on are ended, and once nothing is left of them others are started in their place: a frontend alone, the scheduler and all workers (the
engine) together, as a new generation. What frontends had asked the old one for they ask the new one for again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import assert_never

from srt.managers.process.child_process import ChildKey
from srt.protocol.messages import EngineReplaced, Failed, FromChild, Heartbeat, Progress, Ready, ServerReady, Stop

SILENT_S = 30.0  # a process that sends heartbeats and then none for so long has stopped for good
SETTLE_S = 0.3  # one death causes others: so long we listen before we say which was first
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # no request sends these
LAST_ANSWERS_S = 1.0  # for frontends to tell their clients that the engine has ended
ENDING_S = 3.0  # for the rest to end by itself
START_S = 120.0  # and ten times as long as the server's first start, for those that are started again to get ready
CALM_S = 300.0  # what was replaced so long ago does not count any more


# ---- Events


@dataclass(frozen=True, slots=True)
class ChildSpoke:
    child: ChildKey
    message: FromChild


@dataclass(frozen=True, slots=True)
class ChildExited:
    child: ChildKey
    returncode: int  # negative: the signal that killed it


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The child closed its end, so it is about to exit, or should be; or what it wrote cannot be read, and the reason says why."""

    child: ChildKey
    reason: str | None


@dataclass(frozen=True, slots=True)
class StopAsked:
    """By a signal or by the Runtime. Asked twice, or with no grace: at once."""

    grace_s: float


Event = ChildSpoke | ChildExited | LinkLost | StopAsked


# ---- Effects


@dataclass(frozen=True, slots=True)
class Tell:
    child: ChildKey
    message: ServerReady | EngineReplaced | Stop


@dataclass(frozen=True, slots=True)
class TellRuntime:
    """If it was one that started the server."""

    message: EngineReplaced


@dataclass(frozen=True, slots=True)
class Kill:
    child: ChildKey


@dataclass(frozen=True, slots=True)
class SaveReport:
    """All processes are ready. The report of the start is complete; frontends read it once they are told."""


@dataclass(frozen=True, slots=True)
class BecameReady:
    """All processes know that the server is ready: so may the user."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start these in the place of those that have ended, of which nothing is left; `reason` is why they ended. Frontends belong to the
    engine of that generation, which may be older than they are."""

    children: tuple[ChildKey, ...]
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServesAgain:
    """These were replaced, and do their work."""

    children: tuple[ChildKey, ...]
    after_s: float  # since the first of them was known not to go on


@dataclass(frozen=True, slots=True)
class Stopping:
    """The orderly end begins; for running requests at most `grace_s` seconds remain."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """All processes have ended. `reason` is the sentence for the user, if the end was not asked for."""

    exit_code: int
    reason: str | None


Effect = Tell | TellRuntime | Kill | SaveReport | BecameReady | Start | ServesAgain | Stopping | Finish


class State(Enum):
    STARTING = auto()
    READY = auto()  # has been: since then who ends is replaced
    STOPPING = auto()  # asked for: role after role
    FAILING = auto()  # a process is gone: listen for the cause, then end the rest
    FINISHED = auto()


@dataclass(slots=True)
class _Life:
    """What is known of a living child."""

    ready: bool = False
    phase: str = ""
    last_beat_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Kill what is left of these children at this time; with a sentence, that is why they cannot go on."""

    when_s: float
    children: tuple[ChildKey, ...]
    sentence: str | None = None


@dataclass(slots=True)
class _Cause:
    """Why the server fails, or a part of it. A death by a signal is nobody's consequence, so it goes before what others say of it."""

    sentence: str
    signal: int = 0  # that somebody died of

    def hear(self, sentence: str, number: int) -> None:
        """Another reason for the same."""
        if number and not self.signal:
            self.sentence, self.signal = sentence, number


@dataclass(slots=True)
class _Group:
    """Processes that can be replaced together only. It is whole, or `lost` says why not; then it ends, is started and gets ready."""

    members: tuple[ChildKey, ...]
    is_engine: bool
    lost: _Cause | None = None  # until all of it have ended
    absent_since_s: float | None = None  # until it is whole again
    start_by_s: float | None = None  # all of it must be ready, since it was started again
    losses_s: list[float] = field(default_factory=list)  # when it was lost, in the last CALM_S


@dataclass(slots=True)
class Replacer:
    """The state of the whole server, from the moment its processes were started."""

    children: Iterable[ChildKey]
    started_s: float
    stuck_s: float  # who has made no progress for so long will not make any
    most_replacements: int  # within CALM_S
    state: State = State.STARTING
    generation: int = 1  # of the engine
    _alive: dict[ChildKey, _Life] = field(default_factory=dict)
    _last_words: dict[ChildKey, str] = field(default_factory=dict)
    _killed: set[ChildKey] = field(default_factory=set)
    _cause: _Cause | None = None
    _stages: list[tuple[str, float]] = field(default_factory=list)  # roles still to be stopped, with their grace
    _stopping_role: str = ""  # the one before them
    _deadlines: list[_Deadline] = field(default_factory=list)
    _groups: dict[ChildKey, _Group] = field(default_factory=dict)  # of each
    _startup_s: float = 0.0
    _why_now: str = ""  # a sentence behind the cause of the server's end
    _has_given_up: bool = False  # on what ran when the stop came

    def __post_init__(self) -> None:
        self._alive = {key: _Life() for key in self.children}
        engine = _Group(tuple(key for key in self._alive if key.role != "frontend"), is_engine=True)
        for key in self._alive:
            self._groups[key] = engine if key in engine.members else _Group((key,), is_engine=False)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case ChildSpoke(child, message):
                return self._heard(child, message, now_s)
            case ChildExited(child, returncode):
                return self._exited(child, returncode, now_s)
            case LinkLost(child, reason):
                return self._link_lost(child, reason, now_s)
            case StopAsked(grace_s):
                return self._stop(grace_s, now_s)
            case _:
                assert_never(event)

    def tick(self, now_s: float) -> list[Effect]:
        """What time alone brings: silence, and the end of somebody's grace."""
        effects: list[Effect] = []
        for child, life in self._needed():
            sentence = None
            if life.last_beat_s is not None and now_s - life.last_beat_s > SILENT_S:
                sentence = f"{_named(child)} has given no sign of life for {SILENT_S:.0f} s."
            elif (start_by_s := self._groups[child].start_by_s) is not None and not life.ready and now_s > start_by_s:
                sentence = f"{_named(child)} was not ready in time, after it was replaced."
            if sentence is not None:
                effects += self._cannot_go_on(child, sentence, 0, now_s)
        due = [deadline for deadline in self._deadlines if deadline.when_s <= now_s]
        self._deadlines = [deadline for deadline in self._deadlines if deadline.when_s > now_s]
        for deadline in due:
            late = [child for child in deadline.children if child in self._alive]
            if late and deadline.sentence:
                effects += self._cannot_go_on(late[0], deadline.sentence, 0, now_s)
            effects += self._kill(late)
        return effects

    def excuse(self, now_s: float) -> None:
        """The supervisor itself was stopped for a while, and its children perhaps with it: nobody's silence counts so far."""
        for life in self._alive.values():
            if life.last_beat_s is not None:
                life.last_beat_s = now_s

    def was_dying(self, child: ChildKey) -> None:
        """It was ending by itself already when it was to be killed: how it ends is its own doing. When the server ends everybody does,
        and who is killed was late or may not take any time."""
        if self.state is not State.STOPPING:
            self._killed.discard(child)

    def next_tick_s(self) -> float | None:
        """When `tick` has something to do at the latest; None when only an event can bring something."""
        times = [deadline.when_s for deadline in self._deadlines]
        times += [life.last_beat_s + SILENT_S for _, life in self._needed() if life.last_beat_s is not None]
        times += [
            group.start_by_s for child, _ in self._needed() if (group := self._groups[child]).start_by_s is not None
        ]
        return min(times, default=None)

    def _needed(self) -> list[tuple[ChildKey, _Life]]:
        """Who lives and may not fall silent."""
        if self.state not in (State.STARTING, State.READY):
            return []
        return [(child, life) for child, life in self._alive.items() if self._groups[child].lost is None]

    # ---- What children do

    def _heard(self, child: ChildKey, message: FromChild, now_s: float) -> list[Effect]:
        life = self._alive.get(child)
        if life is None:
            return []
        match message:
            case Progress():
                life.phase = message.phase
            case Heartbeat(progress_age_s):
                life.last_beat_s = now_s
                if progress_age_s > self.stuck_s and self.state is State.READY:
                    sentence = (
                        f"{_named(child)} has made no progress for {progress_age_s:.0f} s (see --watchdog-timeout)."
                    )
                    return self._cannot_go_on(child, sentence, 0, now_s)
            case Failed():
                self._last_words[child] = message.message
                if message.is_final and self.state is State.READY:
                    self._why_now = ""
                    return self._fail(message.message, 0, now_s)
                return self._cannot_go_on(child, message.message, 0, now_s)
            case Ready():
                life.ready = True
                return self._perhaps_ready(now_s) if self.state is State.STARTING else self._perhaps_whole(child, now_s)
            case _:
                assert_never(message)
        return []

    def _perhaps_ready(self, now_s: float) -> list[Effect]:
        if not all(life.ready for life in self._alive.values()):
            return []
        self.state = State.READY
        self._startup_s = now_s - self.started_s
        return [SaveReport(), *self._greet(self._alive), BecameReady()]

    def _perhaps_whole(self, child: ChildKey, now_s: float) -> list[Effect]:
        """The last of a group that was started anew may be ready."""
        group = self._groups[child]
        since_s = group.absent_since_s
        if self.state is not State.READY or since_s is None or group.lost is not None:
            return []
        if not all(self._alive[member].ready for member in group.members):
            return []
        group.absent_since_s = group.start_by_s = None
        return [*self._greet(group.members), ServesAgain(group.members, now_s - since_s)]

    def _greet(self, children: Iterable[ChildKey]) -> list[Tell]:
        return [Tell(child, ServerReady(self._startup_s)) for child in children]

    def _exited(self, child: ChildKey, returncode: int, now_s: float) -> list[Effect]:
        life = self._alive.pop(child, None)
        if life is None:
            return []
        effects: list[Effect] = []
        if child not in self._killed:
            sentence, number = self._obituary(child, life, returncode), max(0, -returncode)
            effects += self._cannot_go_on(child, sentence, number, now_s)
            if self.state is State.STOPPING and not self._has_obeyed(child, returncode):
                self._why_now = ""
                self._hear_cause(sentence, number)
        self._forget(child)
        group = self._groups[child]
        if self.state is State.READY and group.lost is not None and not any(m in self._alive for m in group.members):
            effects += self._start(group, group.lost, now_s)
        if self.state is State.STOPPING and not self._of_role(self._stopping_role):
            effects += self._next_stage(now_s)
        if not self._alive:
            effects += self._finish()
        return effects

    def _forget(self, child: ChildKey) -> None:
        """Nothing of it may be held against the next one in its place."""
        self._killed.discard(child)
        self._last_words.pop(child, None)
        self._deadlines = [
            replace(deadline, children=others)
            for deadline in self._deadlines
            if (others := tuple(other for other in deadline.children if other != child))
        ]

    def _obituary(self, child: ChildKey, life: _Life, returncode: int) -> str:
        if returncode >= 0 and child in self._last_words:
            return self._last_words[child]
        doing = "" if life.ready else f" at its start ({life.phase})" if life.phase else " at its start"
        if returncode < 0:
            hint = " (out of memory?)" if returncode == -signal.SIGKILL else ""
            return f"{_named(child)} was killed by {_signal_name(-returncode)}{doing}{hint}."
        return f"{_named(child)} ended{doing} with exit code {returncode}."

    def _link_lost(self, child: ChildKey, reason: str | None, now_s: float) -> list[Effect]:
        if child not in self._alive:
            return []
        if reason is not None:
            return self._cannot_go_on(child, f"{_named(child)} sent what cannot be read: {reason}.", 0, now_s)
        # Its exit status says more, so that is awaited; but who does not exit is made to.
        sentence = f"{_named(child)} closed its link to the supervisor."
        self._deadlines.append(_Deadline(now_s + ENDING_S, (child,), sentence))
        return []

    # ---- How processes are replaced

    def _cannot_go_on(self, child: ChildKey, sentence: str, number: int, now_s: float) -> list[Effect]:
        """What depends on this child is lost with it; or the whole server is."""
        group = self._groups[child]
        if self.state is State.STOPPING:
            return self._give_up_running(sentence) if group.is_engine else []
        if self.state is not State.READY:
            return self._fail(sentence, number, now_s)
        if group.lost is not None:
            group.lost.hear(sentence, number)
            return []
        group.losses_s = [when_s for when_s in group.losses_s if now_s - when_s < CALM_S]
        self._why_now = _why_now(len(group.losses_s))
        if len(group.losses_s) >= self.most_replacements:
            return self._fail(sentence, number, now_s)
        group.losses_s.append(now_s)
        group.lost = _Cause(sentence, number)
        if group.absent_since_s is None:
            group.absent_since_s = now_s
        # One death causes others, and the last words of those tell which was first.
        self._deadlines.append(_Deadline(now_s + SETTLE_S, group.members))
        # A scheduler has something to say, too: what its workers were at.
        return [
            Tell(one, Stop(0.0, sentence)) for one in group.members if one.role == "scheduler" and one in self._alive
        ]

    def _start(self, group: _Group, cause: _Cause, now_s: float) -> list[Effect]:
        """All of it have ended, and what they held is free."""
        group.lost = None
        group.start_by_s = now_s + START_S + 10 * self._startup_s
        self._alive |= {child: _Life() for child in group.members}
        if not group.is_engine:
            return [Start(group.members, self.generation, cause.sentence)]
        self.generation += 1
        replaced = EngineReplaced(self.generation, by_request=cause.signal not in FROM_OUTSIDE)
        others = [Tell(child, replaced) for child in self._of_role("frontend")]
        return [Start(group.members, self.generation, cause.sentence), TellRuntime(replaced), *others]

    # ---- How the server ends

    def _fail(self, sentence: str, number: int, now_s: float) -> list[Effect]:
        if self.state is State.FINISHED:
            return []
        is_first = self._cause is None
        self._hear_cause(sentence, number)
        if not is_first:
            return []
        was_ready = self.state is State.READY
        self.state = State.FAILING
        # Frontends have clients to tell, once there are any.
        frontends = self._of_role("frontend") if was_ready else ()
        at_once = tuple(child for child in self._alive if child not in frontends)
        self._deadlines += [_Deadline(now_s + SETTLE_S, at_once), _Deadline(now_s + ENDING_S, frontends)]
        return [Tell(child, Stop(LAST_ANSWERS_S, sentence)) for child in frontends]

    def _hear_cause(self, sentence: str, number: int) -> None:
        """Of the end of the server: why it has failed."""
        if self._cause is None:
            self._cause = _Cause(sentence, number)
        else:
            self._cause.hear(sentence, number)

    def _stop(self, grace_s: float, now_s: float) -> list[Effect]:
        if self.state is State.READY and grace_s > 0:
            self.state = State.STOPPING
            self._stages = [("frontend", grace_s), ("scheduler", ENDING_S), ("worker", ENDING_S)]
            effects = [Stopping(grace_s), *self._next_stage(now_s)]
            engine = next(group for group in self._groups.values() if group.is_engine)
            if engine.absent_since_s is not None:
                effects += self._give_up_running("the server is shutting down, and its engine was being replaced")
                effects += self._kill([child for child in engine.members if child in self._alive])
            return effects
        if self.state in (State.STARTING, State.READY):
            self.state = State.STOPPING
        self._stages.clear()
        return self._kill(self._alive)  # nothing to be finished, or asked for the second time

    def _has_obeyed(self, child: ChildKey, returncode: int) -> bool:
        """It has ended when it was told to, by itself. Workers end one by one, and may miss another in a last step of which nobody waits
        for the result: their exit code says nothing."""
        was_told = child.role not in {role for role, _ in self._stages}
        return was_told and (returncode == 0 or (returncode > 0 and child.role == "worker"))

    def _give_up_running(self, sentence: str) -> list[Effect]:
        """In the middle of an orderly end nothing is replaced any more: who waits for answers is told so, and waits no longer."""
        if self._has_given_up:
            return []
        self._has_given_up = True
        waiting = [child for child in self._of_role("frontend") if child not in self._killed]
        return [Tell(child, Stop(LAST_ANSWERS_S, sentence)) for child in waiting]

    def _next_stage(self, now_s: float) -> list[Effect]:
        while self._stages:
            role, grace_s = self._stages.pop(0)
            self._stopping_role = role
            children = self._of_role(role)
            if children:
                self._deadlines.append(_Deadline(now_s + grace_s + ENDING_S, children))
                return [Tell(child, Stop(grace_s)) for child in children]
        return []

    def _of_role(self, role: str) -> tuple[ChildKey, ...]:
        return tuple(child for child in self._alive if child.role == role)

    def _kill(self, children: Iterable[ChildKey]) -> list[Effect]:
        chosen = [child for child in children if child not in self._killed]
        self._killed.update(chosen)
        return [Kill(child) for child in chosen]

    def _finish(self) -> list[Effect]:
        self.state = State.FINISHED
        self._deadlines.clear()
        if self._cause is None:
            return [Finish(0, None)]
        return [Finish(1, self._cause.sentence + self._why_now)]


def _why_now(num_losses: int) -> str:
    """Behind the reason of an end: why that one was not replaced."""
    if not num_losses:
        return ""
    times = f"{num_losses} times" if num_losses > 1 else "once"
    return f" It was replaced {times} within {CALM_S:.0f} s (see --max-replacements)."


def _named(child: ChildKey) -> str:
    return str(child).capitalize()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
