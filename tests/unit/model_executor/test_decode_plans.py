"""Steps of the same rows, one after the other, are planned from what was looked up for the first of them: nobody may notice.

The slow, obvious ways are `plan`, which plans any step, and a planner that looks its rows up in every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from srt.layers.attention.base import Reading
from srt.model_executor.step.step_planner import DecodeStep, HostStep, StepPlanner
from srt.protocol.messages import LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from tests.support.sections import admission, section

NUM_SLOTS = 24
NUM_PAGES = 20000
SPECS = [
    SamplingSpec(9),
    SamplingSpec(9, temperature=0.0),
    SamplingSpec(9, temperature=0.7, top_p=0.9),
    SamplingSpec(9, repetition_penalty=1.2),
]
LOGPROB_SPECS = [
    LogprobSpec(),
    LogprobSpec(),
    LogprobSpec(),
    LogprobSpec(output=True, top=1),
    LogprobSpec(prompt_start=1),
]


class Planned(NamedTuple):
    """What is said of a step, whichever way it was planned."""

    slots: list[int]
    seq_lens: list[int]
    pages: dict[int, tuple[int, int]]
    """The last of a slot, and its number within the slot."""
    kind: int
    segments: list[Any]

    @classmethod
    def of(cls, step: DecodeStep | HostStep, page_size: int) -> Planned:
        if isinstance(step, HostStep):
            arrays, rows = step.arrays, step.rows
            places = zip(arrays.pages.tolist(), arrays.page_columns.tolist(), strict=True)
            pages = dict(zip(arrays.page_slots.tolist(), places, strict=True))
            return cls(
                rows.slots.tolist(), rows.seq_lens.tolist(), pages, int(step.kind), step.output_logprobs.segments
            )
        pages = {}
        if step.new_pages is not None:
            columns = (step.seq_lens[step.new_pages.rows] - 1) // page_size  # as the device finds them
            places = zip(step.new_pages.pages, columns.tolist(), strict=True)
            pages = dict(zip(step.slots[step.new_pages.rows].tolist(), places, strict=True))
        return cls(step.slots.tolist(), step.seq_lens.tolist(), pages, int(step.kind), step.output_logprobs.segments)


def planner(page_size: int) -> StepPlanner:
    return StepPlanner(NUM_SLOTS, NUM_PAGES, page_size)


def plan(one: StepPlanner, section: PlanSection) -> DecodeStep | HostStep:
    return one.plan_decodes(section) or one.plan(section)


def plan_anew(one: StepPlanner, section: PlanSection) -> DecodeStep | HostStep:
    one._standing = None
    return plan(one, section)


class Requests:
    """Makes sections as a scheduler does: who decodes now is given a page where it begins one."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self._page_size = page_size
        self._lengths: dict[int, int] = {}
        self._room: dict[int, int] = {}
        self._decoding: list[int] = []
        self._paused: list[int] = []
        self._next_page = 10

    def next_section(self) -> PlanSection:
        rng = self.rng
        what = rng.random() * 3  # most steps are of the same rows
        if what < 0.1 and self._decoding:
            slot = self._decoding.pop(rng.randrange(len(self._decoding)))
            if rng.random() < 0.5:
                self._paused.append(slot)
            else:
                del self._lengths[slot]
        elif what < 0.16 and self._paused:
            self._decoding.append(self._paused.pop(0))
        elif what < 0.3 and len(self._lengths) < NUM_SLOTS:
            return self._admit()
        elif what < 0.32:
            rng.shuffle(self._decoding)
        return section(pages=self._grow(), decodes=self._decoding)

    def _admit(self) -> PlanSection:
        rng, size = self.rng, self._page_size
        slot = rng.choice([slot for slot in range(NUM_SLOTS) if slot not in self._lengths])
        cached = size * rng.choice((0, 0, 1, 2))
        length = cached + rng.randrange(1, 30)
        num_pages = -(-length // size) + rng.choice((0, 0, 3))
        pages = [*range(cached // size), *self._new_pages(num_pages - cached // size)]
        ids, spec = list(range(length)), rng.choice(SPECS)
        beside = self._decoding if rng.random() < 0.7 else []
        made = section(
            [admission(slot, ids, cached, sampling=spec, logprobs=rng.choice(LOGPROB_SPECS))],
            [(slot, pages), *(self._grow() if beside else [])],
            [(slot, cached, length - cached, 1)],
            beside,
        )
        self._lengths[slot], self._room[slot] = length, num_pages * size
        self._decoding.append(slot)
        return made

    def _grow(self) -> list[tuple[int, list[int]]]:
        given = []
        for slot in self._decoding:
            if self._lengths[slot] == self._room[slot]:
                given.append((slot, self._new_pages(1)))
                self._room[slot] += self._page_size
            self._lengths[slot] += 1
        if self.rng.random() < 0.1:
            self.rng.shuffle(given)
        return given

    def _new_pages(self, count: int) -> list[int]:
        self._next_page += count
        return list(range(self._next_page - count, self._next_page))


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 1024])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asked_share", [0.02, 1.0])  # whoever is asked for pages has caught up with its rows
def test_any_sequence_of_plans_is_planned_as_if_each_were_the_first(
    page_size: int, seed: int, asked_share: float
) -> None:
    """Where one planner needs no more than its short way, the other does too: else a mistake in it would only be slow."""
    requests = Requests(page_size, seed)
    one, anew, obvious = (planner(page_size) for _ in range(3))
    num_same, before = 0, None
    for _ in range(600):
        made = requests.next_section()
        step, other = plan(one, made), plan_anew(anew, made)
        assert Planned.of(step, page_size) == Planned.of(other, page_size) == Planned.of(obvious.plan(made), page_size)
        assert isinstance(step, DecodeStep) == isinstance(other, DecodeStep)
        if isinstance(step, DecodeStep):
            assert isinstance(other, DecodeStep)
            assert step.reading is other.reading
            assert step.longest == max(step.seq_lens)
            num_same += before is step.slots
            before = step.slots
        if requests.rng.random() < asked_share:
            pages = [which.slots.num_pages_of_admitted() for which in (one, anew, obvious)]
            assert pages[0] == pages[1] == pages[2]
    assert num_same > 100


def standing_rows(page_size: int = 4) -> StepPlanner:
    """Slots 0, 1 and 2, which have decoded twice: 3, 4 and 5 positions, in pages of 4."""
    one = planner(page_size)
    pages = [(0, [10]), (1, [11]), (2, [12, 13])]
    one.plan(section([admission(s, [7] * (s + 1)) for s in range(3)], pages, [(s, 0, s + 1, 1) for s in range(3)]))
    for _ in range(2):
        assert one.plan_decodes(section(decodes=[0, 1, 2])) is not None
    return one


def outcome(way: Callable[[StepPlanner, PlanSection], DecodeStep | HostStep], made: PlanSection) -> Any:
    one = standing_rows()
    try:
        return Planned.of(way(one, made), 4), one.slots.num_pages_of_admitted()
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("pages", "is_decode_step"),
    [
        ([(1, [50])], True),
        ([], False),  # slot 1 has no room
        ([(0, [50])], False),  # a page for another row, too early
        ([(0, [50]), (1, [51])], False),  # and one for it
        ([(1, [50, 51])], False),
        ([(3, [50])], False),  # which is no row
        ([(1, [NUM_PAGES])], False),
        ([(1, [-1])], False),
        ([(1, [50]), (1, [51])], False),
    ],
)
def test_pages_that_are_not_what_standing_rows_begin_are_planned_or_refused_as_ever(
    pages: list[tuple[int, list[int]]], is_decode_step: bool
) -> None:
    made = section(pages=pages, decodes=[0, 1, 2])
    assert outcome(plan, made) == outcome(StepPlanner.plan, made)
    assert (standing_rows().plan_decodes(made) is not None) == is_decode_step


