"""What workers are asked to prepare for requests: how long that takes, what becomes of it, and whether it was right to ask.

Some resources take long, some cannot be prepared by one of the ranks, and some are never heard of again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srt.managers.scheduler.request import Request, Status
from srt.protocol.messages import GenerateRequest, PinResources, Prepare, Prepared, Release, Resource
from srt.protocol.views import AdmissionView
from tests.scheduler.settings import Settings

if TYPE_CHECKING:
    from tests.scheduler.traffic import Choice

LONGEST_S = 60.0  # as clients are told
PATIENCE_S = 0.25  # as long as one waits for a place before others take no new requests
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
    ready_turn: int = 0  # when all ranks were heard to have it
    newest_turn: int = 0  # when the newest of the requests came that were admitted with it


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
        self._lacking_since_s: dict[str, float] = {}  # by key, of what others keep out
        self._pinned: set[str] = set()
        self._pins_version = 0
        self._pins_lacking: set[str] = set()  # that the workers were not asked for since they were pinned
        self._num_lacking = 0  # after the last tick
        self._patient_turns: dict[str, int] = {}  # of these, those that are kept out too long, from this turn on
        self._came_turn: dict[int, int] = {}  # by the request's number
        self.waits: Callable[[Request], bool] = lambda request: False
        """Says of a request whether the scheduler keeps it from the queue."""

    # ---- What is pinned

    def pin(self, message: PinResources) -> None:
        """These are to be held whatever requests need, but for the last ones if no place would be left."""
        if message.version < self._pins_version:
            return
        self._pins_version = message.version
        self._pinned = {one.key for one in message.resources[: self._settings.most_resources - 1]}
        self._pins_lacking &= self._pinned
        for key in self._pinned:
            held = self._held.get(key)
            if held is None or self._is_given_up(held):
                self._note_wanted(key)
        for held in self._held.values():  # others may have to take no requests from the next tick on
            held.ready_turn = self._turn

    # ---- The workers

    def hear(self, work: Prepare | Release, requests: Iterable[Request], now: float) -> list[Answer]:
        """What the ranks will answer."""
        self._note_late(now)
        live = [(r, one.key) for r in requests if (one := needed_by(r)) and r.progress.status is not Status.ENDED]
        needed = {key for _, key in live} | self._pins_lacking
        if isinstance(work, Release):
            self._check_release(work.key, needed, {key for request, key in live if not self.waits(request)})
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
        self._lacking_since_s.pop(key, None)
        self._patient_turns.pop(key, None)
        self._pins_lacking.discard(key)
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

    def _check_release(self, key: str, needed: set[str], used: set[str]) -> None:
        """`used` are the keys with requests that do not wait for them."""
        held = self._held.pop(key, None)
        assert held is not None, f"{key} is to be released, and nobody has it"
        if self._pinned:
            self._statistics["rule: what is pinned stays"] += 1
            assert key not in self._pinned or held.has_failed or held.is_late, f"{key} is to be released, and is pinned"
        assert key not in used or key in self._wanted_at, f"{key} is to be released, and is needed"
        if key in needed and key not in self._wanted_at:  # it has made room, and will be asked for again in turn
            self._wanted_at[key] = 0
            self._again.add(key)
        assert held.num_answers == self._settings.num_ranks, f"{key} is to be released before all ranks have answered"
        if held.has_failed or held.is_late:
            return
        self._statistics["rule: the resource used longest ago is released"] += 1
        assert self._num_held + 1 == self._settings.most_resources, f"{key} is to be released, though there is room"
        assert needed - self._held.keys(), f"{key} is to be released, and nobody needs another one"
        others = self._held.keys() - needed - self._pinned
        idle = [self._held[name].used_at for name in others if self._is_ready(name)]
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
            held.ready_turn = self._turn

    def _note_late(self, now: float) -> None:
        for held in self._held.values():
            held.is_late |= held.num_answers < self._settings.num_ranks and now >= held.since_s + LONGEST_S

    @property
    def _num_held(self) -> int:
        return sum(not held.is_late for held in self._held.values())

    # ---- Who may run

    def is_ready(self, request: Request) -> bool:
        """Has every rank what the request needs, and is it the turn of those that came when it did?"""
        resource = needed_by(request)
        return resource is None or (self._is_ready(resource.key) and not self.waits(request))

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
            held = self._held[resource.key]
            held.newest_turn = max(held.newest_turn, self._came_turn[choice.request.rid])

    def want(self, request: GenerateRequest) -> None:
        """A request comes."""
        resource = needed_by(request)
        if resource is None:
            return
        self._came_turn[request.rid] = self._turn
        self._note_wanted(resource.key)

    def _note_wanted(self, key: str) -> None:
        held = self._held.get(key)
        if held is not None and not self._is_given_up(held):
            held.used_at = self._turn + 1
            return
        if key in self._pinned:
            self._pins_lacking.add(key)
        if self._wanted_at.setdefault(key, self._turn) != self._turn:
            self._again.add(key)

    def ticked(self, requests: Iterable[Request], now: float) -> None:
        """After a tick: what is needed is asked for, and nobody waits for what was not prepared in time, or could not be."""
        self._turn += 1
        live = [(r, one) for r in requests if (one := needed_by(r)) and r.progress.status is not Status.ENDED]
        needed = {resource.key for _, resource in live} | self._pins_lacking
        self._note_late(now)
        for key in needed & self._held.keys():
            self._held[key].used_at = self._turn
        for key in self._wanted_at.keys() - needed:
            del self._wanted_at[key]
            self._again.discard(key)
        lacking = needed - self._held.keys()
        idle = [key for key in self._held.keys() - needed - self._pinned if self._is_ready(key)]
        has_room = self._num_held < self._settings.most_resources or idle
        came = {
            key: min(self._came_turn[r.rid] for r, one in live if one.key == key)
            for key in lacking - self._pins_lacking
        }
        self._forget_waits({key for key, turn in came.items() if turn == self._turn - 1})
        self._statistics["rule: what is needed is prepared"] += bool(needed)
        assert not (lacking and has_room), f"{sorted(lacking)} are needed, and not to be prepared, though there is room"
        self._check_turns(
            lacking, {key for key in (needed & self._held.keys()) - self._pinned if self._is_ready(key)}, now
        )
        kept = {one.key for request, one in live if self._is_ready(one.key) and self.waits(request)}
        assert len(kept) <= max(len(lacking), self._num_lacking), f"{sorted(kept)} take no requests, and nothing waits"
        self._num_lacking = len(lacking)
        for request, resource in live:
            held = self._held.get(resource.key)
            if held is None or self._is_ready(resource.key) or request.progress.status is not Status.WAITING:
                continue
            self._statistics["rule: nobody waits for ever for a resource"] += 1
            assert held.num_answers < self._settings.num_ranks, (
                f"request {request.key} waits for what cannot be prepared"
            )
            assert now < held.since_s + LONGEST_S, f"request {request.key} waits for {resource.key} for too long"

    def _forget_waits(self, keys: set[str]) -> None:
        """All requests that need these came since the last tick: those that waited before, if there were any, have left."""
        for key in keys:
            self._lacking_since_s.pop(key, None)
            self._patient_turns.pop(key, None)

    def _check_turns(self, lacking: set[str], used: set[str], now: float) -> None:
        """For each key that was kept out for long, one that is used takes no requests that came later."""
        for key in self._lacking_since_s.keys() - lacking:
            del self._lacking_since_s[key]
            self._patient_turns.pop(key, None)
        for key in lacking:
            if now >= self._lacking_since_s.setdefault(key, now) + PATIENCE_S:
                self._patient_turns.setdefault(key, self._turn)
        if not self._patient_turns:
            return
        self._statistics["rule: what is used makes room for what waits"] += 1
        latest = max(self._patient_turns.values())
        closed = [key for key in used if self._held[key].newest_turn <= max(latest - 1, self._held[key].ready_turn)]
        assert len(closed) >= min(len(self._patient_turns), len(used)), (
            f"{sorted(self._patient_turns)} wait for a place, but of {sorted(used)} only {sorted(closed)} take no new requests"
        )


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
