"""The replica's slots and pages as plans tell of them, and what follows: who must get a slot, who must lose one, and who must not.

- A request is admitted only when there is room for what it is expected to need, one that has lost its slot for all that it may need.
- Nobody waits while a slot is free and there is room.
- One that may take the place of others takes it with the next step, and of no more of them than it needs.
- Where memory lasts for the next step, nobody loses its slot for want of it.
- A prompt goes on in each step, the oldest of the long ones too.

How much is expected is counted here a second time. Pages are those that the worker was given; the scheduler is asked who waits and
who runs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.request import Request, Status
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Int32Array, StepPlan, int32_array
from tests.scheduler.fairness import CHECK_EVERY, Fairness
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.prefixes import Prefixes
from tests.scheduler.settings import Settings

LOOK_EVERY = 3  # ticks, where there are many slots: what costs more than it finds
FEW_SLOTS = 24
LOOKED_AT = 128  # ends of a kind
NEEDED = 16
MEASURED = (
    16  # steps in a row may leave out prompts, beside those in flight: times are measured, and again as rows get fewer
)

WAITS = "waits, though there is room"


class Expectation:
    """How many tokens an answer is expected to have: the 13th largest share of what was allowed among the last 128 of its kind.

    Those that ended between two looks ended in an order that nobody knows; so it may be that there are two answers.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._ends: defaultdict[int, deque[list[int]]] = defaultdict(deque)  # by kind: look by look, shares
        self._latest: set[int] = {0}  # the kinds of those that ended last

    def note(self, ends: list[tuple[int, int]]) -> None:
        """Tokens and how many there might have been, of all that have ended since this was told last."""
        if not ends:
            return
        self._latest = {self._kind(most) for _, most in ends}
        for kind in self._latest:
            looks = self._ends[kind]
            looks.append([math.ceil(count * 256 / most) for count, most in ends if self._kind(most) == kind])
            while sum(map(len, looks)) - len(looks[0]) >= LOOKED_AT:
                looks.popleft()

    def may_be(self, share: float) -> bool:
        """Of a kind of which one ended last: nobody knows which of them did."""
        return any(low <= share <= high for low, high in map(self._shares, self._latest))

    def tokens(self, most: int) -> tuple[int, bool]:
        """At least, and whether that is sure."""
        low, high = self._shares(self._kind(most))
        return max(1, min(most, math.ceil(low * most))), low == high

    def _shares(self, kind: int) -> tuple[float, float]:
        """The least and the most that it may be."""
        looks = self._ends[kind]
        num_too_many = max(0, sum(map(len, looks)) - LOOKED_AT)
        first, others = sorted(looks[0]) if looks else [], [share for look in list(looks)[1:] for share in look]
        lows, highs = sorted(first[: len(first) - num_too_many] + others), sorted(first[num_too_many:] + others)
        return self._share(lows), self._share(highs)

    def _share(self, shares: list[int]) -> float:
        share = 256 if len(shares) < NEEDED else shares[int(len(shares) * 0.9)]
        return min(1.0, self._conservativeness * share / 256)

    @staticmethod
    def _kind(most: int) -> int:
        """Up to 3, up to 15, up to 63 and so on."""
        kind = 0
        while most > 3:
            most, kind = most // 4, kind + 1
        return kind


@dataclass(slots=True, eq=False)
class Seat:
    """A request in its slot."""

    request: Request
    slot: int
    incarnation: int
    expected: int  # pages
    is_sure: bool
    most: int
    twice: int = 0  # pages of it that the cache has twice, before the tick


@dataclass(frozen=True, slots=True)
class Glance:
    """What there was before a tick."""

    seats: list[Seat]
    displacer: Request | None  # the first that waits, where there are enough of those whose place it may take
    is_of_trial: bool


