"""The engine's KV memory as the scheduler sees it: owners of pages, the prefix cache, and pages promised to running requests."""

from __future__ import annotations

from typing import Final

import numpy as np

from srt.managers.scheduler.request import Request
from srt.managers.scheduler.slots import SlotTable
from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.radix_cache import ITEM, NO_PAGES, NoPrefixCache, RadixCache, RadixNode
from srt.mem_cache.window_pages import WindowPages

# Least number of pages evicted at a time, so that most allocations find free pages: 1/LEAST_SHARE of all pages in a large memory; in
# a small one 1/MOST_SHARE, up to ENOUGH.
LEAST_SHARE: Final = 256
MOST_SHARE: Final = 32
ENOUGH: Final = 64


def _evicted_at_once(num_pages: int) -> int:
    return max(num_pages // LEAST_SHARE, min(num_pages // MOST_SHARE, ENOUGH))


class KvMemory:
    """Gives pages to requests.

    A request is admitted for the pages that it is expected to need, which may be fewer than it may ask for. So a running request can
    lack a page, and the planner then preempts another one.

    `num_promised` counts the pages that running requests are still expected to ask for: up to the forecast made at admission, or half
    of what it may still ask for if a request has outgrown its forecast.

    `windows` are the page groups of layers that see only the last tokens; most models have none. With each page a request gets one in
    each of these groups too, and gives it back when its window has passed it. Numbers of pages without a group are those of the first
    group, to which the allocator and the tree here belong.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        slots: SlotTable,
        *,
        prefix_cache: bool,
        by_frequency: bool = False,
        windows: list[WindowPages] | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = windows or []
        self.caches = prefix_cache
        self._slots = slots
        self._allocator = TokenToKVPoolAllocator(num_pages)
        self.tree = RadixCache(page_size, by_frequency=by_frequency) if prefix_cache else NoPrefixCache(page_size)
        self._expected = [0] * slots.num_slots  # by slot: pages that its request needs by the forecast
        self._most = [0] * slots.num_slots  # by slot: pages that its request needs at most
        self.num_promised = 0
        self._evicted_at_once = _evicted_at_once(num_pages)

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that running requests can still get: free in every group, or cached and used by no running request."""
        available = self._num_in_first_group
        if self.windows:
            available = min(available, *[window.num_available for window in self.windows])
        return available

    @property
    def _num_in_first_group(self) -> int:
        return self._allocator.num_free + self.tree.num_evictable

    def capacity(self, slot: int) -> int:
        """Return the number of positions that the slot could have with all available pages."""
        return (self._slots.num_pages_of(slot) + self.num_available) * self.page_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pin_prefix(self, request: Request) -> tuple[RadixNode, bytes]:
        """Pin the cached prefix of this request and return its end and pages. Pass them to `hold_prefix`, or the end to `unpin`."""
        progress = request.progress
        most = self._num_usable(request) if self.windows else progress.cacheable_pages(self.page_size)
        return self.tree.pin_prefix(progress.id_bytes, request.salt, most)

    def num_cached(self, request: Request) -> int:
        """Return the number of tokens of this request that the cache has."""
        return self._num_usable(request) * self.page_size

    def _num_usable(self, request: Request) -> int:
        """Return the number of pages of this request's cached prefix, as far as every group has what the next token sees."""
        progress = request.progress
        found = self.tree.find(progress.id_bytes, request.salt, progress.cacheable_pages(self.page_size))
        before, usable = -1, len(found) // ITEM
        while usable != before:
            before = usable
            for window in self.windows:
                usable = window.num_usable(found[: usable * ITEM])
        return usable

    def unpin(self, node: RadixNode) -> None:
        self.tree.unpin(node)

    def has_room(self, expected_tokens: int, num_cached: int) -> bool:
        """Return whether `expected_tokens`, less the `num_cached` pages that are pinned, fit beside the promised pages."""
        columns = self.pages_for(expected_tokens)
        for window in self.windows:
            if window.num_available - window.num_promised < window.peak(columns):
                return False
        return self._num_in_first_group - self.num_promised >= columns - num_cached

    def has_room_for(self, request: Request, expected_tokens: int) -> bool:
        """Would it be admitted? What the cache has of it is no room for it."""
        node, cached = self.pin_prefix(request)
        has_room = self.has_room(expected_tokens, len(cached) // ITEM)
        self.tree.unpin(node)
        return has_room

    def missing_for(self, request: Request, expected_tokens: int) -> list[int]:
        """Return by group how many pages are lacking to admit this request. Negative: so many are left over."""
        columns = self.pages_for(expected_tokens)
        lacking = columns - self.num_cached(request) // self.page_size
        return [lacking - (self._num_in_first_group - self.num_promised)] + [
            window.peak(columns) - (window.num_available - window.num_promised) for window in self.windows
        ]

    def held_by(self, slot: int) -> list[int]:
        """Return by group the pages that the end of the slot's request would free, including shared and promised ones."""
        held = self._slots.num_pages_of(slot) + self._promised_to(slot)
        return [held] + [window.held_by(slot) for window in self.windows]

    def hold_prefix(self, request: Request, node: RadixNode, cached: bytes) -> None:
        """Let a request that is being admitted hold its pinned prefix, which ends at `node` and has the pages `cached`."""
        hold = request.hold
        hold.node = node
        hold.is_stale = False
        hold.num_in_tree = len(cached) // ITEM
        for window in self.windows:
            window.begin(request.progress.slot, cached)
        if not request.progress.num_preempted:
            # Outputs that it came with may be cached too, but only prompt tokens count.
            hold.cached_tokens = min(hold.num_in_tree * self.page_size, request.prompt_len)
        if cached:
            self.tree.note_hit(node)

    def promise(self, request: Request, expected_tokens: int) -> None:
        """Promise the request the pages that it lacks for `expected_tokens`. Its slot has the pages of its prefix already."""
        slot = request.progress.slot
        self._expected[slot] = self.pages_for(expected_tokens)
        self._most[slot] = self.pages_for(request.max_tokens)
        self.num_promised += self._promised_to(slot)
        for window in self.windows:
            window.promise(slot, self._expected[slot], self._most[slot])

    def grow(self, slot: int, tokens: int) -> bytes:
        """Give the slot the pages that it lacks for `tokens` positions, and return them."""
        missing = self.pages_for(tokens) - self._slots.num_pages_of(slot)
        if missing <= 0:
            return NO_PAGES
        pages = self._take(missing)
        self._append(slot, pages)
        for window in self.windows:
            window.append([slot], pages)
        return pages

    def grow_by_one_each(self, slots: list[int]) -> bytes:
        """Give each of these slots one more page, and return them."""
        pages = self._take(len(slots))
        start = 0
        for slot in slots:
            self._append(slot, pages[start : start + ITEM])
            start += ITEM
        for window in self.windows:
            window.append(slots, pages)
        return pages

    def give_back_passed(self, has_certain_lengths: bool) -> bool:
        """Give back the pages that no later token sees. Return True if there were any. Call this before a step is planned.

        A page that is given back may be given to another request in this very step. The steps in flight are done before it on every
        worker, so they may still read the page. `has_certain_lengths` says whether a step advances each row by one position. If it may
        be less, only positions that results have confirmed count.
        """
        slots = self._slots
        rows = slots.incarnation.nonzero()[0]
        positions = slots.computed[rows]
        if not has_certain_lengths:
            confirmed = slots.most_computed[rows] - slots.max_new[rows] + slots.num_output[rows]
            positions = np.minimum(positions, confirmed)
        given_back = False
        for window in self.windows:
            given_back |= window.slide(rows, positions)
        return given_back

    def insert_computed(self, request: Request, ids: bytes, computed: int) -> None:
        """Hand the full pages of the first `computed` positions to the cache; they hold the KV of `ids` from now on."""
        hold = request.hold
        first, end = hold.num_in_tree, min(computed, len(ids) // ITEM) // self.page_size
        if not self.caches or hold.is_stale or end <= first:
            return
        assert hold.node is not None
        pages = self._slots.pages_of(request.progress.slot, first, end)
        ids = ids[first * self.page_size * ITEM : end * self.page_size * ITEM]
        extension = self.tree.extend(hold.node, request.salt, ids, pages)
        hold.node = extension.end
        hold.num_in_tree = end
        for window in self.windows:
            window.exchange(extension.kept, extension.other)
        self._free(extension.given_up)
        if extension.not_taken:
            hold.own_copies += extension.not_taken

    def release(self, request: Request) -> None:
        """Release everything that the request holds. Pages that the cache has taken over stay there, unpinned."""
        slots, slot, hold = self._slots, request.progress.slot, request.hold
        assert hold.node is not None
        self.num_promised -= self._promised_to(slot)
        for window in self.windows:
            window.release(slot)
        self._free(hold.own_copies + slots.pages_of(slot, hold.num_in_tree, slots.num_pages_of(slot)))
        self.tree.unpin(hold.node)
        hold.node = None
        hold.own_copies = NO_PAGES

    def distrust(self, request: Request) -> None:
        """Drop the prefix of a request that ended with a 500 (such as for NaN): its KV may be wrong. Parts that others share stay."""
        ids = request.bytes_with_outputs()
        node, pages = self.tree.pin_prefix(ids, request.salt, len(ids) // ITEM // self.page_size)
        self.tree.unpin(node)
        for window in self.windows:
            window.distrust(pages)
        self._free(self.tree.drop(node))

    def flush(self) -> None:
        """Empty the prefix cache. No request may be running."""
        self._free(self.tree.clear())

    def retire(self, running: list[Request]) -> None:
        """Let nobody find what is cached now, because the weights have changed. Running requests keep their pages to themselves."""
        self._free(self.tree.retire())
        for request in running:
            request.hold.is_stale = True

    def tables_hash(self) -> str:
        """Return the digest of the page tables that the workers must have once they have done everything that was sent."""
        return self._slots.tables_hash([window.sent for window in self.windows])

    def check(self, running: list[Request]) -> None:
        """Raise AssertionError unless every page is free, cached or a request's, exactly once, and the promises are counted right."""
        slots = self._slots
        self._allocator.check()
        owned = [self.tree.check([r.hold.node for r in running if r.hold.node is not None])]
        for request in running:
            slot, hold = request.progress.slot, request.hold
            owned += [slots.pages_of(slot, hold.num_in_tree, slots.num_pages_of(slot)), hold.own_copies]
        promised = sum(self._promised_to(request.progress.slot) for request in running)
        in_use = np.frombuffer(b"".join(owned), np.int32)
        is_known = np.zeros(self.num_pages, np.bool_)
        is_known[self._allocator.free_pages()] = True
        is_known[in_use] = True
        is_once = self._allocator.num_free + len(in_use) == self.num_pages
        assert is_once and 0 not in is_known.tobytes(), "a page is lost, or has two owners"
        assert promised == self.num_promised, f"{self.num_promised} pages are counted as promised, not {promised}"
        for window in self.windows:
            window.check([request.progress.slot for request in running], self._allocator.free_pages())

    def _promised_to(self, slot: int) -> int:
        has, expected = self._slots.num_pages_of(slot), self._expected[slot]
        return expected - has if has < expected else (self._most[slot] - has + 1) // 2

    def _append(self, slot: int, pages: bytes) -> None:
        self.num_promised -= self._promised_to(slot)
        self._slots.append_pages(slot, pages)
        self.num_promised += self._promised_to(slot)

    def _take(self, count: int) -> bytes:
        missing = count - self._allocator.num_free
        if missing > 0:
            some = min(max(missing, self._evicted_at_once), self.tree.num_evictable)
            self._free(self.tree.evict(some))
        return self._allocator.allocate(count)

    def _free(self, pages: bytes) -> None:
        """Free pages of the first group, and what belongs to them in the others."""
        for window in self.windows:
            window.forget(pages)
        self._allocator.free(pages)