def test_counts_that_do_not_belong_to_the_pages_are_a_fault() -> None:
    empty, delta = int32_array(), PageDelta(int32_array([1]), int32_array([2]), int32_array([50]))
    with pytest.raises(AssertionError, match="2 pages, 1 numbers"):
        plan(standing_rows(), PlanSection([], [delta], empty, empty, empty, empty, int32_array([0, 1, 2])))


def test_a_step_of_the_same_rows_has_the_same_slots_and_arrays_of_its_own() -> None:
    one = standing_rows()
    first = one.plan_decodes(section(pages=[(1, [50])], decodes=[0, 1, 2]))
    second = one.plan_decodes(section(pages=[(0, [51])], decodes=[0, 1, 2]))
    assert first is not None
    assert second is not None
    assert first.slots is second.slots
    assert (first.seq_lens.tolist(), second.seq_lens.tolist()) == ([4, 5, 6], [5, 6, 7])
    assert [plan.new_pages and plan.new_pages[:2] for plan in (first, second)] == [([1], [50]), ([0], [51])]


def test_rows_are_read_evenly_until_they_are_even() -> None:
    one = planner(1024)
    lengths = [100] * 15 + [130]
    admissions = [admission(slot, [7] * length) for slot, length in enumerate(lengths)]
    pages = [(slot, [slot]) for slot in range(16)]
    one.plan(section(admissions, pages, [(slot, 0, length, 1) for slot, length in enumerate(lengths)]))
    for _ in range(60):
        lengths = [length + 1 for length in lengths]
        step = one.plan_decodes(section(decodes=list(range(16))))
        assert step is not None
        is_uneven = max(lengths) > 1.2 * float(np.mean(lengths))
        assert step.reading is (Reading.EVEN if is_uneven else Reading.BY_ROW)
    assert not is_uneven
