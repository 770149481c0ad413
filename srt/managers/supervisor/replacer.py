"""State machine of a server's processes: decides what follows when one speaks, falls silent or ends. No I/O, and no clock.

    effects = replacer.handle(event, now_s)        now and then: effects = replacer.tick(now_s)

Before the server is ready every process is needed. When the first one ends, the server ends, and gives that process's reason. Later,
processes that cannot continue are ended and, once they are gone, replaced. A frontend is replaced alone. The scheduler and all workers
of a replica, which form an engine, are replaced together by a new generation. Frontends send their unfinished requests to it again, or
to the other replicas as soon as they hear EngineLost.

Attention groups (--enable-dp-attention) are replicas that share experts: if one cannot continue, the others cannot either. All of them are
lost together, for one cause, and start again when all of their processes have ended.

With several hosts, the loss of one is that of all its processes, by no fault of a request. Its replicas start again when it is back.
When no replica is left that needs none of the lost hosts, the server ends.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import assert_never

from srt.managers.process.child_process import ChildKey
from srt.managers.process.replica_layout import first_generation, next_generation
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
    SaveReport,
    ServesAgain,
    Start,
    StopAsked,
    Stopping,
    Tell,
    TellRuntime,
)
from srt.protocol.messages import (
    EngineLost,
    EngineReplaced,
    Failed,
    Heartbeat,
    Progress,
    Ready,
    ServerReady,
    Stop,
)

SILENT_S = 30.0  # a process without heartbeats for this long is ended
SETTLE_S = 0.3  # one death causes others: listen this long before deciding which was first
# Signals from outside a process, such as an operator's, or the kernel's if memory is short. They make no request a suspect.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LAST_ANSWERS_S = 1.0  # for frontends to tell their clients that the engine has ended
ENDING_S = 3.0  # for the other processes to end by themselves
START_S = 120.0  # for replacements to get ready, plus ten times the duration of the server's first start
CALM_S = 300.0  # replacements count towards --max-replacements for this long


class State(Enum):
    STARTING = auto()
    READY = auto()  # all processes were ready once; from now on those that end are replaced
    STOPPING = auto()  # a stop was asked for; the roles end one after the other
    FAILING = auto()  # a process is gone: listen for the cause, then end the rest
    FINISHED = auto()


@dataclass(slots=True)
class _Life:
    """State of a living child."""

    ready: bool = False
    phase: str = ""
    last_beat_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Time at which these children are killed if they still live; `sentence`, if given, is reported as the reason."""

    when_s: float
    children: tuple[ChildKey, ...]
    sentence: str | None = None


@dataclass(slots=True)
class _Cause:
    """Reason why the server or a group fails.

    A signal that the supervisor did not send points to the first death: processes that fail because another is gone exit with a code.
    So a death by a signal replaces a reason of another kind.
    """

    sentence: str
    signal: int = 0  # the signal that a process died of; 0: none
    replica: int = 0  # of that process

    def hear(self, sentence: str, number: int, replica: int = 0) -> None:
        """Take another reason for the same failure into account."""
        if number and not self.signal:
            self.sentence, self.signal, self.replica = sentence, number, replica


@dataclass(slots=True)
class _Group:
    """Processes that can only be replaced together. After a loss (`lost` says why) all of them end, are started again and get ready."""

    members: tuple[ChildKey, ...]
    is_engine: bool
    replica: int = 0  # of the engine
    generation: int = 0  # of the engine
    was_announced: bool = False  # frontends were told of the present loss by EngineLost
    is_cut_off: bool = False  # and that the engine's host is lost
    lost: _Cause | None = None  # set until all members have ended
    absent_since_s: float | None = None  # set until all members are ready again
    start_by_s: float | None = None  # deadline for the restarted members to be ready
    losses_s: list[float] = field(default_factory=list)  # times of its losses in the last CALM_S

    @property
    def is_whole(self) -> bool:
        """True if all members were ready and none has been lost since."""
        return self.lost is None and self.absent_since_s is None


