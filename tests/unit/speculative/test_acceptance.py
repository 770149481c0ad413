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
    return int(limits.rows(np.array([1]), np.array([length]), np.array([room])).most[0])


def test_a_row_drafts_nothing_that_it_cannot_use() -> None:
    assert _most(_limits()) == 4
    assert _most(_limits(), room=8) == 2
    assert _most(_limits(max_new=7), length=5) == 1  # of 7 positions it has computed 5, and computes one in any case
    assert _most(_limits(resource="grammar")) == 0


def test_a_row_whose_drafts_are_wrong_rests_ever_longer() -> None:
    limits, row = _limits(), np.array([1])
    limits.note(row, np.array([4]), np.array([0]))
    for rest in (FIRST_REST, 2 * FIRST_REST):
        assert _most(limits) == 1
        limits.note(row, np.array([1]), np.array([0]))
        assert [_most(limits) for _ in range(rest)] == [0] * rest
    limits.note(row, np.array([1]), np.array([1]))
    assert _most(limits) == 2
    limits.note(row, np.array([2]), np.array([0]))
    assert _most(limits) == 1
