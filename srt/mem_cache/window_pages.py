"""The pages of layers that see only the last tokens of a request: who uses them, and which of them the prefix cache still has.

Such layers form a page group of their own, beside the first group, whose layers see all tokens. A page of the window group belongs to the
page of the first group that holds the same tokens:

    first group      [12] [ 3] [40] [ 7] [ 9]      pages of a prefix, all kept
    window group       -    -  [ 5] [ 0] [ 2]      its pages behind the window may have gone to others

It is in use while a running request may still read it. After that it can be evicted, but a later request may find it until then. When
the page of the first group is freed, the page that belongs to it is freed too.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.radix_cache import ITEM, NO_PAGES
from srt.protocol.messages import Int32Array, Int64Array

NONE: Final = -1
SHARED: Final = 2  # requests that found a page, from which on it counts as shared
_Ints = NDArray[np.intp]
_Line = deque[tuple[_Ints, int]]  # pages, and the time at which they came out of use


class WindowPages:
    """The pages of one window group, and the part of its page table that the workers were sent, by slot.

    A page that the window of a running request has left behind is evicted before one that was in a window when its request ended, and
    before one that a later request has found: those are the ones that a request that continues a prefix needs.
    """

    def __init__(self, window: int, num_pages: int, page_size: int, num_full_pages: int, num_slots: int) -> None:
        """`window` is the number of tokens that a token sees, its own included; `num_full_pages` the size of the first group."""
        self.window = window
        self.page_size = page_size
        self.most_columns = (window + page_size - 2) // page_size + 1  # pages that one token can need
        self._allocator = TokenToKVPoolAllocator(num_pages)
        self._page_of: Int32Array = np.full(num_full_pages, NONE, np.int32)  # by page of the first group
        self._full_of: Int32Array = np.full(num_pages, NONE, np.int32)  # the reverse; NONE: the page is free
        self._num_users: Int32Array = np.zeros(num_pages, np.int32)  # running requests
        self._num_found: Int32Array = np.zeros(num_pages, np.int32)  # requests that found it in the prefix cache
        self._unused_since: Int64Array = np.zeros(num_pages, np.int64)  # 0: in use, or free
        self._left_behind: _Line = deque()  # evicted first; both may have outdated entries
        self._ended: _Line = deque()
        self._num_in_lines = 0
        self._clock = 0
        self.num_evictable = 0
        self.sent = [NO_PAGES] * num_slots  # the pages of the slot's latest request, from its first column on
        self._num_told = [0] * num_slots  # bytes of them that plans have had
        self._first_sent = [0] * num_slots
        self._held_from: Int64Array = np.zeros(num_slots, np.int64)  # column of the first page that is in use
        self._held_until: Int64Array = np.zeros(num_slots, np.int64)
        self._expected: Int64Array = np.zeros(num_slots, np.int64)  # columns by the forecast; 0 for a free slot
        self._most: Int64Array = np.zeros(num_slots, np.int64)  # columns at most

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that are free, or used by no running request."""
        return self._allocator.num_free + self.num_evictable

    @property
    def num_promised(self) -> int:
        """Pages that running requests are still expected to take at a time."""
        return int((self._peaks() - self._held_until + self._held_from).clip(0).sum())

    def peak(self, columns: int) -> int:
        """Return the number of pages that a request with so many columns uses at a time."""
        return min(columns, self.most_columns)

    def held_by(self, slot: int) -> int:
        """Return the pages that the end of the slot's request makes available, including promised and shared ones."""
        held = int(self._held_until[slot] - self._held_from[slot])
        return max(held, int(self._peaks()[slot]))

    def num_usable(self, pages: bytes) -> int:
        """Return how many of these pages of the first group, a cached prefix, a request can use: the pages of its last window are there."""
        numbers = np.frombuffer(pages, np.int32)
        missing = np.flatnonzero(self._page_of[numbers] < 0)
        end = len(numbers)
        for column in missing[::-1].tolist():
            if column < self.first_column(end * self.page_size):
                break
            end = column
        return end

    def first_column(self, position: int) -> int:
        """Return the column of the first page that the token at `position` sees."""
        return max(0, position - self.window + 1) // self.page_size

    def begin(self, slot: int, cached: bytes) -> None:
        """Start the slot for a request with these pages of the first group, of which `num_usable` has found all usable."""
        count = len(cached) // ITEM
        first = self.first_column(count * self.page_size)
        pages = self._page_of[np.frombuffer(cached, np.int32)[first:]]
        assert int(pages.min(initial=0)) >= 0, f"a cached prefix of {count} pages lacks pages of its window"
        self.num_evictable -= int(np.count_nonzero(self._num_users[pages] == 0))
        self._num_users[pages] += 1
        self._unused_since[pages] = 0
        self._num_found[pages] += 1
        self.sent[slot], self._num_told[slot] = pages.tobytes(), 0
        self._first_sent[slot] = first
        self._held_from[slot], self._held_until[slot] = first, count

    def promise(self, slot: int, expected: int, most: int) -> None:
        """Expect the slot's request to have so many columns, by the forecast and at most."""
        self._expected[slot], self._most[slot] = expected, most

    def append(self, slots: list[int], full_pages: bytes) -> None:
        """Give each slot an equal part of new pages, one for each of these new pages of the first group."""
        pages = self._allocate(len(full_pages) // ITEM)
        numbers, owners = np.frombuffer(pages, np.int32), np.frombuffer(full_pages, np.int32)
        self._page_of[owners] = numbers
        self._full_of[numbers] = owners
        self._num_users[numbers] = 1
        self._num_found[numbers] = 0
        self._held_until[slots] += len(numbers) // len(slots)
        part, start = len(pages) // len(slots), 0
        for slot in slots:
            self.sent[slot] += pages[start : start + part]
            start += part

    def pop_untold(self, slot: int) -> bytes:
        """Return the slot's pages that no plan has had yet; the present one gets them."""
        pages = self.sent[slot][self._num_told[slot] :]
        self._num_told[slot] = len(self.sent[slot])
        return pages

    def slide(self, slots: Int64Array, positions: Int32Array) -> bool:
        """Let go of the pages that no token from `positions[i]` on of slot `slots[i]` sees. Return True if there were any."""
        firsts = (positions.astype(np.int64) - self.window + 1).clip(0) // self.page_size
        is_due = firsts > self._held_from[slots]
        if 1 not in is_due.tobytes():
            return False
        for slot, first in zip(slots[is_due].tolist(), firsts[is_due].tolist(), strict=True):
            pages = self._held(slot, first)
            self._held_from[slot] = first
            unused = self._stop_using(pages)
            found = self._num_found[unused] >= SHARED
            self._line_up(self._left_behind, unused[~found])
            self._line_up(self._ended, unused[found])
        return True

    def release(self, slot: int) -> None:
        """Let go of all pages of the slot: its request has ended or was preempted."""
        pages = self._held(slot, int(self._held_until[slot]))
        self._held_from[slot] = self._held_until[slot] = self._expected[slot] = self._most[slot] = 0
        self._line_up(self._ended, self._stop_using(pages))

    def forget(self, full_pages: bytes) -> None:
        """Free the pages that belong to these pages of the first group, which become free. No request may use them."""
        pages = self._page_of[np.frombuffer(full_pages, np.int32)]
        pages = pages[pages >= 0]
        if len(pages):
            assert not self._num_users[pages].any(), "a page is freed in the first group, but used in a window group"
            self._detach(pages.astype(np.intp))

    def exchange(self, kept: bytes, other: bytes) -> None:
        """The prefix cache keeps `kept`, while `other` hold the same tokens: let the pages of `other` belong to those that have none."""
        keeping, losing = np.frombuffer(kept, np.int32), np.frombuffer(other, np.int32)
        moves = (self._page_of[keeping] < 0) & (self._page_of[losing] >= 0)
        pages = self._page_of[losing[moves]]
        self._page_of[keeping[moves]] = pages
        self._full_of[pages] = keeping[moves]
        self._page_of[losing[moves]] = NONE

    def distrust(self, full_pages: bytes) -> None:
        """Free what belongs to these pages of the first group and is not in use: its contents may be wrong."""
        pages = self._page_of[np.frombuffer(full_pages, np.int32)]
        pages = pages[pages >= 0]
        self._detach(pages[self._num_users[pages] == 0].astype(np.intp))

    def check(self, running: list[int], free_full_pages: Int32Array) -> None:
        """Raise AssertionError unless every page is free or belongs to a page of the first group, and its users are counted right."""
        self._allocator.check()
        users = np.zeros(self.num_pages, np.int32)
        for slot in running:
            users[self._held(slot, int(self._held_until[slot]))] += 1
        assert users.tobytes() == self._num_users.tobytes(), "the users of a page of a window group are counted wrong"
        attached = np.flatnonzero(self._full_of >= 0)
        assert (self._page_of[self._full_of[attached]] == attached).all(), "a page of a window group belongs to two"
        assert np.count_nonzero(self._page_of >= 0) == len(attached), "a page of a window group is lost"
        assert (self._page_of[free_full_pages] < 0).all(), "a page of a window group belongs to a free page"
        assert len(attached) + self._allocator.num_free == self.num_pages, "a page of a window group is lost, or free"
        num_unused = int(np.count_nonzero(users[attached] == 0))
        assert num_unused == self.num_evictable, f"{num_unused} pages are unused, the count says {self.num_evictable}"

    def _peaks(self) -> Int64Array:
        peaks: Int64Array = np.where(self._held_until < self._expected, self._expected, self._most)
        return peaks.clip(0, self.most_columns)

    def _held(self, slot: int, end: int) -> _Ints:
        """Return the pages of the slot that are in use, up to column `end`."""
        first = self._first_sent[slot]
        start, stop = int(self._held_from[slot]) - first, end - first
        return np.frombuffer(self.sent[slot][start * ITEM : stop * ITEM], np.int32).astype(np.intp)

    def _stop_using(self, pages: _Ints) -> _Ints:
        """Count one user less of each of these pages, and return those that have none now."""
        self._num_users[pages] -= 1
        unused: _Ints = pages[self._num_users[pages] == 0]
        self.num_evictable += len(unused)
        return unused

    def _line_up(self, line: _Line, pages: _Ints) -> None:
        if not len(pages):
            return
        self._clock += 1
        self._unused_since[pages] = self._clock
        line.append((pages, self._clock))
        self._num_in_lines += len(pages)
        if self._num_in_lines > 4 * self.num_pages + 256:
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Remove the entries of pages that were used again or freed meanwhile."""
        self._num_in_lines = 0
        for line in (self._left_behind, self._ended):
            for _ in range(len(line)):
                pages, since = line.popleft()
                unused = self._still_unused(pages, since)
                if len(unused):
                    line.append((unused, since))
                    self._num_in_lines += len(unused)

    def _still_unused(self, pages: _Ints, since: int) -> _Ints:
        unused: _Ints = pages[self._unused_since[pages] == since]
        return unused

    def _allocate(self, count: int) -> bytes:
        missing = count - self._allocator.num_free
        while missing > 0:
            line = self._left_behind or self._ended
            assert line, f"{missing} pages of a window group are lacking, and none can be evicted"
            pages, since = line.popleft()
            self._num_in_lines -= len(pages)
            unused = self._still_unused(pages, since)
            if len(unused) > missing:  # the last go first, as those before them may still be found as a prefix
                line.appendleft((unused[:-missing], since))
                self._num_in_lines += len(unused) - missing
                unused = unused[-missing:]
            self._detach(unused)
            missing -= len(unused)
        return self._allocator.allocate(count)

    def _detach(self, pages: _Ints) -> None:
        """Free these pages, which have no user."""
        self._page_of[self._full_of[pages]] = NONE
        self._full_of[pages] = NONE
        self._unused_since[pages] = 0
        self.num_evictable -= len(pages)
        self._allocator.free(pages.astype(np.int32).tobytes())
