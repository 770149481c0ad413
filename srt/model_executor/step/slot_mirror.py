"""The host's record of a worker's slots, from which a step is planned without asking the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from srt.protocol.arrays import int32_bytes
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection

Ints = NDArray[np.int64]
ONE = int32_bytes([1])


@dataclass(frozen=True, slots=True)
class SlotLogprobs:
    """The logprobs that the request in a slot wants reported."""

    prompt_len: int
    spec: LogprobSpec


class NewPages(NamedTuple):
    """The rows whose next position begins a page, and these pages. Lists, because they are short and small arrays are slow."""

    rows: list[int]
    pages: list[int]
    window_pages: Sequence[list[int]] = ()  # likewise, in the page groups after the first


class _Due(NamedTuple):
    """The rows that begin a page in a step, and the bytes that the plan must then contain."""

    rows: list[int]
    slots: bytes
    counts: bytes

    def is_all_of(self, deltas: list[PageDelta]) -> bool:
        """Return whether each of the deltas gives one page to each of these rows and to no other."""
        return all(
            delta.slots.tobytes() == self.slots
            and delta.counts.tobytes() == self.counts
            and len(delta.pages) == len(self.rows)
            for delta in deltas
        )


NOBODY = _Due([], b"", b"")


@dataclass(slots=True)
class DecodeRows:
    """A set of decoding rows, kept for consecutive steps of exactly these rows, so that their slots are looked up once.

    Which rows begin a page repeats with the page size, and is computed once too. A step only increments a counter; `SlotMirror.catch_up`
    updates the mirror's own arrays when they are needed.
    """

    slots: Ints
    lengths: Ints  # when the rows were looked up
    until: Ints  # positions from there to each row's next page
    page_size: int
    num_steps: int = 0  # since the rows were looked up
    new_pages: NewPages | None = None  # of the last step
    _irregular: int = -1  # steps after which the pattern of new pages repeats; -1: not computed yet
    _due: dict[int, _Due] = field(default_factory=dict)

    @property
    def room(self) -> Ints:
        """Number of positions in the pages of each row."""
        num_begun: Ints = np.maximum(0, -((self.until - self.num_steps) // self.page_size))
        room: Ints = self.lengths + self.until + self.page_size * num_begun
        return room

    def due(self) -> _Due:
        """Return the rows that begin a page in the next step."""
        step, size = self.num_steps, self.page_size
        if step >= size and self._irregular < 0:
            self._irregular = max(0, int(self.until.max()) + 1 - size)
        key = step % size if step >= max(size, self._irregular) else size + step
        found = self._due.get(key)
        if found is None:
            found = self._due[key] = self._find_due(step)
        return found

    def _find_due(self, step: int) -> _Due:
        if step < self.page_size:
            is_due = self.until == step
        else:
            is_due = (self.until <= step) & ((step - self.until) % self.page_size == 0)
        (rows,) = is_due.nonzero()
        if not len(rows):
            return NOBODY
        return _Due(rows.tolist(), self.slots[rows].astype(np.int32).tobytes(), ONE * len(rows))


class SlotMirror:
    """Follows the plans in order and knows each slot's length and pages. Raises AssertionError for a plan that contradicts this."""

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        windows: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        """`windows` and `window_pages` are those of the page groups after the first."""
        self._num_slots = num_slots
        self._windows, self._window_pages = windows, window_pages
        self._num_all_pages = num_pages
        self._page_size = page_size
        self._lengths: Ints = np.zeros(num_slots, np.int64)
        self._room: Ints = np.zeros(num_slots, np.int64)  # positions in its pages
        self._num_cached: Ints = np.zeros(num_slots, np.int64)  # positions computed before it was admitted
        self._first_page: Ints = np.zeros(num_slots, np.int64)
        self._was_admitted: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._ahead: DecodeRows | None = None  # rows whose steps are not yet in `_lengths` and `_room`
        self.slot_logprobs: dict[int, SlotLogprobs] = {}  # only for slots whose requests want any

    def admit(self, admission: Admission) -> None:
        """Start the slot for a new request, with no pages and `cached` positions computed."""
        slot, num_ids = admission.slot, len(admission.ids)
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        assert 0 <= admission.cached < num_ids, f"{admission.cached} of {num_ids} tokens cached in slot {slot}"
        assert 0 < admission.prompt_len <= num_ids, f"prompt of {admission.prompt_len} among {num_ids} tokens"
        self._lengths[slot] = self._num_cached[slot] = admission.cached
        self._room[slot] = 0
        self._was_admitted[slot] = True
        self.slot_logprobs.pop(slot, None)
        if admission.logprobs.output or admission.logprobs.prompt_start >= 0:
            self.slot_logprobs[slot] = SlotLogprobs(admission.prompt_len, admission.logprobs)

    def append_window_pages(self, group: int, delta: PageDelta, first: PageDelta) -> tuple[Ints, Ints]:
        """Do what `append_pages` does for a later group. `first` is the delta of the first group, which was added already."""
        assert int(delta.counts.sum()) == len(delta.pages), f"{delta.counts.sum()} pages, {len(delta.pages)} numbers"
        assert np.array_equal(delta.slots, first.slots), f"pages of group {group} for {delta.slots}, not {first.slots}"
        least, most, count = delta.pages.min(initial=0), delta.pages.max(initial=0), self._window_pages[group - 1]
        assert least >= 0 and most < count, f"pages {least} to {most} of {count} in group {group}"
        slots = delta.slots.astype(np.int64)
        ends = self._room[slots] // self._page_size
        begins = np.maximum(ends - first.counts, self._first_columns(group, slots))
        assert np.array_equal(ends - begins, delta.counts), (
            f"{delta.counts} pages in group {group}, not {ends - begins}"
        )
        ranges = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        return np.repeat(slots, delta.counts), np.concatenate([*ranges, np.zeros(0, np.int64)]).astype(np.int64)

    def _first_columns(self, group: int, slots: Ints) -> Ints:
        """Return the column of the first page of each of these slots that the workers know in this group."""
        firsts: Ints = np.maximum(self._num_cached[slots] - self._windows[group - 1] + 1, 0) // self._page_size
        return firsts

    def append_pages(self, delta: PageDelta) -> tuple[Ints, Ints]:
        """Add the delta's pages, and return for each page its slot and its index within the slot."""
        assert int(delta.counts.sum()) == len(delta.pages), f"{delta.counts.sum()} pages, {len(delta.pages)} numbers"
        least, most = delta.pages.min(initial=0), delta.pages.max(initial=0)
        assert least >= 0 and most < self._num_all_pages, f"pages {least} to {most} of {self._num_all_pages}"
        columns: list[int] = []
        for slot, count in zip(delta.slots.tolist(), delta.counts.tolist(), strict=True):
            held = int(self._room[slot]) // self._page_size
            if not held and count:
                self._first_page[slot] = delta.pages[len(columns)]
            columns.extend(range(held, held + count))
            self._room[slot] = (held + count) * self._page_size
        return np.repeat(delta.slots.astype(np.int64), delta.counts), np.asarray(columns, np.int64)

    def lengths_and_room(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the lengths of these slots, and the numbers of positions in their pages."""
        self.catch_up()
        return self._lengths[slots], self._room[slots]

    def set_lengths(self, slots: Ints, lengths: Ints) -> None:
        """Correct the lengths of slots whose step has computed positions that do not count."""
        self.catch_up()
        self._lengths[slots] = lengths

    def advance(self, section: PlanSection, decode_counts: Ints | int = 1) -> Ints:
        """Advance the slots by a step, and return the lengths of all rows after it, extend rows first.

        `decode_counts` are the numbers of tokens of the decode rows.
        """
        extends = section.extend_slots.astype(np.int64)
        rows = np.concatenate((extends, section.decode_slots.astype(np.int64)))
        starts, counts = section.extend_starts.astype(np.int64), section.extend_counts.astype(np.int64)
        assert np.array_equal(self._lengths[extends], starts), f"chunks at {starts}, computed {self._lengths[extends]}"
        assert (counts > 0).all(), f"chunks of {counts} tokens"
        lengths = np.concatenate((starts + counts, self._lengths[rows[len(extends) :]] + decode_counts))
        room = self._room[rows]
        assert (lengths <= room).all(), f"rows of {lengths} tokens in pages for {room}"
        self._lengths[rows] = lengths
        return lengths

    def decode_rows(self, slots: Ints) -> DecodeRows | None:
        """Look up the rows of these slots; None if a slot has fewer pages than its length needs."""
        self.catch_up()
        lengths = self._lengths[slots]
        until = self._room[slots] - lengths
        return DecodeRows(slots, lengths, until, self._page_size) if until.min(initial=0) >= 0 else None

    def advance_decodes(self, rows: DecodeRows, deltas: list[PageDelta]) -> bool:
        """Advance the rows and their slots by one position, if each delta has pages for exactly the rows that begin one, in their order.

        Otherwise return False and change nothing. Only this method may have changed the slots since the rows were looked up.
        """
        assert self._ahead is None or self._ahead is rows, (
            "these rows were looked up before others, so they are out of date"
        )
        due = rows.due()
        new_pages = None
        if due.rows or (deltas and len(deltas[0].slots)):
            if not deltas or not due.is_all_of(deltas):
                return False
            pages, *others = [delta.pages.tolist() for delta in deltas]
            if min(pages) < 0 or max(pages) >= self._num_all_pages:
                return False
            if any(min(some) < 0 or max(some) >= n for some, n in zip(others, self._window_pages, strict=True)):
                return False
            new_pages = NewPages(due.rows, pages, others)
        rows.new_pages = new_pages
        rows.num_steps += 1
        self._ahead = rows
        return True

    def catch_up(self) -> None:
        """Apply the steps that were only counted. Must be called before slots are read or changed in any other way."""
        rows, self._ahead = self._ahead, None
        if rows is not None:
            self._lengths[rows.slots], self._room[rows.slots] = rows.lengths + rows.num_steps, rows.room

    def most_shared(self, slots: Ints, block_rows: int) -> int:
        """Return the number of positions that rows share with the first row of their block, summed over the block with the most.

        Blocks have `block_rows` rows. Rows share their first pages, and only those that were cached when the row was admitted.
        """
        cached = self._num_cached[slots]
        if not cached.any():
            return 0
        pages, starts = self._first_page[slots], np.arange(0, len(slots), block_rows)
        is_same = pages == np.repeat(pages[starts], block_rows)[: len(slots)]
        sharers = np.add.reduceat(is_same, starts, dtype=np.int64)
        shared = np.add.reduceat(np.where(is_same, cached, 0), starts)
        return int(np.where(sharers > 1, shared, 0).max())

    def num_pages_of_admitted(self) -> dict[int, int]:
        """Return, for every slot that was ever admitted, the number of pages of its latest admission."""
        self.catch_up()
        slots: Sequence[int] = np.flatnonzero(self._was_admitted).tolist()
        return {slot: int(self._room[slot]) // self._page_size for slot in slots}

    def first_column(self, group: int, slot: int) -> int:
        """Return the column of the slot's first page that plans have had in this group."""
        return int(self._first_columns(group, np.array([slot]))[0]) if group else 0
