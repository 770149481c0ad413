"""The counters of all running requests, one column a number, so that a step handles its rows at once."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM, NO_PAGES
from srt.mem_cache.tables_hash import tables_hash
from srt.protocol.messages import Int32Array, Int64Array

NUM_STOPS: Final = 8  # stop ids of a request that are checked for all rows at once; who has more is looked at alone
NO_STOP: Final = b"\xff\xff\xff\xff"  # no token has the id -1
ONE = np.ones(1, np.int32).tobytes()
ROW = struct.Struct("3q10i4s4x")  # of the table: columns of int64, of int32, and the bytes of a stop id
ROW_BYTES: Final = 72


class SlotTable:
    """What the scheduler counts per slot. A number is meaningful while the slot's `incarnation` is not 0.

    Steps read and write columns, at an index of rows. One slot's number is had by the memoryview of its column (`computed_at` is
    that of `computed`), which costs a fraction of an array's item.

    Of a request's positions, `computed` have been given to the workers; its prompt and `num_output` sampled tokens are known.
    A row decodes until `computed` is `most_computed`: then all samples that it may have are known or on their way. Where a step
    may bring a row several ids, or none, `computed` counts the most that is possible, until its result is here. A slot's pages stay
    as sent until it is filled anew: that is what the workers hold too.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        table = np.zeros((num_slots, ROW_BYTES), np.uint8)
        self._table_bytes = table.data.cast("B")
        self._pack_row = ROW.pack_into
        numbers: Int64Array = table.view(np.int64).T
        self.incarnation: Int64Array = numbers[0]  # number of its admission; 0: the slot is free
        self.rid: Int64Array = numbers[1]
        self.planned_at: Int64Array = numbers[2]  # the last step that had the row
        columns: Int32Array = table.view(np.int32).T[6:]
        self.frontend: Int32Array = columns[0]
        self.choice: Int32Array = columns[1]
        self.max_new: Int32Array = columns[2]
        self.num_output: Int32Array = columns[3]
        self.cached: Int32Array = columns[4]  # tokens that it found in the prefix cache
        self.sent: Int32Array = columns[5]  # outputs that the frontend was sent
        self.computed: Int32Array = columns[6]
        self.most_computed: Int32Array = columns[7]
        self.num_pages: Int32Array = columns[8]
        self.stream: Int32Array = columns[9]
        self.incarnation_at: memoryview[int] = self.incarnation.data
        self.num_output_at: memoryview[int] = self.num_output.data
        self.sent_at: memoryview[int] = self.sent.data
        self.computed_at: memoryview[int] = self.computed.data
        self._num_pages_at: memoryview[int] = self.num_pages.data
        self.pages = [NO_PAGES] * num_slots
        stops: Int32Array = np.full((NUM_STOPS, num_slots), -1, np.int32)
        self.stops = [columns[10], *stops[1:]]
        self.many_stops: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.has_many_stops = False  # any slot, ever
        self.most_stops = 1  # of those, so many columns of `stops` were ever used
        self._outputs_width = 64
        self._outputs_bytes = bytearray(num_slots * 64 * ITEM)
        self._outputs: Int32Array = np.frombuffer(self._outputs_bytes, np.int32)
        self._most_output = 0  # at most so many has any slot that is used
        self._is_used = [False] * num_slots
        self._was_admitted = [False] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self) -> int:
        slot = self._free.pop()
        self._is_used[slot] = self._was_admitted[slot] = True
        return slot

    def fill(self, request: Request, cached: bytes, num_cached: int) -> None:
        """Everything about the request that has been given this slot, and the pages and tokens of it that the cache has."""
        slot, stops, num_output = request.slot, request.stop_ids, request.num_output
        self._pack_row(
            self._table_bytes,
            slot * ROW_BYTES,
            request.incarnation,
            request.rid,
            0,  # planned at
            request.frontend,
            request.choice,
            request.max_new,
            num_output,
            request.cached_tokens,
            request.sent,
            num_cached,  # computed
            request.max_tokens - 1,
            len(cached) // ITEM,
            request.stream,
            stops[:ITEM] if stops else NO_STOP,
        )
        self.pages[slot] = cached
        if num_output:
            self._most_output = max(self._most_output, num_output)
            self._make_room_for_outputs(num_output)
            start = slot * self._outputs_width * ITEM
            self._outputs_bytes[start : start + len(request.outputs)] = request.outputs
        if self.most_stops > 1 or len(stops) > ITEM:
            self._fill_stops(slot, np.frombuffer(stops, np.int32).tolist())

    def _fill_stops(self, slot: int, stops: list[int]) -> None:
        self.most_stops = max(self.most_stops, min(len(stops), NUM_STOPS))
        for column in range(1, self.most_stops):
            self.stops[column][slot] = stops[column] if column < len(stops) else -1
        self.has_many_stops |= len(stops) > NUM_STOPS
        self.many_stops[slot] = len(stops) > NUM_STOPS

    def release(self, slot: int) -> None:
        assert self._is_used[slot], f"slot {slot} is released twice"
        self._is_used[slot] = False
        self.incarnation_at[slot] = 0
        self.num_output_at[slot] = 0  # so nothing of it is to be sent
        self._free.append(slot)

    def num_pages_of(self, slot: int) -> int:
        return len(self.pages[slot]) // ITEM

    def pages_of(self, slot: int, first: int, end: int) -> bytes:
        """Those from number `first` up to `end`."""
        return self.pages[slot][first * ITEM : end * ITEM]

    def append_pages(self, slot: int, pages: bytes) -> None:
        self.pages[slot] += pages
        self._num_pages_at[slot] = len(self.pages[slot]) // ITEM

    def append_outputs(self, rows: Int64Array, ids: Int32Array) -> Int32Array:
        """One more id for each of these slots. How many each has then."""
        lengths = self.num_output[rows]
        self._most_output += 1
        if self._most_output > self._outputs_width:
            self._most_output = int(self.num_output.max()) + 1
            self._make_room_for_outputs(self._most_output)
        self._outputs[rows * self._outputs_width + lengths] = ids
        lengths += 1
        self.num_output[rows] = lengths
        return lengths

    def outputs_of(self, slot: int) -> bytes:
        start = slot * self._outputs_width
        return bytes(self._outputs_bytes[start * ITEM : (start + self.num_output_at[slot]) * ITEM])

    def outputs_from(self, rows: Int64Array, first: Int32Array, counts: Int32Array) -> Int32Array:
        """`counts[i]` outputs of the slot `rows[i]`, from number `first[i]` on, end to end."""
        starts = rows * self._outputs_width + first
        if counts.tobytes() == ONE * len(rows):
            one_each: Int32Array = self._outputs[starts]
            return one_each
        ranges = zip(starts.tolist(), counts.tolist(), strict=True)
        return np.concatenate([self._outputs[start : start + count] for start, count in ranges])

    def tables_hash(self) -> str:
        """The digest of the page tables that workers have who did everything they were told."""
        slots = [slot for slot in range(self.num_slots) if self._was_admitted[slot]]
        return tables_hash({slot: np.frombuffer(self.pages[slot], np.int32) for slot in slots})

    def used_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.incarnation)]

    def check(self) -> None:
        """AssertionError unless every slot is free or used, once, and has as many pages as are counted."""
        used = self.used_slots()
        assert sorted([*self._free, *used]) == list(range(self.num_slots)), "a slot is lost or doubled"
        assert all(self.num_pages_of(slot) == int(self.num_pages[slot]) for slot in used), (
            "a slot's pages are counted wrong"
        )

    def _make_room_for_outputs(self, width: int) -> None:
        """At least so much; doubled, so that a column costs little however many come."""
        if width > self._outputs_width:
            before, self._outputs_width = self._outputs.reshape(self.num_slots, -1), max(width, 2 * self._outputs_width)
            self._outputs_bytes = bytearray(self.num_slots * self._outputs_width * ITEM)
            self._outputs = np.frombuffer(self._outputs_bytes, np.int32)
            self._outputs.reshape(self.num_slots, -1)[:, : before.shape[1]] = before
