"""Counters of all running requests, one column per counter, so that a step handles all its rows at once."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM, NO_PAGES
from srt.mem_cache.tables_hash import tables_hash
from srt.protocol.messages import Int32Array, Int64Array

NUM_STOPS: Final = 8  # stop ids checked for all rows at once; a request with more is checked alone
NO_STOP: Final = b"\xff\xff\xff\xff"  # no token has the id -1
ONE = np.ones(1, np.int32).tobytes()
ROW = struct.Struct("3q10i4s4x")  # a row of the table: int64 columns, int32 columns, and the first stop id
ROW_BYTES: Final = 72


class SlotTable:
    """The scheduler's counters per slot. They are valid while the slot's `incarnation` is not 0.

    Steps read and write columns, indexed by an array of rows. To read or write one slot, use the memoryview of a column (`computed_at`
    belongs to `computed`): it takes a fraction of the time of an array item.

    `computed` counts the positions of a request that were given to the workers; its prompt and `num_output` sampled tokens are known.
    A row decodes until `computed` reaches `most_computed`: then all its samples are known or in flight. If a step may give a row
    several ids, or none, `computed` counts the largest possible number until the result arrives. A slot's pages stay as sent until the
    slot is filled again, because the workers' tables keep them too.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        table = np.zeros((num_slots, ROW_BYTES), np.uint8)
        self._table_bytes = table.data.cast("B")
        self._pack_row = ROW.pack_into
        numbers: Int64Array = table.view(np.int64).T
        self.incarnation: Int64Array = numbers[0]  # number of its admission; 0: the slot is free
        self.rid: Int64Array = numbers[1]
        self.planned_at: Int64Array = numbers[2]  # the last step with this row; kept for pipelines only
        columns: Int32Array = table.view(np.int32).T[6:]
        self.frontend: Int32Array = columns[0]
        self.choice: Int32Array = columns[1]
        self.max_new: Int32Array = columns[2]
        self.num_output: Int32Array = columns[3]
        self.cached: Int32Array = columns[4]  # prompt tokens found in the prefix cache
        self.sent: Int32Array = columns[5]  # outputs sent to the frontend
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
        self.has_many_stops = False  # True once any slot had more than NUM_STOPS
        self.most_stops = 1  # number of columns of `stops` used so far
        self._outputs_width = 64
        self._outputs_bytes = bytearray(num_slots * 64 * ITEM)
        self._outputs: Int32Array = np.frombuffer(self._outputs_bytes, np.int32)
        self._most_output = 0  # upper bound of `num_output` in any used slot
        self._is_used = [False] * num_slots
        self._was_admitted = [False] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self) -> int:
        slot = self._free.pop()
        self._is_used[slot] = self._was_admitted[slot] = True
        return slot

    def fill(self, request: Request, cached: bytes, num_cached: int) -> None:
        """Write the row of the request that was given its slot, with the pages and the number of tokens that the cache has of it."""
        progress, stops = request.progress, request.stop_ids
        slot, num_output = progress.slot, progress.num_output
        self._pack_row(
            self._table_bytes,
            slot * ROW_BYTES,
            progress.incarnation,
            request.rid,
            0,  # planned at
            request.frontend,
            request.choice,
            request.max_new,
            num_output,
            request.hold.cached_tokens,
            request.delivery.sent,
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
            self._outputs_bytes[start : start + len(progress.outputs)] = progress.outputs
        if self.most_stops > 1 or len(stops) > ITEM:
            self._fill_stops(slot, np.frombuffer(stops, np.int32).tolist())

    def _fill_stops(self, slot: int, stops: list[int]) -> None:
        self.most_stops = max(self.most_stops, min(len(stops), NUM_STOPS))
        for column in range(1, self.most_stops):
            self.stops[column][slot] = stops[column] if column < len(stops) else -1
        self.has_many_stops |= len(stops) > NUM_STOPS
        self.many_stops[slot] = len(stops) > NUM_STOPS

    def give_back(self, request: Request) -> None:
        """Give back to the request what was counted for it while it ran: its outputs, and how many of them were sent."""
        slot = request.progress.slot
        request.progress.outputs = self.outputs_of(slot)
        request.delivery.sent = self.sent_at[slot]

    def release(self, slot: int) -> None:
        assert self._is_used[slot], f"slot {slot} is released twice"
        self._is_used[slot] = False
        self.incarnation_at[slot] = 0
        self.num_output_at[slot] = 0  # so that no output is left to send
        self._free.append(slot)

    def num_pages_of(self, slot: int) -> int:
        return len(self.pages[slot]) // ITEM

    def pages_of(self, slot: int, first: int, end: int) -> bytes:
        """Return the slot's pages from index `first` up to `end`, excluding `end`."""
        return self.pages[slot][first * ITEM : end * ITEM]

    def append_pages(self, slot: int, pages: bytes) -> None:
        self.pages[slot] += pages
        self._num_pages_at[slot] = len(self.pages[slot]) // ITEM

    def append_outputs(self, rows: Int64Array, ids: Int32Array) -> Int32Array:
        """Append one id to the outputs of each of these slots, and return their new lengths."""
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
        """Return `counts[i]` outputs of slot `rows[i]` from index `first[i]` on, for all i end to end."""
        starts = rows * self._outputs_width + first
        if counts.tobytes() == ONE * len(rows):
            one_each: Int32Array = self._outputs[starts]
            return one_each
        ranges = zip(starts.tolist(), counts.tolist(), strict=True)
        return np.concatenate([self._outputs[start : start + count] for start, count in ranges])

    def tables_hash(self, others: list[list[bytes]]) -> str:
        """Return the digest of all page tables as sent; `others` are the pages in the other groups, by slot."""
        slots = [slot for slot in range(self.num_slots) if self._was_admitted[slot]]
        pages = {slot: b"".join([self.pages[slot], *[other[slot] for other in others]]) for slot in slots}
        return tables_hash({slot: np.frombuffer(numbers, np.int32) for slot, numbers in pages.items()})

    def used_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.incarnation)]

    def check(self) -> None:
        """Raise AssertionError unless every slot is either free or used, once, and its pages are counted right."""
        used = self.used_slots()
        assert sorted([*self._free, *used]) == list(range(self.num_slots)), "a slot is lost or doubled"
        assert all(self.num_pages_of(slot) == int(self.num_pages[slot]) for slot in used), (
            "a slot's pages are counted wrong"
        )

    def _make_room_for_outputs(self, width: int) -> None:
        """Make room for `width` outputs per slot. The width at least doubles, so that widening is rare."""
        if width > self._outputs_width:
            before, self._outputs_width = self._outputs.reshape(self.num_slots, -1), max(width, 2 * self._outputs_width)
            self._outputs_bytes = bytearray(self.num_slots * self._outputs_width * ITEM)
            self._outputs = np.frombuffer(self._outputs_bytes, np.int32)
            self._outputs.reshape(self.num_slots, -1)[:, : before.shape[1]] = before
