"""What the host knows of a worker's slots: enough to plan a step without asking the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection

Ints = NDArray[np.int64]
ONE = np.ones(1, np.int32).tobytes()


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """What the request in a slot wants reported."""

    prompt_len: int
    spec: LogprobSpec


@dataclass(slots=True)
class DecodeRows:
    """Rows that decode, as the last step leaves them: what the mirror has of their slots, looked up once for all steps of just them.

    `lengths` and `new_pages` are other arrays after each step.
    """

    slots: Ints
    lengths: Ints
    room: Ints  # positions in their pages
    new_pages: Ints | None = None  # the page that each row's last position begins, or -1; None: no row begins one


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
        self._no_pages: Ints = np.full(num_slots, -1, np.int64)
        self.logprob_wishes: dict[int, LogprobWish] = {}  # of the slots whose requests want any

    def admit(self, admission: Admission) -> None:
        """The slot begins anew: no pages, `cached` positions computed."""
        slot, num_ids = admission.slot, len(admission.ids)
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        assert 0 <= admission.cached < num_ids, f"{admission.cached} of {num_ids} tokens cached in slot {slot}"
        assert 0 < admission.prompt_len <= num_ids, f"prompt of {admission.prompt_len} among {num_ids} tokens"
        self._lengths[slot] = self._num_cached[slot] = admission.cached
        self._room[slot] = 0
        self._was_admitted[slot] = True
        self.logprob_wishes.pop(slot, None)
        if admission.logprobs.output or admission.logprobs.prompt_start >= 0:
            self.logprob_wishes[slot] = LogprobWish(admission.prompt_len, admission.logprobs)

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
        lengths, room = self._lengths[slots], self._room[slots]
        return DecodeRows(slots, lengths, room) if (lengths <= room).all() else None

    def advance_decodes(self, rows: DecodeRows, delta: PageDelta | None) -> bool:
        """Whether pages come for just the rows that begin one, in their order: then the rows and their slots are a position longer.

        Else nothing has changed. Nothing but this may have changed the slots since the rows were looked up.
        """
        (begin,) = (rows.lengths == rows.room).nonzero()
        if len(begin) != (0 if delta is None else len(delta.slots)):
            return False
        new_pages = None
        if delta is not None and len(begin):
            slots = rows.slots[begin]
            if not self._gives_one_each(delta, slots):
                return False
            rows.room[begin] = self._room[slots] = rows.room[begin] + self._page_size
            new_pages = self._no_pages[: len(rows.slots)].copy()
            new_pages[begin] = delta.pages
        rows.new_pages = new_pages
        rows.lengths = self._lengths[rows.slots] = rows.lengths + 1
        return True

    def _gives_one_each(self, delta: PageDelta, slots: Ints) -> bool:
        """Comparing bytes is the quickest, and negative numbers are large ones without a sign."""
        return (
            delta.slots.tobytes() == slots.astype(np.int32).tobytes()
            and delta.counts.tobytes() == ONE * len(slots)
            and len(delta.pages) == len(slots)
            and 0 not in (delta.pages.view(np.uint32) < self._num_all_pages).tobytes()
        )

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
        slots: Sequence[int] = np.flatnonzero(self._was_admitted).tolist()
        return {slot: int(self._room[slot]) // self._page_size for slot in slots}
