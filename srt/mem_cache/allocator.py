"""Allocator for the pages of KV memory."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from srt.mem_cache.radix_cache import ITEM, NO_PAGES
from srt.protocol.messages import Int32Array

NUM_READY: Final = 256  # fresh pages are prepared in batches of this size


class TokenToKVPoolAllocator:
    """Keeps every page either free or allocated. Freed pages are checked before any of them is allocated again.

    Page numbers come and go as bytes: consecutive int32 values. The next pages to allocate are kept in `_ready`. When it runs out it is
    refilled with the pages freed meanwhile, the last one first, and then with fresh pages, which were never allocated.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._fresh = 0  # pages from this number on were never allocated
        self._ready = NO_PAGES
        self._next = 0  # offset in `_ready`, in bytes; the pages before it are allocated
        self._given_back: list[bytes] = []
        self._is_free: NDArray[np.bool_] = np.ones(num_pages, np.bool_)  # as of the last call of `_settle`
        self._num_flagged = num_pages

    def allocate(self, count: int) -> bytes:
        """Take `count` pages. The caller must have checked `num_free`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} are free"
        self.num_free -= count
        if self._next + count * ITEM > len(self._ready):
            self._settle()
            missing = count - len(self._ready) // ITEM
            if missing > 0:
                self._ready += self._allocate_fresh(max(missing, NUM_READY))
        start = self._next
        self._next += count * ITEM
        return self._ready[start : self._next]

    def free(self, pages: bytes) -> None:
        """Give pages back: each must be allocated, and may be freed once. A violation may raise its AssertionError only later."""
        if pages:
            self.num_free += len(pages) // ITEM
            self._given_back.append(pages)

    def free_pages(self) -> Int32Array:
        """Return the numbers of all free pages, unordered."""
        self._settle()
        ready = np.frombuffer(self._ready, np.int32)
        return np.concatenate((ready, np.arange(self._fresh, self.num_pages, dtype=np.int32)))

    def check(self) -> None:
        """Raise AssertionError if the ready pages, the flags and the count disagree."""
        pages = self.free_pages()
        assert len(pages) == self.num_free, f"{len(pages)} pages are free, the count says {self.num_free}"
        is_free = np.zeros(self.num_pages, np.bool_)
        is_free[pages] = True
        assert is_free.tobytes() == self._is_free.tobytes(), "a page is free that is not flagged, or the reverse"
        assert np.count_nonzero(is_free) == len(pages), "a page is free twice"

    def _settle(self) -> None:
        """Update the flags for pages allocated and freed since the last call, and move the freed ones to `_ready`."""
        given_out, rest = self._ready[: self._next], self._ready[self._next :]
        if given_out:
            self._is_free[_numbers(given_out)] = False
            self._num_flagged -= len(given_out) // ITEM
        self._given_back.reverse()
        back = b"".join(self._given_back)
        self._given_back.clear()
        self._ready, self._next = back + rest, 0
        if back:
            pages = _numbers(back)
            were_free = self._is_free[pages]
            assert 1 not in were_free.tobytes(), f"pages {pages[were_free].tolist()} are freed twice"
            self._is_free[pages] = True
            self._num_flagged += len(pages)
            flagged = int(np.count_nonzero(self._is_free))
            assert flagged == self._num_flagged, f"of the pages {pages.tolist()} one is freed twice"

    def _allocate_fresh(self, most: int) -> bytes:
        first, self._fresh = self._fresh, min(self._fresh + most, self.num_pages)
        return np.arange(first, self._fresh, dtype=np.int32).tobytes()


def _numbers(pages: bytes) -> NDArray[np.intp]:
    return np.frombuffer(pages, np.int32).astype(np.intp)
