"""Which draws of a row count, and how many drafts it has next."""

from __future__ import annotations

import numpy as np

from srt.protocol.messages import Admission, LogprobSpec, SamplingSpec, int32_array
from srt.speculative.acceptance import count_accepted
from srt.speculative.drafter import FIRST_REST, DraftLimits


def test_draws_count_up_to_the_first_that_differs_from_its_draft() -> None:
    for num_right in range(4):
        ids = np.array([7, 1, 2, 3, 4, 8])  # a prompt's end, a row of three drafts, and a row of none
        drafts = np.array([0, 1, 2, 3, 0, 0])
        drafts[1 + num_right : 4] += 100
        finite = np.ones(6, np.bool_)
        assert count_accepted(ids, drafts, finite, np.array([1, 4, 1])).tolist() == [1, 1 + num_right, 1]


def test_a_draw_that_is_not_finite_does_not_count() -> None:
    ids = np.array([1, 2, 3])
    for place, count in enumerate((-1, 1, 2)):
        finite = np.arange(3) != place
        assert count_accepted(ids, np.array([1, 2, 0]), finite, np.array([3])).tolist() == [count]


def _limits(*, max_new: int = 100, resource: str = "") -> DraftLimits:
    limits = DraftLimits(2, 4)
    limits.admit(Admission(1, int32_array([1]), 1, 0, 0, SamplingSpec(max_new), LogprobSpec(), resource))
    return limits


def _most(limits: DraftLimits, length: int = 5, room: int = 99) -> int:
    """The drafts that the row may have in the next step."""
    limits.begin_step()
    return int(limits.rows(np.array([1]), np.array([length]), np.array([room]), 4).most[0])


def test_a_row_drafts_nothing_that_it_cannot_use() -> None:
    assert _most(_limits()) == 4
    assert _most(_limits(), room=8) == 2
    assert _most(_limits(max_new=7), length=5) == 1  # of 7 positions it has computed 5, and computes one in any case
    assert _most(_limits(resource="grammar")) == 0


def test_a_row_whose_drafts_are_wrong_rests_ever_longer() -> None:
    limits, row = _limits(), np.array([1])
    limits.note(row, np.array([4]), np.array([0]))
    assert _most(limits) == 1
    for rest in (FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST):
        limits.note(row, np.array([1]), np.array([0]))
        pauses = 0
        while not _most(limits):
            pauses += 1
        assert rest - 1 <= pauses < 2 * rest
    limits.note(row, np.array([1]), np.array([1]))
    assert _most(limits) == 2
    limits.note(row, np.array([2]), np.array([0]))
    assert _most(limits) == 1


def test_rows_that_rest_draft_again_in_the_same_step() -> None:
    limits, ends = DraftLimits(2, 4), list[int]()
    for slot in range(2):
        limits.admit(Admission(slot, int32_array([1]), 1, 0, 0, SamplingSpec(100), LogprobSpec()))
    for step in range(1, 3 * FIRST_REST):
        limits.begin_step()
        if step in (1, 2):
            limits.note(np.array([0]), np.array([4]), np.array([0]))
        if step in (4, 6):
            limits.note(np.array([1]), np.array([4]), np.array([0]))
        wants = limits.want(np.array([0, 1])).tolist()
        if step > 6 and any(wants):
            ends.append(step)
            assert wants == [True, True]
    assert ends[0] == 2 * FIRST_REST


def test_rows_draft_no_more_than_a_step_allows() -> None:
    limits = _limits()
    assert limits.rows(np.array([1]), np.array([5]), np.array([99]), 2).most.tolist() == [2]


def test_where_no_row_may_rest_wrong_drafts_end_no_drafting() -> None:
    limits, row = DraftLimits(2, 4, may_rest=False), np.array([1])
    limits.admit(Admission(1, int32_array([1]), 1, 0, 0, SamplingSpec(100), LogprobSpec()))
    for _ in range(5):
        limits.note(row, np.array([4]), np.array([0]))
        assert _most(limits) == 1
