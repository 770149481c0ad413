"""Penalties, biases and held-back stops in Triton's interpreter: the logits of the reference, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.kernels.sampling.adjust_logits import BLOCK, MOST_ROWS, AdjustmentKernels
from srt.layers.logit_adjustments import adjust_logits
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.protocol.messages import Admission, LogprobSpec, SamplingSpec, int32_array
from srt.sampling.logit_adjustments import AdjustmentArrays
from srt.sampling.sampling_batch_info import SamplingTable

CPU = torch.device("cpu")
VOCABULARY = 611
LONGEST = 3 * BLOCK
WITHOUT = 5  # of the specs below: they leave their logits alone


def specs() -> list[SamplingSpec]:
    rng = np.random.default_rng(1)
    ids = int32_array(rng.permutation(VOCABULARY)[: BLOCK + 40])
    values = rng.normal(0, 3, len(ids)).astype(np.float32)
    return [
        SamplingSpec(9, repetition_penalty=1.3),
        SamplingSpec(9, frequency_penalty=0.37),
        SamplingSpec(9, presence_penalty=-0.7),
        SamplingSpec(9, repetition_penalty=0.7, frequency_penalty=-0.1, presence_penalty=1.9),
        SamplingSpec(9, bias_ids=ids, bias_values=values),
        SamplingSpec(9, temperature=0.3),
        SamplingSpec(9, min_new_tokens=4000, stop_ids=ids[::2]),
        SamplingSpec(9, min_new_tokens=1, stop_ids=ids[::2]),
        SamplingSpec(
            9, repetition_penalty=1.1, min_new_tokens=4000, stop_ids=ids[:9], bias_ids=ids[:20], bias_values=values[:20]
        ),
    ]


class World:
    """A slot for each spec, in another order; with prompts and outputs of many lengths, of few different tokens."""

    def __init__(self, num_distinct: int) -> None:
        rng = np.random.default_rng(num_distinct)
        count = len(specs())
        self.tables, table = ReqToTokenPool(count, LONGEST, 1, 16, CPU), SamplingTable(count)
        self.slots = torch.from_numpy(rng.permutation(count))
        self.lengths = torch.from_numpy(rng.integers(2, LONGEST, count))
        for spec, slot, length in zip(specs(), self.slots.tolist(), self.lengths.tolist(), strict=True):
            ids = rng.choice(rng.permutation(VOCABULARY)[:num_distinct], LONGEST + 1)
            prompt_len = int(rng.integers(1, length))
            table.admit(Admission(slot, int32_array(ids[:length]), prompt_len, 0, 0, spec, LogprobSpec()))
            self.tables.token_table[slot] = torch.from_numpy(ids)  # what is behind the length is of an earlier request
        adjustments = table.adjustments_of(self.slots.tolist())
        self.tables.adjustments.admit(
            AdjustmentArrays(*[torch.from_numpy(getattr(adjustments, n)) for n in adjustments.__slots__])
        )

    def differences(
        self, kernels: AdjustmentKernels, rows: torch.Tensor, shard_start: int, columns: int
    ) -> torch.Tensor:
        """Which logits of these rows the kernels change; they are asserted to be those of the reference."""
        torch.manual_seed(0)
        before = torch.randn(len(rows), columns) * 4
        before[:, 3] = 0.0
        before[0, 5] = float("-inf")
        expected, found = before.clone(), before.clone()
        rest = (self.tables.token_table, self.tables.adjustments, shard_start)
        adjust_logits(expected, self.slots[rows], self.lengths[rows], *rest)
        kernels(found, self.slots[rows], self.lengths[rows], *rest)
        assert torch.equal(found, expected)
        assert not kernels.counts.any(), "the scratch is not as it was"
        return found != before


@pytest.mark.parametrize("num_distinct", [1, 40, VOCABULARY])
@pytest.mark.parametrize(("shard_start", "columns"), [(0, VOCABULARY), (0, 306), (306, 306)])
def test_logits_are_those_of_the_reference(shard_start: int, columns: int, num_distinct: int) -> None:
    world = World(num_distinct)
    rows = torch.arange(len(specs()))
    kernels = AdjustmentKernels.allocate(len(rows), columns, CPU)
    changed = world.differences(kernels, rows, shard_start, columns).any(dim=1)
    assert not changed[[WITHOUT, 7]].any(), "a row without adjustments, or with stops that may come"
    if num_distinct > 1:
        assert changed.sum() == len(rows) - 2
    world.differences(kernels, rows.flip(0), shard_start, columns)


def test_more_rows_than_the_scratch_holds_take_turns() -> None:
    world = World(40)
    count = len(specs())
    kernels = AdjustmentKernels(torch.zeros((4, VOCABULARY), dtype=torch.int32))
    world.differences(kernels, torch.arange(count), 0, VOCABULARY)
    assert len(AdjustmentKernels.allocate(MOST_ROWS + 9, 7, CPU).counts) == MOST_ROWS
