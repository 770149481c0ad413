"""Which pages of KV memory are free: a stack of page numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Int32Array

FEW = 32  # pages that are looked at one by one


class TokenToKVPoolAllocator:
    """Every page is free or allocated: never both, never neither. The page freed last is given out first.

    Page numbers come and go as bytes, int32 values end to end.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: Int32Array = np.arange(num_pages, dtype=np.int32)  # the free pages are those from `_top` on
        self._stack_bytes = self._stack.data.cast("B")
        self._top = 0
        self._is_free = bytearray(b"\1" * num_pages)

    @property
    def num_free(self) -> int:
        return self.num_pages - self._top

    def allocate(self, count: int) -> bytes:
        """Take `count` pages. Whoever asks has made sure that they are there."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} are free"
        start = self._top
        self._top += count
        pages = self._stack_bytes[start * ITEM : self._top * ITEM].tobytes()
        self._mark(pages, 0)
        return pages

    def free(self, pages: bytes) -> None:
        """Give pages back: each must have been allocated, and comes back once."""
        count = len(pages) // ITEM
        if count == 0:
            return
        self._mark(pages, 1)
        end = self._top
        self._top -= count
        self._stack_bytes[self._top * ITEM : end * ITEM] = pages

    def free_pages(self) -> Int32Array:
        return np.sort(self._stack[self._top :])

    def check(self) -> None:
        """AssertionError if the stack and the flags disagree."""
        flagged = np.flatnonzero(np.frombuffer(self._is_free, np.uint8))
        assert np.array_equal(self.free_pages(), flagged), "the stack of free pages holds a page twice or lost one"

    def _mark(self, pages: bytes, is_free: int) -> None:
        """AssertionError if one of them is marked so already."""
        flags = self._is_free
        if len(pages) > FEW * ITEM:
            self._mark_many(np.frombuffer(pages, np.int32), is_free)
            return
        for page in memoryview(pages).cast("i"):
            assert flags[page] != is_free, f"page {page} is {'freed' if is_free else 'given out'} twice"
            flags[page] = is_free

    def _mark_many(self, pages: Int32Array, is_free: int) -> None:
        flags: NDArray[np.uint8] = np.frombuffer(self._is_free, np.uint8)
        twice = pages[flags[pages] == is_free]
        assert not len(twice), f"pages {twice.tolist()} are {'freed' if is_free else 'given out'} twice"
        flags[pages] = is_free
