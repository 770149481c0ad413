"""Which pages of KV memory are free: a stack of page numbers."""

from __future__ import annotations

import numpy as np

from srt.protocol.messages import Int32Array


class TokenToKVPoolAllocator:
    """Every page is free or allocated: never both, never neither. The page freed last is given out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: Int32Array = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the first page is on top
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> Int32Array:
        """Take `count` pages. Whoever asks has made sure that they are there."""
        left = self._num_free - count
        assert left >= 0, f"{count} pages asked for, {self._num_free} are free"
        pages = self._stack[left : self._num_free][::-1].copy()
        self._num_free = left
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int32Array) -> None:
        """Give pages back: each must have been allocated, and comes back once."""
        count = len(pages)
        if count == 0:
            return
        assert not np.count_nonzero(self._is_free[pages]), f"pages freed twice: {pages[self._is_free[pages]].tolist()}"
        self._stack[self._num_free : self._num_free + count] = pages[::-1]
        self._num_free += count
        self._is_free[pages] = True

    def free_pages(self) -> Int32Array:
        return np.sort(self._stack[: self._num_free])

    def check(self) -> None:
        """AssertionError if the stack and the flags disagree."""
        flagged = np.flatnonzero(self._is_free)
        assert np.array_equal(self.free_pages(), flagged), "the stack of free pages holds a page twice or lost one"
