"""The counters of all running requests, one column a slot, so that a step handles its rows at once."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from srt.managers.request import Request
from srt.mem_cache.radix_cache import ITEM
from srt.mem_cache.tables_hash import tables_hash
from srt.protocol.messages import Int32Array, Int64Array

NUM_STOPS = 8  # stop ids of a request that are checked for all rows at once; who has more is looked at alone
NO_STOPS = b"\xff" * 4 * NUM_STOPS  # no token has the id -1
_ROW = struct.Struct("12q")


class SlotTable:
    """What the scheduler counts per slot. A column is meaningful while its `incarnation` is not 0.

    Steps read and write columns, at an index of rows. One slot's number is had by the memoryview of its column (`computed_at` is
    that of `computed`), which costs a fraction of an array's item.

    Of a request's positions, `computed` have been given to the workers; its prompt and `num_output` sampled tokens are known,
    `submitted` samples are known or on their way. Where a step may bring a row several ids, or none, these two count the most that
    is possible, until its result is here. The row of `pages` stays as sent until the slot is admitted anew: that is what
    the workers hold too.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._table: Int64Array = np.zeros((num_slots, 12), np.int64)
        (
            self.incarnation,  # number of the admission that has the slot; 0: the slot is free
            self.frontend,
            self.rid,
            self.choice,
            self.max_new,
            self.num_output,
            self.cached,  # tokens that it found in the prefix cache
            self.sent,  # outputs that the frontend was sent
            self.submitted,
            self.computed,
            self.num_pages,
            self.planned_at,  # the last step that had the row
        ) = self._table.T
        self._table_bytes = self._table.data.cast("B")
        self.incarnation_at: memoryview[int] = self.incarnation.data
        self.num_output_at: memoryview[int] = self.num_output.data
        self.sent_at: memoryview[int] = self.sent.data
        self.submitted_at: memoryview[int] = self.submitted.data
        self.computed_at: memoryview[int] = self.computed.data
        self.num_pages_at: memoryview[int] = self.num_pages.data
        self.stream: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.stops: Int32Array = np.full((num_slots, NUM_STOPS), -1, np.int32)
        self._stops_bytes = self.stops.data.cast("B")
        self.many_stops: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.has_many_stops = False  # any slot, ever
        self.most_stops = 1  # of those, so many columns of `stops` were ever used
        self.pages: Int32Array = np.zeros((num_slots, 16), np.int32)
        self._pages_bytes = self.pages.data.cast("B")
        self.outputs: Int32Array = np.zeros((num_slots, 64), np.int32)
        self._was_admitted: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self) -> int:
        slot = self._free.pop()
        self._was_admitted[slot] = True
        return slot

    def fill(self, request: Request, num_cached: int) -> None:
        """Everything about the request that has been given this slot, and how many of its tokens the cache has."""
        slot, outputs, sampling = request.slot, request.outputs, request.sampling
        count = len(outputs)
        _ROW.pack_into(
            self._table_bytes,
            slot * _ROW.size,
            request.incarnation,
            request.frontend,
            request.rid,
            request.choice,
            sampling.max_new_tokens,
            count,
            request.cached_tokens,
            request.sent,
            count,  # submitted
            num_cached,  # computed
            0,  # pages
            0,  # planned at
        )
        if count:
            self.make_room_for_outputs(count)
            self.outputs[slot, :count] = outputs
        self.stream[slot] = request.stream
        self._fill_stops(slot, sampling.stop_ids.tobytes())

    def _fill_stops(self, slot: int, stops: bytes) -> None:
        num_stops, start = len(stops) // ITEM, slot * len(NO_STOPS)
        self._stops_bytes[start : start + len(NO_STOPS)] = (stops + NO_STOPS)[: len(NO_STOPS)]
        self.most_stops = max(self.most_stops, min(num_stops, NUM_STOPS))
        if num_stops > NUM_STOPS or self.has_many_stops:
            self.has_many_stops = True
            self.many_stops[slot] = num_stops > NUM_STOPS

    def release(self, slot: int) -> None:
        assert self.incarnation_at[slot] != 0, f"slot {slot} is released twice"
        self.incarnation_at[slot] = 0
        self.sent_at[slot] = self.num_output_at[slot] = 0
        self._free.append(slot)

    def append_pages(self, slot: int, pages: bytes) -> None:
        first = self.num_pages_at[slot]
        end = first + len(pages) // ITEM
        self._make_room_for_pages(end)
        start = (slot * self.pages.shape[1] + first) * ITEM
        self._pages_bytes[start : start + len(pages)] = pages
        self.num_pages_at[slot] = end

    def append_page_each(self, slots: Int64Array, pages: Int32Array) -> None:
        """One more page for each of these slots."""
        places = self.num_pages[slots]
        self._make_room_for_pages(int(places.max()) + 1)
        self.pages[slots, places] = pages
        self.num_pages[slots] = places + 1

    def pages_of(self, slot: int, first: int = 0, end: int | None = None) -> bytes:
        """Those from number `first` up to `end`; all that it has, if nobody says otherwise."""
        start = slot * self.pages.shape[1]
        end = self.num_pages_at[slot] if end is None else end
        return self._pages_bytes[(start + first) * ITEM : (start + end) * ITEM].tobytes()

    def outputs_of(self, slot: int) -> Int32Array:
        return self.outputs[slot, : self.num_output_at[slot]]

    def make_room_for_outputs(self, width: int) -> None:
        if width > self.outputs.shape[1]:
            self.outputs = _widened(self.outputs, width)

    def tables_hash(self) -> str:
        """The digest of the page tables that workers have who did everything they were told."""
        slots = np.flatnonzero(self._was_admitted).tolist()
        return tables_hash({slot: np.frombuffer(self.pages_of(slot), np.int32) for slot in slots})

    def used_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.incarnation)]

    def check(self) -> None:
        """AssertionError unless every slot is free or used, once."""
        assert sorted([*self._free, *self.used_slots()]) == list(range(self.num_slots)), "a slot is lost or doubled"

    def _make_room_for_pages(self, width: int) -> None:
        if width > self.pages.shape[1]:
            self.pages = _widened(self.pages, width)
            self._pages_bytes = self.pages.data.cast("B")


def _widened(table: Int32Array, width: int) -> Int32Array:
    """The table with at least `width` columns; doubled, so that a column costs little however many come."""
    wider: Int32Array = np.zeros((table.shape[0], max(width, 2 * table.shape[1])), np.int32)
    wider[:, : table.shape[1]] = table
    return wider
