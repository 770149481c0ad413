"""Pages of decode steps on their way to the device: each is entered in its own step, and in no other."""

from __future__ import annotations

import random

import pytest
import torch

from srt.layers.sampler import Draws
from srt.model_executor.step.draw_store import RING, DrawStore
from srt.model_executor.step.page_mailbox import NUMBER_BITS, PAGE_BITS, PageMailbox

CPU = torch.device("cpu")
MAX_ROWS = 5


def store_behind(last: int) -> DrawStore:
    """As it is after so many steps."""
    store = DrawStore.allocate(CPU, MAX_ROWS, window=2)
    store.last.fill_(last)
    store._number = last
    for back in range(RING):
        store._words[(last - back) % RING] = (store.last - back) << 32
    return store


def finish_step(store: DrawStore) -> None:
    draws = Draws(torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    store.store(draws, torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))


def pages_of_next_step(store: DrawStore, board: PageMailbox) -> dict[int, int]:
    """As the device finds them."""
    number = int(store.last) + 1
    words, tag = board.words[number % RING].tolist(), number % (1 << NUMBER_BITS)
    return {row: word & ((1 << PAGE_BITS) - 1) for row, word in enumerate(words) if word >> PAGE_BITS == tag}


@pytest.mark.parametrize("last", [0, (1 << 32) - 3, (1 << NUMBER_BITS) - RING, (1 << NUMBER_BITS) - 2])
def test_a_step_finds_its_own_pages_and_none_of_another_step(last: int) -> None:
    """Behind any number of steps, also where their numbers begin anew."""
    rng, store = random.Random(1), store_behind(last)
    board = PageMailbox(store, MAX_ROWS, CPU)
    num_begun = 0
    for _ in range(5 * RING):
        begun = {row: rng.randrange(1 << PAGE_BITS) for row in range(MAX_ROWS) if rng.random() < 0.4}
        if begun:
            board.write(list(begun), list(begun.values()))
        assert pages_of_next_step(store, board) == begun
        num_begun += len(begun)
        finish_step(store)
    assert num_begun > MAX_ROWS * RING


def test_pages_that_a_step_may_still_read_are_not_overwritten() -> None:
    words, last = torch.zeros((RING, MAX_ROWS), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    store = DrawStore(words, last, lambda *tensors: True, lambda: False)  # a device that has not begun
    board = PageMailbox(store, MAX_ROWS, CPU)
    for page in range(RING):
        board.write([0], [page])
        finish_step(store)
    with pytest.raises(AssertionError, match="the step that ends with store 1 may still read its pages"):
        board.write([0], [9])
    assert [word & 0xF for word in board.words[:, 0].tolist()] == [7, 0, 1, 2, 3, 4, 5, 6]
    words[1, 0] = 1 << 32  # it has done the first
    board.write([0], [9])
