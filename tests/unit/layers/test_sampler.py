"""One draw for every row: what the row asked for, and nothing of what the others did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers.sampler import Draws, Sampler, filter_threshold
from srt.layers.token_masks import MaskBuffers, apply_token_masks
from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool
from srt.protocol.messages import Admission, LogprobSpec, SamplingSpec, int32_array
from srt.sampling.no_filter import NO_TOP_P
from srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingTable
from tests.support import oracle
from tests.support.ranks import CPU, run_ranks, single_rank

VOCABULARY = 203  # no number of ranks divides it
PROMPT_LEN = 11


def every_kind() -> list[SamplingSpec]:
    bias: dict[str, Any] = {"bias_ids": int32_array([0, 101, 202]), "bias_values": np.array([3, -2, 6], np.float32)}
    return [
        SamplingSpec(99, temperature=0.0),
        SamplingSpec(99, temperature=1.0),
        SamplingSpec(99, temperature=0.7, top_k=3),
        SamplingSpec(99, temperature=1.5, top_p=0.4),
        SamplingSpec(99, temperature=1.5, min_p=0.3),
        SamplingSpec(99, temperature=2.0, top_k=40, top_p=0.7, min_p=0.02),
        SamplingSpec(99, temperature=0.0, repetition_penalty=1.7),
        SamplingSpec(99, temperature=1.0, repetition_penalty=0.6, frequency_penalty=1.0, presence_penalty=-0.5),
        SamplingSpec(99, temperature=1.0, **bias),
        SamplingSpec(99, temperature=0.0, **bias),
        SamplingSpec(99, temperature=1.0, min_new_tokens=9, stop_ids=int32_array(range(0, 200, 3))),
        SamplingSpec(99, temperature=1.0, min_new_tokens=2, stop_ids=int32_array(range(100))),
    ]


def as_tensors(arrays: Any) -> Any:
    return type(arrays)(*[torch.from_numpy(getattr(arrays, name)) for name in arrays.__slots__])


class SamplingWorld:
    """Requests in slots, with `num_outputs` sampled tokens each, and their logits."""

    def __init__(self, specs: list[SamplingSpec], num_outputs: int = 5) -> None:
        random = np.random.default_rng(3)
        self.specs = specs
        self.seeds = [int(seed) for seed in random.integers(0, 1 << 63, len(specs))]
        # Few different tokens, so that penalties have something to count.
        self.ids = random.integers(0, 60, (len(specs), PROMPT_LEN + num_outputs))
        self.logits = torch.from_numpy(random.normal(0, 2, (len(specs), VOCABULARY)).astype(np.float32))

    def draw(self, tp: TensorParallel, rows: list[int], by_tables: bool = False) -> Draws:
        """The draws of these rows, in a batch of their own; slots are not in the order of rows.

        `by_tables`: as a graph draws them, by what the device's tables say alone.
        """
        columns = -(-VOCABULARY // tp.size)
        start = tp.rank * columns
        tables = ReqToTokenPool(len(rows), 100, 1, 16, CPU)
        params = SamplingTable(len(rows))
        slots = np.arange(len(rows))[::-1].copy()
        for slot, row in zip(slots.tolist(), rows, strict=True):
            ids = self.ids[row].astype(np.int32)
            params.admit(Admission(slot, ids, PROMPT_LEN, 0, self.seeds[row], self.specs[row], LogprobSpec()))
            tables.token_table[slot, : len(ids)] = torch.from_numpy(ids)
            tables.token_table[slot, len(ids) :] = 1  # of an earlier request
        tables.adjustments.admit(as_tensors(params.adjustments_of(slots.tolist())))
        arrays = as_tensors(params.arrays(slots))
        length = self.ids.shape[1]
        positions = torch.full((len(rows),), length)
        info = SamplingBatchInfo(len(rows), torch.from_numpy(slots), positions, arrays)
        logits = torch.full((len(rows), columns), float("-inf"))
        mine = self.logits[rows, start : start + columns]
        logits[:, : mine.shape[1]] = mine
        sampler = Sampler(tp, VOCABULARY, start, tables)
        if by_tables:
            draws = DrawTables(
                *(torch.from_numpy(getattr(params.draws_of(slots), name)) for name in DrawTables._fields)
            )
            return sampler.draw_adjusted(logits, info.slots, draws, positions)
        return sampler.draw(logits, info)

    def expected(self, row: int) -> int:
        ids = self.ids[row].tolist()
        token, margin = oracle.draw(
            self.logits[row].double().numpy(), ids, PROMPT_LEN, self.specs[row], self.seeds[row]
        )
        assert margin > 1e-5, "choose another seed for this test's world"
        return token


def test_every_kind_of_row_draws_what_the_slow_rule_says() -> None:
    world = SamplingWorld(every_kind() * 4)
    rows = list(range(len(world.specs)))
    draws = world.draw(single_rank(), rows)
    assert draws.ids.tolist() == [world.expected(row) for row in rows]
    assert torch.isfinite(draws.values).all()


@pytest.mark.parametrize("size", [1, 2])
def test_the_tables_alone_say_enough_for_every_kind_of_row(size: int, tmp_path: Path) -> None:
    world = SamplingWorld(every_kind() * 2)
    rows = list(range(len(world.specs)))
    expected = world.draw(single_rank(), rows).ids.tolist()
    for draws in run_ranks(size, tmp_path, lambda tp: world.draw(tp, rows, by_tables=True)):
        assert draws.ids.tolist() == expected


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    world = SamplingWorld(every_kind() * 2)
    together = world.draw(single_rank(), list(range(len(world.specs)))).ids.tolist()
    for row in range(len(world.specs)):
        assert world.draw(single_rank(), [row]).ids.tolist() == [together[row]]
    shuffled = np.random.default_rng(0).permutation(len(world.specs)).tolist()
    assert world.draw(single_rank(), shuffled).ids.tolist() == [together[row] for row in shuffled]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_the_vocabulary_draw_the_same(size: int, tmp_path: Path) -> None:
    world = SamplingWorld(every_kind() * 2)
    rows = list(range(len(world.specs)))
    expected = world.draw(single_rank(), rows).ids.tolist()
    assert [draws.ids.tolist() for draws in run_ranks(size, tmp_path, lambda tp: world.draw(tp, rows))] == [
        expected
    ] * size


def test_the_lowest_id_wins_a_tie_on_one_rank_and_on_many(tmp_path: Path) -> None:
    world = SamplingWorld([SamplingSpec(1, temperature=0.0)] * 3)
    world.logits[0, [7, 90, 180]] = 50.0
    world.logits[1, [150, 202]] = 50.0
    world.logits[2] = 0.0
    assert world.draw(single_rank(), [0, 1, 2]).ids.tolist() == [7, 150, 0]
    for draws in run_ranks(2, tmp_path, lambda tp: world.draw(tp, [0, 1, 2])):
        assert draws.ids.tolist() == [7, 150, 0]


def test_a_row_without_finite_logits_draws_nothing_and_harms_nobody(tmp_path: Path) -> None:
    world = SamplingWorld(every_kind())
    rows = list(range(len(world.specs)))
    expected = world.draw(single_rank(), rows).ids.tolist()
    broken = {0: float("nan"), 1: float("-inf"), 5: float("nan"), 7: float("nan"), 9: float("inf")}
    for row, value in broken.items():
        world.logits[row] = value
    for draws in (world.draw(single_rank(), rows), *run_ranks(2, tmp_path, lambda tp: world.draw(tp, rows))):
        assert torch.isfinite(draws.values).tolist() == [row not in broken for row in rows]
        assert all(0 <= token < VOCABULARY for token in draws.ids.tolist())
        assert [t for t, row in zip(draws.ids.tolist(), rows, strict=True) if row not in broken] == [
            t for t, row in zip(expected, rows, strict=True) if row not in broken
        ]


def test_a_row_draws_only_what_its_mask_allows() -> None:
    world = SamplingWorld([SamplingSpec(1, temperature=1.0)] * 2)
    tables, params = ReqToTokenPool(2, 100, 1, 16, CPU), SamplingTable(2)
    for slot in (0, 1):
        params.admit(Admission(slot, int32_array([1]), 1, 0, slot, world.specs[slot], LogprobSpec()))
    arrays = as_tensors(params.arrays(np.arange(2)))
    info = SamplingBatchInfo(2, torch.arange(2), torch.ones(2, dtype=torch.int64), arrays)
    sampler, free = Sampler(single_rank(), VOCABULARY, 0, tables), world.logits.clone()
    unmasked = sampler.draw(world.logits.clone(), info).ids.tolist()
    buffers = MaskBuffers(2, VOCABULARY, CPU)
    buffers.words[:2] = 0
    buffers.words[0, 33 // 32], buffers.words[1, 200 // 32] = 1 << 33 % 32, 1 << 200 % 32
    apply_token_masks(world.logits, buffers.upload([0, 1]), 0)
    assert sampler.draw(world.logits, info).ids.tolist() == [33, 200]
    apply_token_masks(free, buffers.upload([0]), 0)
    assert sampler.draw(free, info).ids.tolist() == [33, unmasked[1]]  # the other row draws as it would alone


@pytest.mark.parametrize(
    ("values", "top_k", "top_p", "min_p", "passing"),
    [
        ([4, 3, 3, 2, 1], 2, NO_TOP_P, 0.0, 3),  # ties with the k-th stay
        ([4, 3, 3, 2, 1], 99, NO_TOP_P, 0.0, 5),
        ([0, 0, 0, 0], 99, 0.5, 0.0, 4),  # all tie with the boundary
        ([2, 1, 0, -1], 99, 0.6440, 0.0, 2),  # the first alone has 0.64391…
        ([2, 1, 0, -1], 99, 0.6439, 0.0, 1),
        ([2, 1, 0, -1], 2, 0.7312, 0.0, 2),  # renormalised over two: the first alone has 0.7310…
        ([2, 1, 0, -1], 2, 0.7310, 0.0, 1),
        ([0, -1, -2, -3], 99, NO_TOP_P, 0.1353, 3),  # exp(-2) = 0.13533…
        ([0, -1, -2, -3], 99, NO_TOP_P, 0.1354, 2),
        ([0, -1, -1, -3], 99, NO_TOP_P, 1.0, 1),
        ([5, 5, -1, -3], 99, 1e-9, 1.0, 2),
        ([0, -200, -800], 3, NO_TOP_P, 0.0, 3),  # however unlikely, a row that asked for no filter keeps it
    ],
)
def test_filters_cut_by_value(values: list[float], top_k: int, top_p: float, min_p: float, passing: int) -> None:
    scaled = torch.tensor([values]).float()[:, torch.randperm(len(values))]
    threshold = filter_threshold(scaled, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert int((scaled >= threshold).sum()) == passing
