"""From plan to arrays: rows, positions, table writes and logprobs; and what a plan may not ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from srt.layers.attention.base import Reading
from srt.model_executor.step.plan_arrays import Staging, _cut
from srt.model_executor.step.slot_mirror import SlotMirror
from srt.model_executor.step.step_planner import DecodeStep, StepPlanner
from srt.protocol.messages import LogprobSpec, PlanSection, SamplingSpec, int32_array
from tests.support.plan_driver import idle_section
from tests.support.sections import admission, section


def test_rows_tokens_and_samples_lie_in_the_order_of_the_plan() -> None:
    planner = StepPlanner(num_slots=4, num_pages=20, page_size=4)
    planner.plan(section([admission(2, [5, 6])], [(2, [9])], [(2, 0, 2, 1)]))
    step = planner.plan(
        section(
            [admission(0, [1, 2, 3, 4, 5], cached=4), admission(3, [7, 8, 9])],
            [(0, [1, 2]), (3, [3]), (2, [4])],
            [(3, 0, 2, 0), (0, 4, 1, 1)],
            [2],
        )
    )
    assert step.rows.slots.tolist() == [3, 0, 2]
    assert step.rows.seq_lens.tolist() == [2, 5, 3]
    assert step.arrays.rows.token_slots.tolist() == [3, 3, 0]
    assert step.arrays.rows.token_positions.tolist() == [0, 1, 4]
    assert step.rows.sample_rows.tolist() == [1, 2]
    assert step.arrays.sample_tokens.tolist() == [2, 3]
    assert step.arrays.page_slots.tolist() == [0, 0, 3, 2]
    assert step.arrays.page_columns.tolist() == [0, 1, 0, 1]
    assert step.arrays.ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert step.arrays.id_slots.tolist() == [0] * 5 + [3] * 3
    assert step.arrays.id_positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_slot_begins_anew_with_its_next_admission() -> None:
    planner = StepPlanner(num_slots=1, num_pages=20, page_size=1)
    planner.plan(section([admission(0, [1, 2])], [(0, [4, 5])], [(0, 0, 2, 1)]))
    step = planner.plan(section([admission(0, [1, 2, 3])], [(0, [7, 8, 9])], [(0, 0, 3, 1)]))
    assert step.arrays.page_columns.tolist() == [0, 1, 2]
    assert planner.slots.num_pages_of_admitted() == {0: 3}


def test_an_idle_plan_has_no_rows() -> None:
    planner = StepPlanner(num_slots=1, num_pages=20, page_size=1)
    empty = int32_array()
    for idle in (idle_section(), PlanSection([], [], empty, empty, empty, empty, empty)):
        assert len(planner.plan(idle).rows.slots) == 0


@pytest.mark.parametrize(
    "bad",
    [
        section([admission(4, [1])], [(4, [0])], [(4, 0, 1, 1)]),  # no such slot
        section([admission(0, [1, 2])], [(0, [20])], [(0, 0, 2, 1)]),  # no such page
        section([admission(0, [1, 2, 3, 4, 5])], [(0, [1])], [(0, 0, 5, 1)]),  # more tokens than pages
        section([admission(0, [1, 2], cached=2)], [(0, [1])], []),  # nothing left to compute
        section([admission(0, [1, 2])], [(0, [1])], [(0, 1, 1, 1)]),  # a gap
        section([], [], [], [1]),  # decodes without a page
    ],
)
def test_a_plan_that_does_not_fit_the_tables_is_a_fault(bad: PlanSection) -> None:
    with pytest.raises(AssertionError):
        StepPlanner(num_slots=4, num_pages=20, page_size=4).plan(bad)


@pytest.mark.parametrize(
    ("prompt_start", "start", "count", "first", "rows", "has_first_token"),
    [
        (0, 0, 4, 0, [0, 1, 2, 3], True),
        (0, 4, 4, 5, [0, 1, 2, 3], False),
        (0, 8, 2, 9, [0], False),  # the prompt's last position tells of the first output
        (1, 0, 4, 1, [0, 1, 2, 3], False),
        (3, 0, 4, 3, [2, 3], False),
        (4, 0, 4, 4, [3], False),
        (9, 4, 6, 9, [4], False),
        (0, 0, 10, 0, list(range(9)), True),
    ],
)
def test_a_chunk_tells_the_logprobs_of_the_tokens_behind_its_positions(
    prompt_start: int, start: int, count: int, first: int, rows: list[int], has_first_token: bool
) -> None:
    planner = StepPlanner(num_slots=2, num_pages=20, page_size=1)
    logprob_spec = LogprobSpec(prompt_start=prompt_start, ids=int32_array([3]))
    admit = admission(0, list(range(10)), cached=start, logprobs=logprob_spec)
    step = planner.plan(section([admit], [(0, list(range(10)))], [(0, start, count, 0)]))
    (segment,) = step.prompt_logprobs.segments
    assert (segment.first, segment.has_first_token) == (first, has_first_token)
    assert step.arrays.prompt_logprobs.rows.tolist() == rows
    assert step.arrays.prompt_logprobs.of_ids.tolist() == [[3]] * len(rows)


@pytest.mark.parametrize(("prompt_start", "start", "count"), [(9, 0, 4), (5, 0, 4), (-1, 0, 10), (0, 9, 1)])
def test_a_chunk_outside_what_was_asked_for_tells_nothing(prompt_start: int, start: int, count: int) -> None:
    planner = StepPlanner(num_slots=2, num_pages=20, page_size=1)
    logprob_spec = LogprobSpec(output=True, prompt_start=prompt_start)
    admit = admission(0, list(range(10)), cached=start, logprobs=logprob_spec)
    step = planner.plan(section([admit], [(0, list(range(10)))], [(0, start, count, 0)]))
    assert not step.prompt_logprobs.segments
    assert not step.output_logprobs.segments


def test_a_one_token_prompt_still_has_its_first_token() -> None:
    planner = StepPlanner(num_slots=1, num_pages=2, page_size=1)
    admit = admission(0, [5], logprobs=LogprobSpec(output=True, prompt_start=0))
    step = planner.plan(section([admit], [(0, [0])], [(0, 0, 1, 1)]))
    assert [(s.begin, s.end, s.has_first_token) for s in step.prompt_logprobs.segments] == [(0, 0, True)]
    assert [s.first for s in step.output_logprobs.segments] == [0]


def test_staged_arrays_keep_values_types_and_shapes() -> None:
    planner = StepPlanner(num_slots=1, num_pages=2, page_size=4)
    logprob_spec = LogprobSpec(output=True, top=2, ids=int32_array([4, 5]))
    spec = SamplingSpec(3, temperature=0.5, top_p=0.3, repetition_penalty=1.25)
    host = planner.plan(
        section([admission(0, [5, 6], logprobs=logprob_spec, sampling=spec)], [(0, [1])], [(0, 0, 2, 1)])
    )
    staged = Staging(torch.device("cpu"), window=2).copy(host.arrays)
    assert staged.ids.tolist() == [5, 6]
    assert staged.sampling.temperatures.dtype == torch.float32
    assert staged.sampling.top_ps.tolist() == [0.3]
    assert staged.output_logprobs.of_ids.tolist() == [[4, 5]]
    assert staged.sampling.adjusted_rows.tolist() == [0]
    assert staged.adjustments.penalties.tolist() == [[1.25, 0.0, 0.0]]
    assert staged.adjustments.limits.tolist() == [[2, 2, 0, 0]]
    assert np.array_equal(staged.rows.token_positions.numpy(), host.arrays.rows.token_positions)


def test_the_device_is_told_of_adjustments_when_a_slot_gets_some_or_loses_them() -> None:
    planner = StepPlanner(num_slots=1, num_pages=4, page_size=4)
    told = []
    for penalty in (1.0, 1.5, 1.0, 1.0):
        spec = SamplingSpec(3, repetition_penalty=penalty)
        arrays = planner.plan(section([admission(0, [5, 6], sampling=spec)], [(0, [1])], [(0, 0, 2, 1)])).arrays
        told.append(arrays.adjustments.penalties[:, 0].tolist())
    assert told == [[], [1.5], [1.0], []]


def test_packed_arrays_are_cut_apart_as_they_were() -> None:
    rng = np.random.default_rng(0)
    arrays: list[Any] = [
        rng.integers(0, 99, 3),
        rng.random(5).astype(np.float32),
        np.zeros(0, np.float64),
        rng.random((2, 3)),
        rng.integers(0, 9, (0, 4)),
        rng.random(1).astype(np.float32),
        rng.integers(0, 99, (2, 2)),
    ]
    order = sorted(range(len(arrays)), key=lambda index: -arrays[index].itemsize)
    packed = np.concatenate([arrays[index].reshape(-1).view(np.uint8) for index in order])
    tensors = _cut(torch.from_numpy(packed), arrays, order)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def decode_of(first_pages: list[int], cached: int) -> DecodeStep:
    """A step of rows that have three pages of 512 positions each; who begins with page 0 has its first two from row 0."""
    planner = StepPlanner(num_slots=40, num_pages=200, page_size=512)
    rows = range(len(first_pages))
    admissions = [admission(row, [1] * 1025, cached * (row > 0)) for row in rows]
    pages = [(row, [page, page + 1, 100 + row]) for row, page in zip(rows, first_pages, strict=True)]
    planner.plan(section(admissions, pages, [(row, cached * (row > 0), 1025 - cached * (row > 0), 1) for row in rows]))
    step = planner.plan_decodes(section(decodes=list(rows)))
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("first_pages", "cached", "may_share"),
    [
        ([0] * 16, 1024, True),
        ([0] * 15, 1024, False),  # rows
        ([0] * 16, 0, False),  # all have computed them by themselves
        ([0] * 9 + [50] * 11, 1024, True),
        ([0] * 8 + [50] * 10, 1024, False),
        ([2 * row for row in range(20)], 1024, False),  # nobody has what another one has
        ([*range(40, 56), *[0] * 9], 1024, True),  # those of the second block
        ([*range(40, 64), *[0] * 9], 1024, False),  # which lie in two blocks
    ],
)
def test_a_step_is_said_to_share_where_enough_neighbours_begin_with_one_page(
    first_pages: list[int], cached: int, may_share: bool
) -> None:
    assert (decode_of(first_pages, cached).reading is Reading.SHARED) == may_share


@pytest.mark.parametrize(
    ("lengths", "reading"),
    [
        ([100] * 15 + [120], Reading.BY_ROW),
        ([100] * 15 + [125], Reading.EVEN),
        ([100] * 14 + [400], Reading.BY_ROW),  # rows
        ([10, 1000] * 10, Reading.EVEN),
    ],
)
def test_a_step_is_read_evenly_where_its_longest_row_is_far_from_the_mean(lengths: list[int], reading: Reading) -> None:
    planner = StepPlanner(num_slots=40, num_pages=40, page_size=1024)
    admissions = [admission(row, [1] * length, 0) for row, length in enumerate(lengths)]
    rows = range(len(lengths))
    extends = [(row, 0, length, 1) for row, length in enumerate(lengths)]
    planner.plan(section(admissions, [(row, [row]) for row in rows], extends))
    step = planner.plan_decodes(section(decodes=list(rows)))
    assert step is not None
    assert step.reading is reading


def test_who_shared_a_prefix_does_not_when_its_slot_is_anothers() -> None:
    mirror = SlotMirror(20, 100, 512)
    slots = np.arange(16)
    for slot in slots.tolist():
        mirror.admit(admission(slot, [1] * 1025, cached=1024))
        mirror.append_pages(section(pages=[(slot, [0, 1, 2 + slot])]).pages[0])
    assert mirror.most_shared(slots, 16) == 16 * 1024
    for slot in range(1, 16):
        mirror.admit(admission(slot, [1] * 1025, cached=1024))
        mirror.append_pages(section(pages=[(slot, [30 + slot, 50 + slot])]).pages[0])
    assert mirror.most_shared(slots, 16) == 0
