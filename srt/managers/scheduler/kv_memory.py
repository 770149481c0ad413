"""The engine's KV memory as the scheduler sees it: owners of pages, the prefix cache, and pages promised to running requests."""

from __future__ import annotations

from typing import Final

import numpy as np

from srt.managers.scheduler.request import Request
from srt.managers.scheduler.slots import SlotTable
from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.radix_cache import ITEM, NO_PAGES, NoPrefixCache, RadixCache, RadixNode

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
    """

    def __init__(
        self, num_pages: int, page_size: int, slots: SlotTable, *, prefix_cache: bool, by_frequency: bool = False
    ) -> None:
        self.page_size = page_size
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
        """Pages that are free, or cached and used by no running request."""
        return self._allocator.num_free + self.tree.num_evictable

    def capacity(self, slot: int) -> int:
        """Return the number of positions that the slot could have with all available pages."""
        return (self._slots.num_pages_of(slot) + self.num_available) * self.page_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pin_prefix(self, request: Request) -> tuple[RadixNode, bytes]:
        """Pin the cached prefix of this request and return its end and pages. Pass them to `hold_prefix`, or the end to `unpin`."""
        progress = request.progress
        return self.tree.pin_prefix(progress.id_bytes, request.salt, progress.cacheable_pages(self.page_size))

    def num_cached(self, request: Request) -> int:
        """Return the number of tokens of this request that the cache has."""
        progress = request.progress
        found = self.tree.match(progress.id_bytes, request.salt, progress.cacheable_pages(self.page_size))
        return found * self.page_size

    def unpin(self, node: RadixNode) -> None:
        self.tree.unpin(node)

    def has_room(self, expected_tokens: int, num_cached: int) -> bool:
        """Return whether `expected_tokens`, less the `num_cached` pages that are pinned, fit beside the promised pages."""
        return self.num_available - self.num_promised >= self.pages_for(expected_tokens) - num_cached

    def has_room_for(self, request: Request, expected_tokens: int) -> bool:
        """Would it be admitted? What the cache has of it is no room for it."""
        node, cached = self.pin_prefix(request)
        has_room = self.has_room(expected_tokens, len(cached) // ITEM)
        self.tree.unpin(node)
        return has_room

    def held_by(self, slot: int) -> int:
        """Return the number of pages that the end of the slot's request would free, including shared and promised ones."""
        return self._slots.num_pages_of(slot) + self._promised_to(slot)

    def hold_prefix(self, request: Request, node: RadixNode, cached: bytes) -> None:
        """Let a request that is being admitted hold its pinned prefix, which ends at `node` and has the pages `cached`."""
        hold = request.hold
        hold.node = node
        hold.num_in_tree = len(cached) // ITEM
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

    def grow(self, slot: int, tokens: int) -> bytes:
        """Give the slot the pages that it lacks for `tokens` positions, and return them."""
        missing = self.pages_for(tokens) - self._slots.num_pages_of(slot)
        if missing <= 0:
            return NO_PAGES
        pages = self._take(missing)
        self._append(slot, pages)
        return pages

    def grow_by_one_each(self, slots: list[int]) -> bytes:
        """Give each of these slots one more page, and return them."""
        pages = self._take(len(slots))
        start = 0
        for slot in slots:
            self._append(slot, pages[start : start + ITEM])
            start += ITEM
        return pages

    def insert_computed(self, request: Request, ids: bytes, computed: int) -> None:
        """Hand the full pages of the first `computed` positions to the cache; they hold the KV of `ids` from now on."""
        hold = request.hold
        first, end = hold.num_in_tree, min(computed, len(ids) // ITEM) // self.page_size
        if not self.caches or end <= first:
            return
        assert hold.node is not None
        pages = self._slots.pages_of(request.progress.slot, first, end)
        ids = ids[first * self.page_size * ITEM : end * self.page_size * ITEM]
        extension = self.tree.extend(hold.node, request.salt, ids, pages)
        hold.node = extension.end
        hold.num_in_tree = end
        self._allocator.free(extension.given_up)
        if extension.not_taken:
            hold.own_copies += extension.not_taken

    def release(self, request: Request) -> None:
        """Release everything that the request holds. Pages that the cache has taken over stay there, unpinned."""
        slots, slot, hold = self._slots, request.progress.slot, request.hold
        assert hold.node is not None
        self.num_promised -= self._promised_to(slot)
        self._allocator.free(hold.own_copies + slots.pages_of(slot, hold.num_in_tree, slots.num_pages_of(slot)))
        self.tree.unpin(hold.node)
        hold.node = None
        hold.own_copies = NO_PAGES

    def distrust(self, request: Request) -> None:
        """Drop the prefix of a request that ended with a 500 (such as for NaN): its KV may be wrong. Parts that others share stay."""
        ids = request.bytes_with_outputs()
        node, _ = self.tree.pin_prefix(ids, request.salt, len(ids) // ITEM // self.page_size)
        self.tree.unpin(node)
        self._allocator.free(self.tree.drop(node))

    def flush(self) -> None:
        """Empty the prefix cache. No request may be running."""
        self._allocator.free(self.tree.clear())

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
            self._allocator.free(self.tree.evict(some))
        return self._allocator.allocate(count)
