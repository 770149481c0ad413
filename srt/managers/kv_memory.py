"""The replica's KV memory as the scheduler sees it: who owns which page, what the prefix cache keeps, what is promised to whom."""

from __future__ import annotations

import numpy as np

from srt.managers.request import Request
from srt.managers.slots import SlotTable
from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.radix_cache import NoPrefixCache, RadixCache, RadixNode
from srt.protocol.messages import Int32Array


class KvMemory:
    """Gives pages to requests against a reservation made at admission, so that a request that runs never lacks one.

    At any time: free + evictable pages >= pages promised to running requests and not given out yet.
    """

    def __init__(self, num_pages: int, page_size: int, slots: SlotTable, *, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.caches = prefix_cache
        self._slots = slots
        self._allocator = TokenToKVPoolAllocator(num_pages)
        self.tree = RadixCache(page_size) if prefix_cache else NoPrefixCache(page_size)
        self._num_promised = 0

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pin_prefix(self, request: Request) -> tuple[RadixNode, Int32Array]:
        """What the cache has of this request, pinned: to be admitted with, or given back with `unpin`."""
        return self.tree.pin_prefix(request.known_ids, request.salt, request.cacheable_pages(self.page_size))

    def unpin(self, node: RadixNode) -> None:
        self.tree.unpin(node)

    def has_room(self, request: Request, num_cached: int) -> bool:
        """Is there room for all that the request may need, apart from the `num_cached` pages that are pinned for it?"""
        need = self.pages_for(request.max_tokens) - num_cached
        return self.num_free + self.tree.num_evictable - self._num_promised >= need

    def admit(self, request: Request, node: RadixNode, cached: Int32Array) -> None:
        """Promise the request its pages. It has a slot, and its pinned prefix is its first pages."""
        request.node = node
        request.num_in_tree = len(cached)
        request.num_reserved = self.pages_for(request.max_tokens)
        self._num_promised += request.num_reserved - len(cached)
        if len(cached):
            self._slots.append_pages(request.slot, cached)

    def grow(self, slot: int, tokens: int) -> Int32Array:
        """Give the slot the pages that it lacks for `tokens` positions, and say which."""
        missing = self.pages_for(tokens) - int(self._slots.num_pages[slot])
        pages = self._take(max(missing, 0))
        self._slots.append_pages(slot, pages)
        return pages

    def take_one_each(self, count: int) -> Int32Array:
        """Pages for so many slots that need one more. The caller enters them into the table."""
        return self._take(count)

    def insert_computed(self, request: Request, ids: Int32Array, computed: int) -> None:
        """Let the cache have the full pages of the first `computed` positions, which hold the KV of `ids` from now on."""
        first, end = request.num_in_tree, min(computed, len(ids)) // self.page_size
        if not self.caches or end <= first:
            return
        assert request.node is not None
        pages = self._slots.pages[request.slot, first:end]
        ids = ids[first * self.page_size : end * self.page_size]
        extension = self.tree.extend(request.node, request.salt, ids, pages)
        request.node = extension.end
        request.num_in_tree = end
        self._allocator.free(extension.given_up)
        if len(extension.not_taken):
            request.own_copies.append(extension.not_taken)

    def release(self, request: Request) -> None:
        """Everything that the request holds. What the cache has taken over stays there, without its pin."""
        assert request.node is not None
        pages = self._slots.pages_of(request.slot)
        self._num_promised -= request.num_reserved - len(pages)
        for copies in request.own_copies:
            self._allocator.free(copies)
        self._allocator.free(pages[request.num_in_tree :])
        self.tree.unpin(request.node)
        request.node = None
        request.own_copies.clear()

    def flush(self) -> None:
        """Forget the prefix cache. No request may be running."""
        self._allocator.free(self.tree.clear())

    def check(self, running: list[Request]) -> None:
        """AssertionError unless every page is free, cached or one request's, exactly once, and every promise can be kept."""
        self._allocator.check()
        owned = [self._allocator.free_pages(), self.tree.check([r.node for r in running if r.node is not None])]
        promised = 0
        for request in running:
            pages = self._slots.pages_of(request.slot)
            owned += [pages[request.num_in_tree :], *request.own_copies]
            promised += request.num_reserved - len(pages)
        everything = np.sort(np.concatenate(owned))
        assert np.array_equal(everything, np.arange(self.num_pages)), "a page is lost, or has two owners"
        assert promised == self._num_promised, (
            f"{self._num_promised} pages are promised, requests may ask for {promised}"
        )
        assert self.num_free + self.tree.num_evictable >= promised, "more pages are promised than there are"

    def _take(self, count: int) -> Int32Array:
        missing = count - self._allocator.num_free
        if missing > 0:
            self._allocator.free(self.tree.evict(missing))
        self._num_promised -= count
        return self._allocator.allocate(count)
