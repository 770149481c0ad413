"""The page group of a fake worker's layers that see only the last tokens.

It knows no more than plans say: which pages each slot was given, and which tokens a step has written there. A page may go to another
request at any time, and nothing is said about that; so what a row reads is compared with what it must find, in every step.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from srt.protocol.messages import Int32Array, Int64Array, PageDelta
from tests.scheduler.reference import UInt64Array
from tests.scheduler.settings import Settings, Window

_NOT_WRITTEN = 0


class FakeWindow:
    """The group's table and memory. `hashes` are those of the worker's slots, by position."""

    def __init__(self, window: Window, settings: Settings, hashes: UInt64Array, rules: Counter[str]) -> None:
        s = settings
        self._size, self._window, self._num_all = s.page_size, window.tokens, window.num_pages
        self._hashes, self._rules = hashes, rules
        self._pages: Int32Array = np.zeros((s.num_slots, hashes.shape[1] // s.page_size + 2), np.int32)
        self._first = [0] * s.num_slots  # column of the first page that the slot was given
        self._end = [0] * s.num_slots
        self._admissions = [0] * s.num_slots
        self._num_admissions = 0
        self._page_hash: UInt64Array = np.zeros(window.num_pages, np.uint64)
        self._writer: Int64Array = np.zeros(window.num_pages, np.int64)  # the admission whose request writes the page
        self._seen_from: Int64Array = np.zeros(s.num_slots, np.int64)  # before the last step, the next position
        self._slack = 0 if s.row_tokens == 1 else s.row_tokens * (s.most_in_flight + 2)

    def admit(self, slot: int, cached: int) -> None:
        self._num_admissions += 1
        self._admissions[slot] = self._num_admissions
        self._first[slot] = self._end[slot] = self._column(cached)

    def take_pages(self, delta: PageDelta, all_columns: Int64Array, cached: dict[int, int]) -> None:
        """`all_columns` are the pages that each slot has in the first group now, and `cached` the tokens of those just admitted."""
        assert int(delta.counts.sum()) == len(delta.pages), "a page delta's columns do not match"
        assert not len(delta.pages) or 0 <= delta.pages.min() <= delta.pages.max() < self._num_all, "no such page"
        given, start = list[tuple[Int32Array, int]](), 0
        for slot, count in zip(delta.slots.tolist(), delta.counts.tolist(), strict=True):
            first, end = self._end[slot], self._end[slot] + count
            assert end == all_columns[slot], (
                f"slot {slot} has {end} columns in one group, {all_columns[slot]} in another"
            )
            self._pages[slot, first:end] = delta.pages[start : start + count]
            own = self._pages[slot, max(first, cached.get(slot, 0) // self._size) : end]
            given.append((own, self._admissions[slot]))
            self._end[slot], start = end, start + count
        for own, admission in given:
            self._writer[own] = admission
            self._page_hash[own] = _NOT_WRITTEN
        self._rules["rule: a window's page has one writer"] += bool(given)
        for own, admission in given:
            assert (self._writer[own] == admission).all(), "a plan gives a page of a window to two slots"

    def read(self, slot: int, position: int) -> None:
        """The slot's row reads what the token at this position sees, before anything is written in this step."""
        first, end = self._column(position), position // self._size
        held = self._page_hash[self._pages[slot, first:end]]
        wanted = self._hashes[slot, (first + 1) * self._size - 1 : end * self._size : self._size]
        assert first >= self._first[slot], f"slot {slot} lacks pages of its window at position {position}"
        wrong = (held != wanted).nonzero()[0]
        self._rules["rule: a window's pages hold what its row reads"] += len(held) > 0
        assert not len(wrong), f"slot {slot} reads page {first + wrong[0]} at {position}, which holds something else"
        if position % self._size:
            writer = self._writer[self._pages[slot, end]]
            assert writer == self._admissions[slot], f"slot {slot} goes on in a page of its window that was given away"

    def write(self, slot: int, start: int, end: int) -> None:
        """These positions are computed."""
        first, last = start // self._size, end // self._size
        writers = self._writer[self._pages[slot, first : -(-end // self._size)]]
        assert (writers == self._admissions[slot]).all(), f"slot {slot} writes a page of its window that is not its own"
        wanted = self._hashes[slot, (first + 1) * self._size - 1 : end : self._size]
        self._page_hash[self._pages[slot, first:last]] = wanted

    def note_lengths(self, lengths: Int64Array) -> None:
        """Before a step: so many positions are computed."""
        self._seen_from = lengths.copy()

    def pages_of(self, slot: int) -> list[int]:
        numbers: list[int] = self._pages[slot, self._first[slot] : self._end[slot]].tolist()
        return numbers

    def check_given_back(self, slots: list[int], lengths: Int64Array, num_used: int) -> None:
        """Pages that nobody will read are not kept: as many are in use as windows of those that run have."""
        least, most = self._num_in(slots, lengths), self._num_in(slots, self._seen_from - self._slack)
        self._rules["rule: pages behind windows are given back"] += most < sum(self._end[slot] for slot in slots)
        assert least <= num_used <= most, f"{num_used} pages of windows are in use, not {least} to {most}"

    def _num_in(self, slots: list[int], lengths: Int64Array) -> int:
        used: NDArray[np.bool_] = np.zeros(self._num_all, np.bool_)
        for slot in slots:
            used[self._pages[slot, max(self._column(int(lengths[slot])), self._first[slot]) : self._end[slot]]] = True
        return int(np.count_nonzero(used))

    def _column(self, position: int) -> int:
        """Of the first page that the token at this position sees."""
        return max(0, position - self._window + 1) // self._size
