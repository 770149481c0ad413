"""The two ends of a decode step in Triton's interpreter, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from srt.kernels.gather_decode import gather_decode, store_draws
from srt.mem_cache.memory_pool import DrawTables
from srt.model_executor.input_buffers import gather_decode_reference, store_draws_reference
from srt.sampling.no_filter import NO_TOP_K

NUM_SLOTS, MAX_PAGES = 9, 5  # the dummy slot is the last


class Tables:
    """Slots of various lengths; the same on every call."""

    def __init__(self, page_size: int) -> None:
        random = torch.Generator().manual_seed(1)
        length = MAX_PAGES * page_size
        self.page_size = page_size
        self.pages = torch.randint(0, 50, (NUM_SLOTS, MAX_PAGES), generator=random, dtype=torch.int32)
        self.tokens = torch.randint(0, 1000, (NUM_SLOTS, length), generator=random, dtype=torch.int32)
        self.lens = torch.randint(0, length, (NUM_SLOTS,), generator=random)
        self.lens[-1] = 0
        self.draws = DrawTables(
            torch.rand(NUM_SLOTS, generator=random),
            torch.randint(-(1 << 63), (1 << 63) - 1, (NUM_SLOTS,), generator=random),
            torch.randint(0, NO_TOP_K, (NUM_SLOTS,), generator=random),
            torch.rand(NUM_SLOTS, generator=random, dtype=torch.float64),
            torch.rand(NUM_SLOTS, generator=random, dtype=torch.float64),
        )

    def gather(self, function: Any, row_slots: torch.Tensor, new_pages: torch.Tensor) -> list[torch.Tensor]:
        """What the rows gather, and what the tables hold then."""
        rows = len(row_slots)
        out = [torch.full((rows,), -7) for _ in range(4)]
        row_draws = DrawTables(*(torch.full((rows,), -7, dtype=table.dtype) for table in self.draws))
        tables = (self.pages, self.tokens, self.lens)
        function(
            row_slots, new_pages, *tables, self.draws, NUM_SLOTS - 1, self.page_size, tuple(out), row_draws
        )  # fmt: skip
        return [*tables, *out, *row_draws]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [[3], [2, 0, 7], [5, 1, 8, 8, 8, 8], [8, 8], [0, 1, 2, 3, 4, 5, 6, 7] + [8] * 40])
def test_rows_are_gathered_pages_entered_and_lengths_grown_but_for_the_dummy(page_size: int, rows: list[int]) -> None:
    row_slots = torch.tensor(rows)
    new_pages = torch.full((len(rows),), -1)
    new_pages[::2] = 60
    expected = Tables(page_size).gather(gather_decode_reference, row_slots, new_pages)
    found = Tables(page_size).gather(gather_decode, row_slots, new_pages)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    before = Tables(page_size)
    pages, _, lens = found[:3]
    assert int(lens[-1]) == 0, "the dummy slot has grown"
    assert torch.equal(pages[-1], before.pages[-1]), "the dummy slot was given a page"
    assert not torch.equal(lens, before.lens) or set(rows) == {8}


@pytest.mark.parametrize("count", [1, 5, 40])
def test_draws_reach_the_token_table_and_the_host(count: int) -> None:
    nothing = torch.tensor([float("inf"), float("-inf"), float("nan")])
    ids, values = torch.arange(count) * 3, torch.arange(count) - 5.0
    values[1::3] = nothing.repeat(count)[: len(values[1::3])]
    row_slots, positions = torch.randperm(count + 2)[:count], torch.arange(count) % 6
    tables = torch.zeros(2, count + 2, 7, dtype=torch.int32)
    sampled = torch.full((2, count), -5, dtype=torch.int32)
    store_draws_reference(ids, values, row_slots, positions, tables[0], sampled[0])
    store_draws(ids, values, row_slots, positions, tables[1], sampled[1])
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(sampled[0], sampled[1])
    assert sampled[0].tolist() == [3 * i if i % 3 != 1 else -1 for i in range(count)]