class Room:
    """One server's."""

    def __init__(self, settings: Settings, statistics: Counter[str], worker: FakeWorker, fairness: Fairness) -> None:
        self._settings = settings
        self._statistics = statistics
        self._worker = worker
        self._rank = fairness.rank
        self._is_ready = fairness.is_ready
        self._may_follow = fairness.may_follow
        self._prefixes = Prefixes(settings, statistics, worker)
        self._seats: dict[int, Seat] = {}
        self._incarnations = b""
        self._expectation = Expectation(settings.conservativeness)
        self._have_lost: set[int] = set()  # a slot, by seed
        self._turn = 0
        self._look_every = 1 if settings.num_slots <= FEW_SLOTS else LOOK_EVERY
        self._num_left_out: Counter[str] = Counter()  # steps in a row, where there was a reason not to be

    # ---- A tick

    def look(self, core: SchedulerCore, live: Callable[[], list[Request]]) -> Glance:
        """Before it."""
        self._turn += 1
        self.sync(core)
        self._prefixes.begin(core)
        seats, displacer = list(self._seats.values()), None
        for seat in seats:
            seat.twice = len(seat.request.hold.own_copies) // ITEM
        if core.planner.num_waiting and seats and self._turn % self._look_every == 0:
            everybody = live()
            if self._settings.policy != "priority":
                everybody = [request for request in everybody if request.urgent]
            first = self._first_waiting(core, everybody)
            if first is not None and self._must_displace(first, seats) and not self._may_follow(core, first):
                displacer = first
        return Glance(seats, displacer, core.planner.trials.are_some_left)

    def judge(
        self, core: SchedulerCore, before: Glance, plans: list[StepPlan], live: Callable[[], list[Request]]
    ) -> bool:
        """Behind it, when the worker has not heard of these plans. Whether all stayed who were there."""
        if len(plans) > 1:
            self._note_short_stays(core, plans)
        gone = self.sync(core)
        victims = [seat for seat in gone if seat.request.progress.status is not Status.ENDED]
        stayed = [seat.slot for seat in before.seats if seat not in gone]
        self._prefixes.judge(core, stayed, plans, have_all_stayed=not gone)
        if not plans or before.is_of_trial or core.planner.trials.are_some_left:
            return False
        if self._settings.windows:  # it may be the pages of a window that are lacking
            return not gone
        kept = [seat for seat in before.seats if seat not in gone]
        is_admitting = any(plan.sections[0].admissions for plan in plans)
        if is_admitting:
            self._check_admissions(kept, plans)
            self._num_left_out[WAITS] = 0
        self._statistics["rule: who may displace does"] += before.displacer is not None
        if len(victims) < len(gone):
            return False
        if victims:
            # With fewer steps in flight than may be, one more was tried behind this plan, and took the slot before it came to nothing.
            if len(plans) == 1 and core.stream.num_in_flight == core.window:
                self._check_need(core, before, victims, live())
            return False
        if before.displacer is not None:
            is_left_out = before.displacer.progress.status is Status.WAITING
            # There may be room for it before the decodes of that step take theirs, and then it takes a place with the next one.
            is_full = len(before.seats) == self._settings.num_slots
            what = "takes nobody's place, though it may"
            self._note(what, is_left_out, plans, before.displacer, is_excused=not is_full)
        self._statistics["rule: nobody waits where there is room"] += (
            is_admitting and core.counters.num_steps % CHECK_EVERY == 0
        )
        if len(plans) == 1 and self._settings.num_stages == 1 and (self._turn + 1) % self._look_every == 0:
            self._check_prompts(kept, plans[0])
        return True

    def check_waiting(self, core: SchedulerCore, plan: StepPlan, first: Request, waiting: list[Request]) -> None:
        """The worker has heard of the plan, the last, and nobody has lost its slot. `first` is first of those that still wait."""
        s, seats = self._settings, list(self._seats.values())
        if len(seats) == s.num_slots or not self._has_budget(plan):
            return
        needed = max(self._needed_pages(r) for r in (waiting if s.policy == "lpm" else [first]))
        fits = self._room(seats) >= needed and self._is_sure()
        self._note(WAITS, fits, [plan], first)

    def _has_budget(self, plan: StepPlan) -> bool:
        """There was time for more of prompts, beside the half that is kept for long ones."""
        chunk, (section,) = self._settings.chunk, plan.sections
        if self._worker.num_streams(section.decode_slots):
            return False
        left = self._worker._num_admitted[section.extend_slots] - section.extend_starts
        new = [admission.slot for admission in section.admissions]
        is_long = (left > chunk) & ~np.isin(section.extend_slots, new)
        return chunk < 0 or int(section.extend_counts[~is_long].sum()) < chunk // 2

    def check_figures(self, core: SchedulerCore) -> None:
        """What the scheduler says of what it expects, and what the prefix cache has counted."""
        self._prefixes.check_books(core)
        values = core.state()
        promised = self._promised(list(self._seats.values()))
        self._statistics["rule: as much is promised as is expected"] += promised > 0
        assert values["num_promised_pages"] == promised or not self._is_sure(), (
            f"{values['num_promised_pages']} pages are promised, not {promised}"
        )
        said = values["expected_share_of_max_new_tokens"]
        assert isinstance(said, float) and self._expectation.may_be(said), f"the forecast is {said}"

    # ---- Who has which slot

    def sync(self, core: SchedulerCore) -> list[Seat]:
        """Enter those that have got a slot since this was asked last. Returns those that have left theirs."""
        incarnations = core.slots.incarnation.tobytes()
        if incarnations == self._incarnations:
            return []
        self._incarnations = incarnations
        numbers = core.slots.incarnation.tolist()
        gone = [seat for seat in self._seats.values() if numbers[seat.slot] != seat.incarnation]
        for seat in gone:
            del self._seats[seat.slot]
            self._prefixes.leave(seat.slot, seat.request)
            if seat.request.progress.status is not Status.ENDED:
                self._have_lost.add(seat.request.seed)
        ended = [
            seat.request for seat in gone if seat.request.progress.status is Status.ENDED and not seat.request.urgent
        ]
        self._expectation.note([(request.progress.num_output, request.max_new) for request in ended])
        for slot, number in enumerate(numbers):
            if number and slot not in self._seats:
                request = core.planner.request_in(slot)
                most = self._pages_for(request.max_tokens)
                self._seats[slot] = Seat(request, slot, number, *self._expected_pages(request), most)
        return gone

    def _note_short_stays(self, core: SchedulerCore, plans: list[StepPlan]) -> None:
        """Who got a slot with one plan may have lost it with the next."""
        there = {request.seed for request in core.planner.running()}
        seeds = {admission.seed for plan in plans for admission in plan.sections[0].admissions}
        self._have_lost |= seeds - there

    def _first_waiting(self, core: SchedulerCore, live: list[Request]) -> Request | None:
        """Of those that could have a slot now."""
        find, is_untried = core.planner.preempted.find, core.planner.trials.is_untried
        waiting = [
            r
            for r in live
            if r.progress.status is Status.WAITING
            and not is_untried(r)
            and find(r.progress.incarnation) is not r
            and self._is_ready(r)
        ]
        return min(waiting, key=self._rank, default=None)

    # ---- Pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._settings.page_size)

    def _expected_pages(self, request: Request) -> tuple[int, bool]:
        """For the prompt and an answer of the length that is expected; for all that it may need where it has lost a slot."""
        if request.seed in self._have_lost:
            return self._pages_for(request.max_tokens), True
        answer, is_sure = self._expectation.tokens(request.max_new)
        return self._pages_for(max(request.prompt_len + answer, request.progress.num_known + 1)), is_sure

    def _needed_pages(self, request: Request) -> int:
        """The same, where it is sure."""
        expected, is_sure = self._expected_pages(request)
        return expected if is_sure else self._pages_for(request.max_tokens)

    def _is_sure(self) -> bool:
        return all(seat.is_sure for seat in self._seats.values())

    def _num_pages(self, seat: Seat) -> int:
        """That it has. Those that it was admitted with are told to the worker with its first chunk."""
        told = int(self._worker._num_pages[seat.slot])
        return told or int(self._worker._length[seat.slot]) // self._settings.page_size

    def _promised(self, seats: list[Seat]) -> int:
        """What these are expected to ask for still; half of what is possible, where that has proved wrong.

        Of a seat that is not sure, the least that it may be: it has what was expected at least, and may lack one page of the rest.
        """
        promised = 0
        for seat in seats:
            has = self._num_pages(seat)
            left = (seat.most - has + 1) // 2 if seat.is_sure else min(1, seat.most - has)
            promised += seat.expected - has if has < seat.expected else left
        return promised

    def _held(self, seats: Collection[Seat]) -> Int32Array:
        """The pages that these have."""
        worker = self._worker
        tables = [worker._pages[seat.slot, : worker._num_pages[seat.slot]] for seat in seats]
        return np.unique(np.concatenate(tables)) if tables else int32_array()

    def _available(self, seats: list[Seat]) -> int:
        """Pages that nobody of these has, at least: what is not told yet, or kept twice, may be counted twice here."""
        twice = sum(max(seat.twice, len(seat.request.hold.own_copies) // ITEM) for seat in seats)
        untold = sum(self._num_pages(seat) for seat in seats if not self._worker._num_pages[seat.slot])
        return self._settings.num_pages - len(self._held(seats)) - twice - untold

    def _room(self, seats: list[Seat]) -> int:
        """For one more, at least."""
        return self._available(seats) - self._promised(seats)

    # ---- What follows

    def _check_admissions(self, kept: list[Seat], plans: list[StepPlan]) -> None:
        """With all that the others have, and are promised, there was room for each."""
        size, is_held = self._settings.page_size, np.zeros(self._settings.num_pages, np.bool_)
        is_held[self._held(kept)] = True
        room = self._settings.num_pages - int(is_held.sum()) - self._promised(kept)
        for plan in plans:
            delta = plan.sections[0].pages[0]
            ends = np.cumsum(delta.counts).tolist()
            starts = dict(zip(delta.slots.tolist(), [0, *ends], strict=False))
            for admission in plan.sections[0].admissions:
                seat = self._seats.get(admission.slot)
                if seat is None or seat.request.seed != admission.seed:
                    return  # it has lost the slot again
                num_cached = admission.cached // size
                if admission.slot in starts and num_cached:
                    start = starts[admission.slot]
                    cached = delta.pages[start : start + num_cached]
                    room -= int(np.count_nonzero(~is_held[cached]))
                    is_held[cached] = True
                room -= seat.expected - num_cached
                has_lost = seat.request.seed in self._have_lost
                self._statistics["rule: the preempted come back where there is room"] += has_lost
                self._statistics["rule: admitted where there is room"] += 1
                assert room >= 0, (
                    f"request {seat.request.key} is admitted, though {-room} pages of {seat.expected} that it may need are lacking"
                )
            is_held[delta.pages] = True  # what is computed by this plan, the next one may share

    def _must_displace(self, first: Request, seats: list[Seat]) -> bool:
        """It has no slot or no room, and would have both in the place of those whose place it may take."""
        lower = [seat for seat in seats if self._may_displace(first, seat.request)]
        if not lower:
            return False
        needed = self._needed_pages(first)
        if not self._is_sure():
            return False
        room = self._room_at_most(seats) + self._most_shared(first, seats)
        if len(seats) < self._settings.num_slots and room >= needed:
            return False
        return self._room([seat for seat in seats if seat not in lower]) >= needed

    def _room_at_most(self, seats: list[Seat]) -> int:
        return self._settings.num_pages - len(self._held(seats)) - self._promised(seats)

    def _most_shared(self, first: Request, seats: list[Seat]) -> int:
        """Pages that one of these has, and it would use."""
        if not self._settings.caches:
            return 0
        size, ids, count = ITEM * self._settings.page_size, first.progress.id_bytes, 0
        others = [seat.request.progress.id_bytes for seat in seats if seat.request.salt == first.salt]
        while others := [other for other in others if other.startswith(ids[: (count + 1) * size])]:
            if (count := count + 1) * size >= len(ids):
                break
        return count

    def _may_displace(self, one: Request, other: Request) -> bool:
        if one.urgent or other.urgent:
            return not other.urgent
        is_enough = one.priority - other.priority >= self._settings.threshold
        return self._settings.policy == "priority" and is_enough and self._rank(one) < self._rank(other)

    def _check_need(self, core: SchedulerCore, before: Glance, victims: list[Seat], live: list[Request]) -> None:
        """Had the best of the victims stayed, the step would have lacked pages, or one that goes before it its place."""
        best = min(victims, key=lambda seat: self._rank(seat.request))
        stayed = [seat for seat in before.seats if seat not in victims] + [best]
        most_lacking = len(before.seats) * self._pages_for(1)  # where room is short, rows bring no drafts
        self._statistics["rule: nobody loses its slot without need"] += 1
        if self._available(stayed) <= most_lacking:
            return
        lost, there = {seat.request.serial for seat in victims}, {seat.request.serial for seat in before.seats}
        coming = [r for r in live if r.serial not in there and r.progress.status is Status.RUNNING]
        waiting = self._first_waiting(core, [r for r in live if r.serial not in lost])
        first = min([*coming, *([waiting] if waiting else [])], key=self._rank, default=None)
        name = f"request {best.request.key} lost its slot"
        assert first is not None and all(self._may_displace(first, seat.request) for seat in victims), (
            f"{name}, though there are {self._available(stayed)} pages, and nobody may take its place"
        )
        fits = len(stayed) < self._settings.num_slots and self._room(stayed) >= self._needed_pages(first)
        assert not fits or not self._is_sure(), f"{name} to {first.key}, for which there was room without that"

    def _check_prompts(self, kept: list[Seat], plan: StepPlan) -> None:
        """Those that are not through go on: one of all, and the oldest of those that are longer than a chunk."""
        worker, s, (section,) = self._worker, self._settings, plan.sections
        lacking = {seat: seat.request.progress.num_known - int(worker._length[seat.slot]) for seat in kept}
        left = self._available(kept) - int(section.pages[0].counts.sum())
        prompts = [
            seat
            for seat in kept
            if lacking[seat] > 0
            and (
                left > 0
                or int(worker._num_pages[seat.slot]) * s.page_size > int(worker._length[seat.slot])
                or seat.slot in section.extend_slots  # it got the last page
            )
        ]
        if not prompts:
            return
        self._statistics["rule: prompts go on"] += 1
        self._note("does not go on", not len(section.extend_slots), [plan], prompts[0].request)
        if not len(section.extend_slots) or worker.num_streams(section.decode_slots):
            return
        long = [seat for seat in prompts if lacking[seat] > s.chunk > 0]
        if long:
            oldest = min(long, key=lambda seat: seat.incarnation)
            self._statistics["rule: the oldest long prompt goes on"] += 1
            assert oldest.slot in section.extend_slots.tolist(), (
                f"request {oldest.request.key} has a long prompt, and does not go on in step {plan.step}"
            )
        if s.chunk > 0:
            self._check_short_prompts(prompts, long, plan)

    def _check_short_prompts(self, prompts: list[Seat], long: list[Seat], plan: StepPlan) -> None:
        """Half of what a step may compute of prompts is for those that fit into one; without long ones all of it."""
        chunk, (section,) = self._settings.chunk, plan.sections
        counts = dict(zip(section.extend_slots.tolist(), section.extend_counts.tolist(), strict=True))
        for seat in long:
            counts.pop(seat.slot, None)
        short = [seat for seat in prompts if seat not in long]
        self._statistics["rule: short prompts pass long ones"] += bool(short and long)
        if sum(counts.values()) < (chunk // 2 if long else chunk):
            for seat in short:
                assert seat.slot in counts, f"request {seat.request.key} has a short prompt, and waits for longer ones"

    def _note(
        self, what: str, is_so: bool, plans: list[StepPlan], request: Request, *, is_excused: bool = False
    ) -> None:
        """Only a step that measures how long decodes take may leave something undone, and there are few in a row."""
        if not is_so:
            self._num_left_out[what] = 0
            return
        sections = [plan.sections[0] for plan in plans]
        measures = all(len(section.decode_slots) and not len(section.extend_slots) for section in sections)
        self._num_left_out[what] += 1
        may_be = measures and self._num_left_out[what] <= MEASURED + self._settings.most_in_flight
        assert may_be or (is_excused and self._num_left_out[what] == 1), (
            f"request {request.key} {what}, in step {plans[-1].step}"
        )
