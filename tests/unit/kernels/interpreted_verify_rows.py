"""The two ends of a step that verifies drafts in Triton's interpreter, against their references."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from srt.layers.sampler import Draws
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.model_executor.graphs.verified_tokens import (
    FIRSTS,
    LASTS,
    OFFSETS,
    ROW_FIRSTS,
    ROW_LENS,
    ROW_SLOTS,
    SLOTS,
    Accept,
    Gather,
    GatheredTokens,
    accept_reference,
    gather_reference,
    table_operations,
)

CPU = torch.device("cpu")
NUM_SLOTS, MAX_TOKENS, LENGTH, VOCAB = 8, 40, 60, 7
MOST = 5  # tokens of a row
KERNELS: tuple[Gather, Accept] = table_operations(torch.device("cuda"))


class World(NamedTuple):
    tables: ReqToTokenPool
    staged: torch.Tensor
    num_tokens: int  # those of padding not counted


def world_of(counts: dict[int, int], page_size: int, windows: tuple[int, ...] = ()) -> World:
    """Tables with random contents, and the staged numbers of a step with a number of tokens of each slot; the same on every call."""
    random = torch.Generator().manual_seed(1)
    tables = ReqToTokenPool(NUM_SLOTS, LENGTH, 50, page_size, CPU, windows, [50] * len(windows))
    tables.page_tables.copy_(torch.randint(0, 50, tables.page_tables.shape, generator=random, dtype=torch.int32))
    tables.token_table.copy_(torch.randint(0, VOCAB, tables.token_table.shape, generator=random, dtype=torch.int32))
    tables.seq_lens.copy_(torch.randint(0, LENGTH - MOST - 1, (NUM_SLOTS + 1,), generator=random))
    tables.seq_lens[NUM_SLOTS] = 0
    for table in tables.draws:
        table.copy_((torch.rand(NUM_SLOTS + 1, generator=random, dtype=torch.float64) * 1000).to(table.dtype))
    staged = torch.zeros((7, MAX_TOKENS), dtype=torch.int64)
    staged[SLOTS] = staged[ROW_SLOTS] = NUM_SLOTS
    staged[FIRSTS] = torch.arange(MAX_TOKENS)
    staged[LASTS] = 1
    first = 0
    for row, (slot, count) in enumerate(counts.items()):
        tokens = slice(first, first + count)
        staged[SLOTS, tokens], staged[OFFSETS, tokens] = slot, torch.arange(count)
        staged[FIRSTS, tokens], staged[LASTS, tokens] = first, 0
        staged[LASTS, first + count - 1] = 1
        staged[ROW_SLOTS, row], staged[ROW_LENS, row], staged[ROW_FIRSTS, row] = slot, count, first
        first += count
    rows = slice(len(counts), len(counts) + MAX_TOKENS - first)  # of padding, a token each
    staged[ROW_LENS, rows], staged[ROW_FIRSTS, rows] = 1, torch.arange(first, MAX_TOKENS)
    return World(tables, staged, first)


ROWS = [{3: 1}, {2: 4, 0: 1, 7: 5}, {5: 2, 1: 3}, dict.fromkeys(range(NUM_SLOTS), MOST)]


@pytest.mark.parametrize("counts", ROWS, ids=str)
@pytest.mark.parametrize(("page_size", "windows"), [(1, ()), (4, (16,)), (16, (8, 32))])
def test_tokens_gather_what_the_tables_have(counts: dict[int, int], page_size: int, windows: tuple[int, ...]) -> None:
    world = world_of(counts, page_size, windows)
    found = [GatheredTokens.allocate(world.tables, MAX_TOKENS, CPU) for _ in range(2)]
    for gathered, gather in zip(found, (gather_reference, KERNELS[0]), strict=True):
        for size in (world.num_tokens, MAX_TOKENS):
            gather(world.staged, world.tables, gathered.first(size))
    (*numbers, draws), (*wanted, wanted_draws) = found[1], found[0]
    assert all(torch.equal(a, b) for a, b in zip(numbers, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(draws, wanted_draws, strict=True))
    assert int(found[1].positions.max()) > 0
    slot, count = next(iter(counts.items()))
    length = int(world.tables.seq_lens[slot])
    assert found[1].positions[:count].tolist() == list(range(length, length + count))


@pytest.mark.parametrize("counts", ROWS, ids=str)
@pytest.mark.parametrize("num_right", range(MOST + 1))
@pytest.mark.parametrize("void", [None, "first", "second"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_draws_count_up_to_the_first_that_differs(
    counts: dict[int, int], num_right: int, void: str | None, is_padded: bool
) -> None:
    found = []
    for accept in (accept_reference, KERNELS[1]):
        world = world_of(counts, 4)
        size = MAX_TOKENS if is_padded else world.num_tokens
        slots, offsets = world.staged[SLOTS, :size], world.staged[OFFSETS, :size]
        drafted = world.tables.tokens(slots, world.tables.seq_lens[slots] + offsets + 1)
        values = torch.rand(size, generator=torch.Generator().manual_seed(2))
        if void is not None:
            values[offsets == (void == "second")] = float("nan") if num_right % 2 else float("inf")
        draws = Draws(torch.where(offsets < num_right, drafted, VOCAB), values)
        outcome = torch.full((MAX_TOKENS,), -9)
        before = world.tables.seq_lens.clone()
        accept(world.staged, draws, world.tables, MOST, outcome[:size])
        found.append((world.tables.token_table, world.tables.seq_lens, outcome))
        grown = (world.tables.seq_lens - before).tolist()
        if void is None:
            assert {slot: grown[slot] for slot in counts} == {slot: min(num_right + 1, n) for slot, n in counts.items()}
        assert sum(grown) == sum(grown[slot] for slot in counts), "another slot has grown"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
