"""The two ends of a decode step in Triton's interpreter, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from srt.kernels.elementwise.gather_decode import gather_decode, store_draws
from srt.kernels.elementwise.gather_window import gather_window
from srt.mem_cache.memory_pool import DrawTables
from srt.model_executor.step.draw_store import store_draws_reference
from srt.model_executor.step.input_buffers import gather_decode_reference, gather_window_reference
from srt.model_executor.step.page_mailbox import NUMBER_BITS, PAGE_BITS
from srt.sampling.no_filter import NO_TOP_K

NUM_SLOTS, MAX_PAGES = 9, 5  # the dummy slot is the last
RING = 4


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

    def gather(self, function: Any, row_slots: torch.Tensor, words: torch.Tensor, last: int) -> list[torch.Tensor]:
        """What the rows gather behind store `last`, and what the tables hold then."""
        rows = len(row_slots)
        out = [torch.full((rows,), -7) for _ in range(4)]
        row_draws = DrawTables(*(torch.full((rows,), -7, dtype=table.dtype) for table in self.draws))
        tables = (self.pages, self.tokens, self.lens)
        function(
            row_slots, words, torch.tensor([last]), *tables, self.draws, NUM_SLOTS - 1, self.page_size, (PAGE_BITS, NUMBER_BITS),
            tuple(out), row_draws,
        )  # fmt: skip
        return [*tables, *out, *row_draws]


def words_of(new_pages: list[int], number: int, rows: int) -> torch.Tensor:
    """For the step that ends with this store; all else is of stores before."""
    random = torch.Generator().manual_seed(3)
    old = (number - torch.randint(1, 3 * RING, (RING, rows), generator=random)) % (1 << NUMBER_BITS)
    words = (old << PAGE_BITS) | torch.randint(0, 50, (RING, rows), generator=random)
    words[torch.rand(RING, rows, generator=random) < 0.2] = -1  # never written
    for row, page in enumerate(new_pages):
        if page >= 0:
            words[number % RING, row] = (number % (1 << NUMBER_BITS) << PAGE_BITS) | page
    return words


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("last", [0, 6, (1 << 35) - 2, (1 << 35) - 1, (1 << 36) + 5])
@pytest.mark.parametrize("rows", [[3], [2, 0, 7], [5, 1, 8, 8, 8, 8], [8, 8], [0, 1, 2, 3, 4, 5, 6, 7] + [8] * 40])
def test_rows_are_gathered_pages_entered_and_lengths_grown_but_for_the_dummy(
    page_size: int, last: int, rows: list[int]
) -> None:
    row_slots = torch.tensor(rows)
    new_pages = [60 + row if row % 2 == 0 else -1 for row in range(len(rows))]
    words = words_of(new_pages, last + 1, len(rows) + 2)
    expected = Tables(page_size).gather(gather_decode_reference, row_slots, words, last)
    found = Tables(page_size).gather(gather_decode, row_slots, words, last)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    before = Tables(page_size)
    pages, _, lens = found[:3]
    for slot, page in zip(rows, new_pages, strict=True):
        if slot != NUM_SLOTS - 1:
            column = int(before.lens[slot]) // page_size
            assert int(pages[slot, column]) == (page if page >= 0 else int(before.pages[slot, column]))
    assert int(lens[-1]) == 0, "the dummy slot has grown"
    assert torch.equal(pages[-1], before.pages[-1]), "the dummy slot was given a page"
    assert not torch.equal(lens, before.lens) or set(rows) == {8}


@pytest.mark.parametrize("rows", [[3], [5, 1, 8, 8, 8, 8], [0, 1, 2, 3, 4, 5, 6, 7] + [8] * 40])
def test_rows_find_their_places_in_a_window_group(rows: list[int]) -> None:
    row_slots, last, page_size = torch.tensor(rows), torch.tensor([6]), 4
    new_pages = [60 + row if row % 2 == 0 else -1 for row in range(len(rows))]
    words, positions = words_of(new_pages, 7, len(rows) + 2), Tables(page_size).lens[row_slots]
    found = []
    for function in (gather_window, gather_window_reference):
        pages, out = Tables(page_size).pages, torch.full((len(rows),), -7)
        function(row_slots, words, last, pages, positions, NUM_SLOTS - 1, page_size, (PAGE_BITS, NUMBER_BITS), out)
        found.append((pages, out))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], Tables(page_size).pages), "no page was entered"


MOST_ROWS, DUMMY = 600, 600


@pytest.mark.parametrize("counts", [[1], [5], [600], [40, 1, 257, 256, 3, 600, 2, 255, 9], [1] * 9])
@pytest.mark.parametrize("last", [0, (1 << 32) - 3])
def test_draws_reach_the_token_table_and_the_host(counts: list[int], last: int) -> None:
    """One store after the other, of more and of fewer rows than a block; the last rows are padding."""
    random = torch.Generator().manual_seed(2)
    nothing = torch.tensor([float("inf"), float("-inf"), float("nan")])
    tables = torch.zeros(2, MOST_ROWS + 1, 7, dtype=torch.int32)
    words = torch.full((2, RING, MOST_ROWS), -9)
    lasts = torch.full((2, 1), last)
    for number, count in enumerate(counts, last + 1):
        ids = torch.randint(0, 1 << 31, (count,), generator=random)
        values = torch.rand(count, generator=random) - 0.5
        values[1::3] = nothing.repeat(count)[: len(values[1::3])]
        row_slots, positions = torch.randperm(MOST_ROWS, generator=random)[:count], torch.arange(count) % 6
        row_slots[count - count // 4 :], ids[count - count // 4 :] = DUMMY, 0
        before = words[1].clone()
        store_draws_reference(ids, values, row_slots, positions, tables[0], words[0], lasts[0])
        store_draws(ids, values, row_slots, positions, tables[1], words[1], lasts[1])
        assert torch.equal(tables[0], tables[1])
        assert torch.equal(words[0], words[1])
        assert lasts.flatten().tolist() == [number, number]
        entry = words[1, number % RING]
        told = [-1 if row % 3 == 1 else drawn for row, drawn in enumerate(ids.tolist())]
        assert entry[:count].to(torch.int32).tolist() == told
        assert {word >> 32 & 0xFFFFFFFF for word in entry[:count].tolist()} == {number % (1 << 32)}
        others = torch.ones_like(before, dtype=torch.bool)
        others[number % RING, :count] = False
        assert torch.equal(words[1][others], before[others]), "something else was written to"
