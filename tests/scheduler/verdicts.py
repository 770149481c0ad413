"""What the Replacer may and must decide, said a second time and from the outside: by what has happened to the processes.

While all live and go on nobody is told to end, and nobody killed, however long a step or a nap of the supervisor takes. When one
has gone wrong, that one is named, in time, and all end: frontends are told, and have time for their last answers. When a stop is
asked for, frontends end first, then the scheduler, then workers; who does not end within its grace is killed, and who dies before is
named.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from math import inf

from srt.managers.process.child_process import ChildKey
from srt.managers.supervisor.events import BecameReady, Effect, Finish, Kill, Tell
from srt.managers.supervisor.replacer import ENDING_S, LAST_ANSWERS_S, SETTLE_S, SILENT_S
from srt.protocol.messages import ServerReady, Stop

ROLES = ("frontend", "scheduler", "worker")  # in the order of an end
BLAME = "Connection closed by peer."
BEAT_S = 1.0
SLACK_S = 0.1  # for a supervisor that wakes late, and for a process to end that is killed


@dataclass(frozen=True, slots=True)
class Cause:
    """What went wrong: not before `evident_s` may anybody say so, and at `due_s` the latest. `words` begin the sentence."""

    kind: str
    culprit: ChildKey
    words: str
    evident_s: float
    due_s: float


class Verdicts:
    """Hears what happens to the processes, and what the Replacer wants done. AssertionError if that is wrong."""

    def __init__(self, children: list[ChildKey], stuck_s: float) -> None:
        self.cause: Cause | None = None
        self.ready: set[ChildKey] = set()
        self.is_ready = False
        self.is_finished = False
        self._stuck_s = stuck_s
        self._alive = list(children)
        self._greeted: set[ChildKey] = set()
        self._killed: set[ChildKey] = set()
        self._told_s: dict[ChildKey, float] = {}
        self._told_again: set[ChildKey] = set()
        self._is_engine_broken = False
        self._grace_s: dict[ChildKey, float] = {}
        self._stops: list[float] = []  # the grace of each that was asked for
        self._must_finish_by = inf
        self._was_ready = False  # when it went wrong
        self.rules: Counter[str] = Counter()  # how often each had something to judge

    def expect(self, kind: str, culprit: ChildKey, now: float, beat_s: float, number: signal.Signals) -> Cause:
        """From now on this is wrong."""
        name = str(culprit).capitalize()
        evident_s, due_s = now, now
        if kind in ("killed", "blamed"):
            words = f"{name} was killed by {number.name}"
        elif kind == "ended":
            words = f"{name} ended"
        elif kind == "failed":
            words = f"{name} has no memory left."
        elif kind == "gibberish":
            words = f"{name} sent what cannot be read: not MessagePack."
        elif kind == "unlinked":
            words = f"{name} closed its link to the supervisor."
            evident_s = due_s = now + ENDING_S
        elif kind == "silent":
            words = f"{name} has given no sign of life for {SILENT_S:.0f} s."
            evident_s = due_s = beat_s + SILENT_S
        else:
            words = f"{name} has made no progress for"
            evident_s, due_s = now + self._stuck_s, now + self._stuck_s + BEAT_S
        self.cause = Cause(kind, culprit, words, evident_s, due_s + SLACK_S)
        self._was_ready = self.is_ready
        self._must_finish_by = self.cause.due_s + ENDING_S + SLACK_S
        return self.cause

    def note_death_in_a_stop(self, child: ChildKey, now: float) -> None:
        """Killed from outside. That is the reason of the end, unless it was to be killed anyway."""
        if child not in self._killed:
            self.cause = Cause("killed", child, f"{str(child).capitalize()} was killed by SIGKILL", now, inf)

    def note_exit(self, child: ChildKey) -> None:
        self._is_engine_broken |= child.role != "frontend"
        self._alive.remove(child)

    def note_stop_asked(self, now: float, grace_s: float) -> None:
        self._stops.append(grace_s)
        most_s = (grace_s + 5 * ENDING_S if len(self._stops) == 1 else 0.0) + 4 * SLACK_S
        self._must_finish_by = min(self._must_finish_by, now + most_s)

    def check_time(self, now: float) -> None:
        assert now <= self._must_finish_by or self.is_finished, (
            f"{', '.join(map(str, self._alive))} should have ended at {self._must_finish_by:.3f} s: {self.cause or 'a stop was asked for'}"
        )

    def check(self, effect: Effect, now: float) -> None:
        match effect:
            case BecameReady():
                self.rules["rule: ready when all are"] += 1
                assert not self.is_ready, "it became ready twice"
                assert self._greeted == set(self._alive), "not all were told that the server is ready"
                self.is_ready = True
            case Tell(child, ServerReady()):
                assert self.ready >= set(self._alive), f"{child} is told that the server is ready, which it is not"
                self._greeted.add(child)
            case Tell(child, Stop(grace_s, reason)):
                self._check_told(child, grace_s, reason, now)
            case Kill(child):
                self._check_killed(child, now)
            case Finish(exit_code, reason):
                self._check_finished(exit_code, reason)
            case _:
                pass

    def _check_told(self, child: ChildKey, grace_s: float, reason: str, now: float) -> None:
        self._check_reason(child, now)
        if self._stops and reason:  # what ran when the stop came has no hope any more
            assert self._is_engine_broken, f"{child} is told {reason!r}, though the engine is whole"
            assert child.role == "frontend"
            assert child in self._told_s
            assert child not in self._told_again, f"{child} is told twice that it waits in vain"
            self._told_again.add(child)
            return
        assert child not in self._told_s, f"{child} is told twice to end"
        self._told_s[child], self._grace_s[child] = now, grace_s
        if self._stops:
            earlier = ROLES[: ROLES.index(child.role)]
            left = [str(other) for other in self._alive if other.role in earlier]
            self.rules["rule: frontends end first in a stop"] += bool(earlier)
            assert not left, f"{child} is told to end before {', '.join(left)}"
            assert grace_s == (self._stops[0] if child.role == "frontend" else ENDING_S)
            return
        self.rules["rule: frontends are told why it ends"] += 1
        assert child.role == "frontend", f"{child} has no clients that should be told"
        assert grace_s == LAST_ANSWERS_S
        self._check_words(reason, is_first=True)

    def _check_killed(self, child: ChildKey, now: float) -> None:
        self._check_reason(child, now)
        assert child not in self._killed, f"{child} is killed twice"
        self.rules["rule: nobody is killed before its grace is over"] += 1
        self._killed.add(child)
        if self._stops:
            is_at_once = len(self._stops) > 1 or not self._stops[0] or not self.is_ready
            earliest = self._told_s.get(child, inf) + self._grace_s.get(child, 0.0) + ENDING_S
            assert is_at_once or now >= earliest, f"{child} is killed before its grace is over"
            return
        assert self.cause is not None
        has_clients = child.role == "frontend" and self._was_ready
        wait_s = ENDING_S if has_clients else SETTLE_S
        if self.cause.kind != "unlinked" or child != self.cause.culprit:
            assert now >= self.cause.evident_s + wait_s, f"{child} is killed before it could end by itself"

    def _check_reason(self, child: ChildKey, now: float) -> None:
        is_evident = self.cause is not None and now >= self.cause.evident_s
        self.rules["rule: who is well is not told to end"] += 1
        assert self._stops or is_evident, f"{child} is to end, though everybody lives and goes on"
        assert child in self._alive, f"{child} is to end, which has ended"

    def _check_finished(self, exit_code: int, reason: str | None) -> None:
        assert not self._alive, f"it is over, but {self._alive[0]} lives"
        assert not self.is_finished, "it is over twice"
        self.is_finished = True
        self.rules["rule: the server ends in time"] += 1
        if self.cause is None:
            self.rules["rule: a stop that was asked for ends well"] += 1
            assert (exit_code, reason) == (0, None), f"a stop that was asked for ended with {exit_code}: {reason}"
            return
        self.rules["rule: the right process is named"] += 1
        self.rules[f"rule: found in time ({self.cause.kind})"] += 1
        assert exit_code == 1
        self._check_words(reason or "", is_first=False)

    def _check_words(self, reason: str, *, is_first: bool) -> None:
        """What others say of a death by a signal may come first, but not last."""
        assert self.cause is not None
        is_blame = is_first and self.cause.kind == "blamed" and reason == BLAME
        assert is_blame or reason.startswith(self.cause.words), f"{reason!r} is said of this: {self.cause}"
