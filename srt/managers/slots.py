"""The counters of all running requests, one column a slot, so that a step handles its rows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from srt.mem_cache.tables_hash import tables_hash
from srt.protocol.messages import Int32Array, Int64Array

NUM_STOPS = 8  # stop ids of a request that are checked for all rows at once; who has more is looked at alone
NO_STOP = -1


class SlotTable:
    """What the scheduler counts per slot. A column is meaningful while its `incarnation` is not 0.

    Of a request's positions, `computed` have been given to the workers; its prompt and `num_output` sampled tokens are known,
    `submitted` samples are known or on their way. Where a step may bring a row several ids, or none, these two count the most that
    is possible, until its result is here. The row of `pages` stays as sent until the slot is admitted anew: that is what
    the workers hold too.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._columns: Int64Array = np.zeros((13, num_slots), np.int64)
        (
            self.incarnation,  # number of the admission that has the slot; 0: the slot is free
            self.serial,  # arrival of the request
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
        ) = self._columns
        self.stops: Int32Array = np.full((num_slots, NUM_STOPS), NO_STOP, np.int32)
        self.many_stops: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.pages: Int32Array = np.zeros((num_slots, 16), np.int32)
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

    def fill(
        self,
        slot: int,
        *,
        incarnation: int,
        serial: int,
        frontend: int,
        rid: int,
        choice: int,
        max_new: int,
        outputs: Int32Array,
        cached: int,
        sent: int,
        stop_ids: Int32Array,
    ) -> None:
        """Everything about the request that has been given this slot."""
        count = len(outputs)
        self._columns[:, slot] = (
            *(incarnation, serial, frontend, rid, choice, max_new, count, cached, sent),
            *(count, cached, 0, 0),  # submitted, computed, num_pages, planned_at
        )
        if count:
            self.make_room_for_outputs(count)
            self.outputs[slot, :count] = outputs
        self.stops[slot] = NO_STOP
        self.stops[slot, : len(stop_ids)] = stop_ids[:NUM_STOPS]
        self.many_stops[slot] = len(stop_ids) > NUM_STOPS

    def release(self, slot: int) -> None:
        assert self.incarnation[slot] != 0, f"slot {slot} is released twice"
        self.incarnation[slot] = 0
        self.sent[slot] = self.num_output[slot] = 0
        self._free.append(slot)

    def append_pages(self, slot: int, pages: Int32Array) -> None:
        start = int(self.num_pages[slot])
        end = start + len(pages)
        self._make_room_for_pages(end)
        self.pages[slot, start:end] = pages
        self.num_pages[slot] = end

    def append_page_each(self, slots: Int64Array, pages: Int32Array) -> None:
        """One more page for each of these slots."""
        places = self.num_pages[slots]
        self._make_room_for_pages(int(places.max()) + 1)
        self.pages[slots, places] = pages
        self.num_pages[slots] = places + 1

    def pages_of(self, slot: int) -> Int32Array:
        return self.pages[slot, : self.num_pages[slot]]

    def outputs_of(self, slot: int) -> Int32Array:
        return self.outputs[slot, : self.num_output[slot]]

    def make_room_for_outputs(self, width: int) -> None:
        self.outputs = _widened(self.outputs, width)

    def tables_hash(self) -> str:
        """The digest of the page tables that workers have who did everything they were told."""
        return tables_hash({slot: self.pages_of(slot).tolist() for slot in np.flatnonzero(self._was_admitted).tolist()})

    def used_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.incarnation)]

    def check(self) -> None:
        """AssertionError unless every slot is free or used, once."""
        assert sorted([*self._free, *self.used_slots()]) == list(range(self.num_slots)), "a slot is lost or doubled"

    def _make_room_for_pages(self, width: int) -> None:
        self.pages = _widened(self.pages, width)


def _widened(table: Int32Array, width: int) -> Int32Array:
    """The table with at least `width` columns; doubled, so that a column costs little however many come."""
    if width <= table.shape[1]:
        return table
    wider: Int32Array = np.zeros((table.shape[0], max(width, 2 * table.shape[1])), np.int32)
    wider[:, : table.shape[1]] = table
    return wider
