"""Send the new pages of a decode step to the device without a copy: the device reads the host's pinned memory.

Such a small copy and its event take the host 95 to 184 µs with cold caches, and after prompts of many chunks some row begins a page in
every step.
"""

from __future__ import annotations

from typing import Final

import torch

from srt.model_executor.step.draw_store import RING, DrawStore

PAGE_BITS: Final = 28
NUMBER_BITS: Final = 35  # of a store's number, which wraps around after half a year


class PageMailbox:
    """Words that say which row begins which page. `words` [RING, max_rows] int64 is pinned if there is a GPU.

    A step is named by the number of the store at its end, and uses entry `number % RING`. A row that begins a page has the word
    `number % 2 ** NUMBER_BITS << PAGE_BITS | page`; any other word means that the row begins none, so entries need not be cleared. An entry
    is written for a step once the step that used it before has stored its draws.
    """

    def __init__(self, store: DrawStore, max_rows: int, device: torch.device) -> None:
        self.words = torch.full((RING, max_rows), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._entries = [memoryview(entry) for entry in self.words.numpy()]
        self._store = store

    def write(self, rows: list[int], pages: list[int]) -> None:
        """Write the pages of these rows for the step that ends with the next store to be launched."""
        number = self._store.next_number
        assert self._store.has_run(number - RING), (
            f"the step that ends with store {number - RING} may still read its pages"
        )
        entry, begun = self._entries[number % RING], number % (1 << NUMBER_BITS) << PAGE_BITS
        for row, page in zip(rows, pages, strict=True):
            entry[row] = begun | page
