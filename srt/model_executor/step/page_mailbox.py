"""Which pages the rows of a decode step begin, from the host to the device without a copy: the device reads the host's memory.

A copy of as little and its event take the host 95 to 184 µs where its caches are cold, and behind prompts of many chunks some row begins a
page in every step.
"""

from __future__ import annotations

from typing import Final

import torch

from srt.model_executor.step.draw_store import RING, DrawStore
from srt.model_executor.step.slot_mirror import NewPages

PAGE_BITS: Final = 28
NUMBER_BITS: Final = 35  # of a store's number: so many stores take half a year


class PageMailbox:
    """`words` [RING, max_rows] int64, page-locked where there is a GPU: a row's word in entry `number % RING` is
    `number % 2 ** NUMBER_BITS << PAGE_BITS | page` where it begins that page in the step that ends with the store of this number; any other
    word means that it begins none.

    So nothing has to be wiped, if each step ends with a store. An entry is written for a step when the one that used it before has
    stored its draws.
    """

    def __init__(self, store: DrawStore, max_rows: int, device: torch.device) -> None:
        self.words = torch.full((RING, max_rows), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._entries = [memoryview(entry) for entry in self.words.numpy()]
        self._store = store

    def write(self, pages: NewPages) -> None:
        """For the step that ends with the next store that is launched."""
        number = self._store.next_number
        assert self._store.has_run(number - RING), f"the step before store {number - RING} may still read its pages"
        entry, begun = self._entries[number % RING], number % (1 << NUMBER_BITS) << PAGE_BITS
        for row, page in zip(pages.rows, pages.pages, strict=True):
            entry[row] = begun | page
