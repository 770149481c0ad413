"""What the host knows of a worker's slots: enough to plan a step without asking the device."""

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
    """What the request in a slot wants reported."""

    prompt_len: int
    spec: LogprobSpec


class NewPages(NamedTuple):
    """The rows whose next position begins a page, and these pages. Lists: they are few as a rule, and the ways of arrays are long."""

    rows: list[int]
    pages: list[int]


class _Due(NamedTuple):
    """Who begins a page in a step, and what its plan says then, byte for byte."""

    rows: list[int]
    slots: bytes
    counts: bytes

    def is_all_of(self, delta: PageDelta) -> bool:
        """Whether just these are given a page each."""
        return (
            delta.slots.tobytes() == self.slots
            and delta.counts.tobytes() == self.counts
            and len(delta.pages) == len(self.rows)
        )


NOBODY = _Due([], b"", b"")


@dataclass(slots=True)
class DecodeRows:
    """Rows that decode, for as many steps as have just them: what the mirror has of their slots is looked up once.

    Who begins a page comes round with the page size, and is worked out once too. A step only counts: the mirror's own arrays follow
    when somebody asks for them (`SlotMirror.catch_up`).
    """

    slots: Ints
    lengths: Ints  # when they were looked up
    until: Ints  # positions from there to each row's next page
    page_size: int
    num_steps: int = 0  # since then
    new_pages: NewPages | None = None  # of the last step
    _irregular: int = -1  # steps until each has begun a page within the last page's steps; -1: not worked out yet
    _due: dict[int, _Due] = field(default_factory=dict)

    @property
    def room(self) -> Ints:
        """Positions in the pages of each."""
        num_begun: Ints = np.maximum(0, -((self.until - self.num_steps) // self.page_size))
        room: Ints = self.lengths + self.until + self.page_size * num_begun
        return room

    def due(self) -> _Due:
        """Who begins a page in the next step."""
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
    """Plans in the order of their numbers go in, and what a plan may rely on comes out. A plan that does not fit is a fault."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
        self._num_slots = num_slots
        self._num_all_pages = num_pages
        self._page_size = page_size
        self._lengths: Ints = np.zeros(num_slots, np.int64)
        self._room: Ints = np.zeros(num_slots, np.int64)  # positions in its pages
        self._num_cached: Ints = np.zeros(num_slots, np.int64)  # positions that were computed when it was admitted
        self._first_page: Ints = np.zeros(num_slots, np.int64)
        self._was_admitted: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._ahead: DecodeRows | None = None  # have gone on since `_lengths` and `_room` were written
        self.slot_logprobs: dict[int, SlotLogprobs] = {}  # of the slots whose requests want any

    def admit(self, admission: Admission) -> None:
        """The slot begins anew: no pages, `cached` positions computed."""
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

    def append_pages(self, delta: PageDelta) -> tuple[Ints, Ints]:
        """For every page of the delta its slot and its number within the slot."""
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

    def advance(self, section: PlanSection) -> Ints:
        """Lengths of all rows, extends then decodes, once the step is done; they are the slots' lengths from now on."""
        extends = section.extend_slots.astype(np.int64)
        rows = np.concatenate((extends, section.decode_slots.astype(np.int64)))
        starts, counts = section.extend_starts.astype(np.int64), section.extend_counts.astype(np.int64)
        assert np.array_equal(self._lengths[extends], starts), f"chunks at {starts}, computed {self._lengths[extends]}"
        assert (counts > 0).all(), f"chunks of {counts} tokens"
        lengths = np.concatenate((starts + counts, self._lengths[rows[len(extends) :]] + 1))
        room = self._room[rows]
        assert (lengths <= room).all(), f"rows of {lengths} tokens in pages for {room}"
        self._lengths[rows] = lengths
        return lengths

    def decode_rows(self, slots: Ints) -> DecodeRows | None:
        """Of these slots; None where pages are missing for what is computed."""
        self.catch_up()
        lengths = self._lengths[slots]
        until = self._room[slots] - lengths
        return DecodeRows(slots, lengths, until, self._page_size) if until.min(initial=0) >= 0 else None

    def advance_decodes(self, rows: DecodeRows, delta: PageDelta | None) -> bool:
        """Whether pages come for just the rows that begin one, in their order: then the rows and their slots are a position longer.

        Else nothing has changed. Nothing but this may have changed the slots since the rows were looked up.
        """
        assert self._ahead is None or self._ahead is rows, "rows that were looked up before others"
        due = rows.due()
        new_pages = None
        if due.rows or (delta is not None and len(delta.slots)):
            if delta is None or not due.is_all_of(delta):
                return False
            new_pages = NewPages(due.rows, delta.pages.tolist())
            if min(new_pages.pages) < 0 or max(new_pages.pages) >= self._num_all_pages:
                return False
        rows.new_pages = new_pages
        rows.num_steps += 1
        self._ahead = rows
        return True

    def catch_up(self) -> None:
        """With the rows whose steps were only counted. To be called before slots are changed or looked at in any other way."""
        rows, self._ahead = self._ahead, None
        if rows is not None:
            self._lengths[rows.slots], self._room[rows.slots] = rows.lengths + rows.num_steps, rows.room

    def most_shared(self, slots: Ints, block_rows: int) -> int:
        """Of blocks of so many rows, at most so many positions do rows share with their block's first row, in one block.

        Pages are shared from the first on, and only those that were computed when a row was admitted.
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
        """Slot -> pages given to its latest admission, for the slots that were ever admitted."""
        self.catch_up()
        slots: Sequence[int] = np.flatnonzero(self._was_admitted).tolist()
        return {slot: int(self._room[slot]) // self._page_size for slot in slots}