@dataclass(slots=True)
class Replacer:
    """State of the whole server, from the moment its processes were started."""

    children: Iterable[ChildKey]
    started_s: float
    stuck_s: float  # a process without progress for this long counts as stuck
    most_replacements: int  # within CALM_S
    shares_experts: bool = False  # replicas are attention groups: none can run without the others
    state: State = State.STARTING
    _alive: dict[ChildKey, _Life] = field(default_factory=dict)
    _last_words: dict[ChildKey, str] = field(default_factory=dict)
    _killed: set[ChildKey] = field(default_factory=set)
    _cause: _Cause | None = None
    _stages: list[tuple[str, float]] = field(default_factory=list)  # roles still to be stopped, with their grace
    _stopping_role: str = ""  # the role being stopped now
    _deadlines: list[_Deadline] = field(default_factory=list)
    _groups: dict[ChildKey, _Group] = field(default_factory=dict)  # each child's group
    _engines: list[_Group] = field(default_factory=list)  # by replica
    _away: set[ChildKey] = field(default_factory=set)  # processes of lost hosts
    _startup_s: float = 0.0
    _past_replacements: str = ""  # a sentence that is added to the reason of the server's end
    _has_given_up: bool = False  # frontends were told, after a stop came, that running requests fail

    def __post_init__(self) -> None:
        self._alive = {key: _Life() for key in self.children}
        parts = [key for key in self._alive if key.role != "frontend"]
        for replica in sorted({key.replica for key in parts}):
            members = tuple(key for key in parts if key.replica == replica)
            generation = first_generation(replica)
            self._engines.append(_Group(members, is_engine=True, replica=replica, generation=generation))
        for key in self._alive:
            self._groups[key] = self._engines[key.replica] if key in parts else _Group((key,), is_engine=False)

    @property
    def generations(self) -> list[int]:
        """The generation of each replica's engine."""
        return [engine.generation for engine in self._engines]

    def generation_of(self, child: ChildKey) -> int:
        """Return the generation of a child's engine; for a frontend, which serves all of them, that of the first replica's."""
        return self._engines[child.replica].generation

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
            case HostLost(children, sentence):
                return self._host_lost(children, sentence, now_s)
            case HostBack(children):
                self._away.difference_update(children)
                return [effect for engine in self._engines for effect in self._perhaps_start(engine, now_s)]
            case _:
                assert_never(event)

    def tick(self, now_s: float) -> list[Effect]:
        """Handle the passing of time: silent children, and deadlines that have come."""
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
        """Forgive all silence so far: the supervisor itself was stopped for a while, and perhaps its children with it."""
        for life in self._alive.values():
            if life.last_beat_s is not None:
                life.last_beat_s = now_s

    def was_dying(self, child: ChildKey) -> None:
        """Note that a child that was to be killed was ending by itself already, so that its end counts as a failure.

        This changes nothing while the server stops. All children end then, and one is only killed if it is late, or to save time.
        """
        if self.state is not State.STOPPING:
            self._killed.discard(child)

    def next_tick_s(self) -> float | None:
        """Return the next time at which `tick` must be called; None if only an event can change anything."""
        times = [deadline.when_s for deadline in self._deadlines]
        times += [life.last_beat_s + SILENT_S for _, life in self._needed() if life.last_beat_s is not None]
        times += [
            group.start_by_s for child, _ in self._needed() if (group := self._groups[child]).start_by_s is not None
        ]
        return min(times, default=None)

    def _needed(self) -> list[tuple[ChildKey, _Life]]:
        """Return the living children whose silence would be a failure."""
        if self.state not in (State.STARTING, State.READY):
            return []
        return [(child, life) for child, life in self._alive.items() if self._groups[child].lost is None]

    # ---- What children do

    def _heard(self, child: ChildKey, message: Report, now_s: float) -> list[Effect]:
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
                    self._past_replacements = ""
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
        """Report a restarted group as serving again if all of its members are ready now."""
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
                self._past_replacements = ""
                self._hear_cause(sentence, number)
        self._forget(child)
        return effects + self._perhaps_start(self._groups[child], now_s) + self._perhaps_end(now_s)

    def _host_lost(self, children: tuple[ChildKey, ...], sentence: str, now_s: float) -> list[Effect]:
        """Give up the processes of a host that is gone."""
        self._away.update(children)
        engines = [engine for engine in self._engines if not self._away.isdisjoint(engine.members)]
        gone = [child for child in children if self._alive.pop(child, None) is not None]
        effects: list[Effect] = []
        if self.state is State.READY and len(engines) == len(self._engines):
            effects += self._fail(sentence, 0, now_s)
        elif gone:
            for engine in [engine for engine in engines if not set(engine.members).isdisjoint(children)]:
                effects += self._cannot_go_on(engine.members[0], sentence, signal.SIGKILL, now_s)
        if self.state is State.STOPPING and any(not self._was_told_to_end(child) for child in gone):
            self._past_replacements = ""
            self._hear_cause(sentence, signal.SIGKILL)
        for child in gone:
            self._forget(child)
        for engine in engines:
            effects += self._perhaps_start(engine, now_s)
        return effects + self._perhaps_end(now_s)

    def _perhaps_start(self, group: _Group, now_s: float) -> list[Effect]:
        """Start a lost group again if all of its members have ended, and their hosts are there; and so those that it cannot run without."""
        if self.state is not State.READY or group.lost is None:
            return []
        together, cause = self._together(group), group.lost
        if any(member in self._alive or member in self._away for one in together for member in one.members):
            return []
        return [effect for one in together for effect in self._start(one, cause, now_s)]

    def _together(self, group: _Group) -> list[_Group]:
        """Return the groups that are lost and start with this one, itself included."""
        return self._engines if self.shares_experts and group.is_engine else [group]

    def _perhaps_end(self, now_s: float) -> list[Effect]:
        """Go on with the end of the server if all processes have ended that it waits for."""
        effects: list[Effect] = []
        if self.state is State.STOPPING and not self._of_role(self._stopping_role):
            effects += self._next_stage(now_s)
        if not self._alive and self.state is not State.FINISHED:
            effects += self._finish()
        return effects

    def _forget(self, child: ChildKey) -> None:
        """Drop what is known of this child, so that it does not count against its replacement."""
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
        # Its exit status says more, so wait for that; but a child that does not exit in time is killed.
        sentence = f"{_named(child)} closed its link to the supervisor."
        self._deadlines.append(_Deadline(now_s + ENDING_S, (child,), sentence))
        return []

    # ---- How processes are replaced

    def _cannot_go_on(self, child: ChildKey, sentence: str, number: int, now_s: float) -> list[Effect]:
        """Give up this child's group, or the whole server if the group may not be replaced."""
        group = self._groups[child]
        if self.state is State.STOPPING:
            return self._lost_in_stop(group, sentence, number) if group.is_engine else []
        if self.state is not State.READY:
            return self._fail(sentence, number, now_s)
        if group.lost is not None:
            group.lost.hear(sentence, number, child.replica)
            return self._announce_loss(group, group.lost)
        group.losses_s = [when_s for when_s in group.losses_s if now_s - when_s < CALM_S]
        self._past_replacements = _past_replacements_in_words(len(group.losses_s))
        if len(group.losses_s) >= self.most_replacements:
            return self._fail(sentence, number, now_s)
        cause = _Cause(sentence, number, child.replica)
        return [effect for one in self._together(group) for effect in self._lose(one, cause, now_s)]

    def _lose(self, group: _Group, cause: _Cause, now_s: float) -> list[Effect]:
        """Let the members of a group end."""
        group.losses_s.append(now_s)
        group.lost = cause
        if group.absent_since_s is None:
            group.absent_since_s = now_s
        # One death causes others, and their last messages tell which was first.
        self._deadlines.append(_Deadline(now_s + SETTLE_S, group.members))
        # The scheduler can still tell frontends which requests its workers were computing (LastWord).
        schedulers = [one for one in group.members if one.role == "scheduler" and one in self._alive]
        last_words = [Tell(one, Stop(0.0, cause.sentence)) for one in schedulers]
        return [*self._announce_loss(group, cause), *last_words]

    def _announce_loss(self, group: _Group, cause: _Cause) -> list[Effect]:
        """Tell frontends that a replica is lost, once its cause is certain, so that the other replicas take over its requests.

        A death by a signal is certain: nothing that is heard later replaces it as the cause. If the host is lost after that, they are told
        again, because they wait for last messages otherwise.
        """
        if not group.is_engine or len(self._together(group)) == len(self._engines):
            return []  # no other replica is left
        is_cut_off = group.is_cut_off or not self._away.isdisjoint(group.members)
        if not cause.signal or (group.was_announced and group.is_cut_off == is_cut_off):
            return []
        group.was_announced, group.is_cut_off = True, is_cut_off
        return self._tell_frontends(EngineLost(group.replica, _is_by_request(cause), is_cut_off=is_cut_off))

    def _tell_frontends(self, message: EngineReplaced | EngineLost) -> list[Effect]:
        return [TellRuntime(message), *(Tell(child, message) for child in self._of_role("frontend"))]

    def _start(self, group: _Group, cause: _Cause, now_s: float) -> list[Effect]:
        """Start a group again. All of its members have ended and freed what they held."""
        group.lost, group.was_announced, group.is_cut_off = None, False, False
        group.start_by_s = now_s + START_S + 10 * self._startup_s
        self._alive |= {child: _Life() for child in group.members}
        if not group.is_engine:
            return [Start(group.members, self.generation_of(group.members[0]), cause.sentence)]
        group.generation = next_generation(group.generation, len(self._engines))
        # Requests of other attention groups than that of the cause are no suspects.
        by_request = _is_by_request(cause) and (not self.shares_experts or cause.replica == group.replica)
        replaced = EngineReplaced(group.generation, by_request, group.replica)
        return [Start(group.members, group.generation, cause.sentence), *self._tell_frontends(replaced)]

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
        # Once the server was ready, frontends may have clients to tell.
        frontends = self._of_role("frontend") if was_ready else ()
        at_once = tuple(child for child in self._alive if child not in frontends)
        self._deadlines += [_Deadline(now_s + SETTLE_S, at_once), _Deadline(now_s + ENDING_S, frontends)]
        return [Tell(child, Stop(LAST_ANSWERS_S, sentence)) for child in frontends]

    def _hear_cause(self, sentence: str, number: int) -> None:
        """Record a reason for the server's failure."""
        if self._cause is None:
            self._cause = _Cause(sentence, number)
        else:
            self._cause.hear(sentence, number)

    def _stop(self, grace_s: float, now_s: float) -> list[Effect]:
        if self.state is State.READY and grace_s > 0:
            self.state = State.STOPPING
            self._stages = [("frontend", grace_s), ("scheduler", ENDING_S), ("worker", ENDING_S)]
            effects = [Stopping(grace_s), *self._next_stage(now_s)]
            absent = [engine for engine in self._engines if not engine.is_whole]
            if len(absent) == len(self._engines):
                effects += self._give_up_running("the server is shutting down, and its engine was being replaced")
            for engine in absent:
                effects += self._end_without_engine(engine, by_request=True)
            return effects
        if self.state in (State.STARTING, State.READY):
            self.state = State.STOPPING
        self._stages.clear()
        return self._kill(self._alive)  # there is nothing to finish, or this is the second request

    def _has_obeyed(self, child: ChildKey, returncode: int) -> bool:
        """Return whether this child ended by itself after it was told to.

        Any exit code of a worker will do. Workers end one after the other, so one may fail in a last step because another is gone.
        Nobody needs the result of that step.
        """
        return self._was_told_to_end(child) and (returncode == 0 or (returncode > 0 and child.role == "worker"))

    def _was_told_to_end(self, child: ChildKey) -> bool:
        """Return whether an orderly end has come to this child's role."""
        return child.role not in {role for role, _ in self._stages}

    def _lost_in_stop(self, engine: _Group, sentence: str, number: int) -> list[Effect]:
        """Let the other replicas finish the running requests of one that is lost during an orderly end, or give them up if it was the last.

        While no frontend lives, there are none, and engines end because they were told to.
        """
        if not self._of_role("frontend"):
            return []
        was_whole = engine.is_whole
        for one in self._together(engine):
            one.lost = one.lost or _Cause(sentence, number)
        assert engine.lost is not None
        if not any(other.is_whole for other in self._engines):
            return self._give_up_running(sentence)
        return self._end_without_engine(engine, by_request=_is_by_request(engine.lost)) if was_whole else []

    def _end_without_engine(self, engine: _Group, *, by_request: bool) -> list[Effect]:
        """End the rest of an engine that is lost during an orderly end, and tell frontends that no other one comes."""
        lost = (
            self._tell_frontends(EngineLost(engine.replica, by_request, is_final=True))
            if len(self._engines) > 1
            else []
        )
        return [*lost, *self._kill([child for child in engine.members if child in self._alive])]

    def _give_up_running(self, sentence: str) -> list[Effect]:
        """Tell frontends that running requests fail: during an orderly end a lost engine is not replaced, so waiting is useless."""
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
        return [Finish(1, self._cause.sentence + self._past_replacements)]


def _past_replacements_in_words(num_losses: int) -> str:
    """Return a sentence to add to the reason of the server's end: how often the process was replaced before. Empty: never."""
    if not num_losses:
        return ""
    times = f"{num_losses} times" if num_losses > 1 else "once"
    return f" It was replaced {times} within {CALM_S:.0f} s (see --max-replacements)."


def _is_by_request(cause: _Cause) -> bool:
    """Return whether a request may have caused this loss, rather than a signal from outside."""
    return cause.signal not in FROM_OUTSIDE


def _named(child: ChildKey) -> str:
    return str(child).capitalize()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
