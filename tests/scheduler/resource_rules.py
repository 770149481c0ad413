"""What workers are asked to prepare for requests: how long that takes, what becomes of it, and whether it was right to ask.

Some resources take long, some cannot be prepared by one of the ranks, and some are never heard of again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srt.managers.scheduler.request import Request, Status
from srt.protocol.messages import GenerateRequest, Prepare, Prepared, Release, Resource
from srt.protocol.views import AdmissionView
from tests.scheduler.settings import Settings

if TYPE_CHECKING:
    from tests.scheduler.traffic import Choice

LONGEST_S = 60.0  # as clients are told
REASON = "Rank {rank} cannot prepare {key}."
Answer = tuple[int, float, Prepared]  # of a rank, after so long


def fate_of(resource: Resource) -> str:
    """What becomes of it is said by its content."""
    return resource.content.decode()


NUM_WANTED_OFTEN = 3


def draw_resources(count: int, rng: random.Random) -> list[Resource]:
    """All that is asked for in one world. The first few are asked for often, and one of these cannot be prepared."""
    fates = [rng.choice(("good",) * 24 + ("slow",) * 8 + ("bad",) * 6 + ("lost",)) for _ in range(count)]
    if count > NUM_WANTED_OFTEN:
        fates[0] = "bad"
    kind = random.Random(f"kind of {fates}").choice(("grammar", "adapter"))
    return [Resource(kind, f"key {index}", fate.encode()) for index, fate in enumerate(fates)]


def needed_by(request: Request | GenerateRequest) -> Resource | None:
    """What a request needs: in a world all that is needed is of one kind."""
    return request.resource or request.adapter


@dataclass(slots=True)
class _Held:
    """What the workers were asked to prepare and not told to release."""

    resource: Resource
    since_s: float
    ranks: set[int] = field(default_factory=set)  # that were heard to have it
    has_failed: bool = False
    num_answers: int = 0
    is_late: bool = False  # it does not count any more
    used_at: int = 0  # the last tick at which somebody needed it


class ResourceRules:
    """One server's. It is told what the workers are, shown what the scheduler has after each tick, and asked who may be admitted."""

    def __init__(self, settings: Settings, statistics: Counter[str], rng: random.Random) -> None:
        self._settings = settings
        self._statistics = statistics
        self._rng = rng
        self._held: dict[str, _Held] = {}
        self._wanted_at: dict[str, int] = {}  # by key, the turn at which it was wanted first, until it is asked for
        self._again: set[str] = set()  # of these, those that nobody may have wanted in between
        self._turn = 0

    # ---- The workers

    def hear(self, work: Prepare | Release, requests: Iterable[Request], now: float) -> list[Answer]:
        """What the ranks will answer."""
        self._note_late(now)
        needed = {one.key for r in requests if (one := needed_by(r)) and r.progress.status is not Status.ENDED}
        if isinstance(work, Release):
            self._check_release(work.key, needed)
            return []
        resource, key = work.resource, work.resource.key
        assert key not in self._held, f"{key} is to be prepared again"
        assert key in needed, f"{key} is to be prepared, which nobody needs"
        most = self._settings.most_resources
        assert self._num_held < most, f"{self._num_held + 1} resources are held, at most {most} may be"
        others = [self._wanted_at[name] for name in needed - self._held.keys() - self._again if name != key]
        self._statistics["rule: resources are prepared in order"] += bool(others)
        assert self._wanted_at.pop(key) <= min(others, default=self._turn), (
            f"{key} is to be prepared before one that was wanted earlier"
        )
        self._again.discard(key)
        self._held[key] = _Held(resource, now, used_at=self._turn)
        return self._answers(resource)

    def _answers(self, resource: Resource) -> list[Answer]:
        fate, rng, key = fate_of(resource), self._rng, resource.key
        ranks = list(range(self._settings.num_ranks))
        odd = rng.choice(ranks)
        answers = []
        for rank in ranks:
            delay = rng.choice((0.0, 0.01, 0.1)) + (2.0 * rng.random() if fate == "slow" else 0.0)
            if fate == "lost" and rank == odd:
                continue
            reason = REASON.format(rank=rank, key=key) if fate == "bad" and rank == odd else ""
            answers.append((rank, delay, Prepared(key, reason)))
        return answers

    def _check_release(self, key: str, needed: set[str]) -> None:
        held = self._held.pop(key, None)
        assert held is not None, f"{key} is to be released, and nobody has it"
        assert key not in needed or key in self._wanted_at, f"{key} is to be released, and is needed"
        assert held.num_answers == self._settings.num_ranks, f"{key} is to be released before all ranks have answered"
        if held.has_failed or held.is_late:
            return
        self._statistics["rule: the resource used longest ago is released"] += 1
        assert self._num_held + 1 == self._settings.most_resources, f"{key} is to be released, though there is room"
        assert needed - self._held.keys(), f"{key} is to be released, and nobody needs another one"
        idle = [other.used_at for name, other in self._held.items() if name not in needed and self._is_ready(name)]
        # What happened between two ticks has no order here.
        assert held.used_at <= min(idle, default=held.used_at) + 1, (
            f"{key} is to be released, others were used longer ago"
        )

    def heard(self, rank: int, answer: Prepared) -> None:
        """The scheduler is about to hear of it."""
        held = self._held[answer.key]
        held.num_answers += 1
        held.used_at = self._turn  # what nobody waits for any more counts from its last answer on
        held.has_failed |= bool(answer.reason)
        if not answer.reason:
            held.ranks.add(rank)

    def _note_late(self, now: float) -> None:
        for held in self._held.values():
            held.is_late |= held.num_answers < self._settings.num_ranks and now >= held.since_s + LONGEST_S

    @property
    def _num_held(self) -> int:
        return sum(not held.is_late for held in self._held.values())

    # ---- Who may run

    def is_ready(self, request: Request) -> bool:
        """Has every rank what the request needs?"""
        resource = needed_by(request)
        return resource is None or self._is_ready(resource.key)

    def _is_ready(self, key: str) -> bool:
        held = self._held.get(key)
        return held is not None and len(held.ranks) == self._settings.num_ranks and not held.is_late

    def _is_given_up(self, held: _Held) -> bool:
        """All ranks have answered, and it is of no use. Who needs it from now on waits until it is prepared again."""
        return held.num_answers == self._settings.num_ranks and (held.has_failed or held.is_late)

    def check_admission(self, choice: Choice, admission: AdmissionView) -> None:
        resource = needed_by(choice.request)
        keys = [one.key if one else "" for one in (choice.request.resource, choice.request.adapter)]
        assert [admission.resource, admission.adapter] == keys, f"{choice.name}: {admission}"
        if resource is not None:
            self._statistics["rule: who is admitted has its resource"] += 1
            assert self._is_ready(resource.key), f"{choice.name} is admitted, and not all ranks have {resource.key}"

    def want(self, request: GenerateRequest) -> None:
        """A request comes."""
        resource = needed_by(request)
        if resource is None:
            return
        held = self._held.get(resource.key)
        if held is not None and not self._is_given_up(held):
            held.used_at = self._turn + 1
        elif self._wanted_at.setdefault(resource.key, self._turn) != self._turn:
            self._again.add(resource.key)

    def ticked(self, requests: Iterable[Request], now: float) -> None:
        """After a tick: what is needed is asked for, and nobody waits for what was not prepared in time, or could not be."""
        self._turn += 1
        live = [(r, one) for r in requests if (one := needed_by(r)) and r.progress.status is not Status.ENDED]
        needed = {resource.key for _, resource in live}
        self._note_late(now)
        for key in needed & self._held.keys():
            self._held[key].used_at = self._turn
        for key in self._wanted_at.keys() - needed:
            del self._wanted_at[key]
            self._again.discard(key)
        lacking = needed - self._held.keys()
        idle = [key for key in self._held if key not in needed and self._is_ready(key)]
        has_room = self._num_held < self._settings.most_resources or idle
        self._statistics["rule: what is needed is prepared"] += bool(needed)
        assert not (lacking and has_room), f"{sorted(lacking)} are needed, and not to be prepared, though there is room"
        for request, resource in live:
            held = self._held.get(resource.key)
            if held is None or request.progress.status is not Status.WAITING or self.is_ready(request):
                continue
            self._statistics["rule: nobody waits for ever for a resource"] += 1
            assert held.num_answers < self._settings.num_ranks, (
                f"request {request.key} waits for what cannot be prepared"
            )
            assert now < held.since_s + LONGEST_S, f"request {request.key} waits for {resource.key} for too long"


def check_failure(resource: Resource | None, status: int, message: str, *, may_hang: bool) -> bool:
    """Whether an end with this status and sentence is one of a resource; an AssertionError if it may not be.

    `may_hang`: there were workers that answered nothing any more.
    """
    if status == 400:
        assert resource is not None and fate_of(resource) == "bad", f"{resource} failed: {message}"
        assert f"cannot prepare {resource.key}." in message
        return True
    if status == 503 and "have not prepared" in message:
        assert resource is not None and (may_hang or fate_of(resource) == "lost"), (
            f"{resource} took too long: {message}"
        )
        return True
    return False
