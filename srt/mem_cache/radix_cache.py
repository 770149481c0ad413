"""Map token prefixes to the pages with their KV: a compressed radix tree whose edges split at page boundaries.

                 root
            ┌─────┴──────┐
        [3 pages]     [1 page]
        ┌───┴───┐
    [2 pages] [7 pages]

An edge holds the ids of whole pages, and the numbers of those pages. A pin on a node counts on all of its ancestors, so nothing below a
node without pins is pinned. Leaves without pins can be evicted, least recently used first.

The tree owns the pages in it. A request owns its pages until it hands them over with `extend`. Ids and page numbers are bytes, int32
values as they travel in messages: cutting, comparing and joining bytes costs a tenth of what it costs for small arrays.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

ITEM: Final = 4  # bytes per id or page number
NO_PAGES: Final = b""
RETIRED: Final = b"\xff"  # begins the keys of prefixes that are not found any more: no salt begins so in UTF-8
_Offer = tuple[int, int, int, "RadixNode"]  # hits, last use, serial: the smallest is evicted first


class RadixNode:
    """The end of a prefix, with the edge that leads to it from `parent`."""

    __slots__ = (
        "children",
        "ids",
        "key",
        "last_used",
        "newer",
        "num_hits",
        "num_pages",
        "older",
        "pages",
        "parent",
        "pins",
        "serial",
    )

    def __init__(self, serial: int, parent: RadixNode | None, key: bytes, ids: bytes, pages: bytes) -> None:
        self.serial = serial
        self.parent = parent  # None: the root, or a node that was evicted
        self.key = key
        self.ids = ids
        self.pages = pages
        self.num_pages = len(pages) // ITEM
        self.children: dict[bytes, RadixNode] = {}
        self.pins = 0
        self.last_used = 0
        self.num_hits = 0
        self.older: RadixNode | None = None  # neighbours in the linked list of evictable leaves
        self.newer: RadixNode | None = None

    def become(self, ids: bytes, pages: bytes) -> None:
        """Replace the edge to this node."""
        self.ids = ids
        self.pages = pages
        self.num_pages = len(pages) // ITEM


class Extension:
    """The result of handing pages to the tree."""

    __slots__ = ("end", "given_up", "kept", "not_taken", "other")

    def __init__(self, end: RadixNode, given_up: bytes, not_taken: bytes, kept: bytes, other: bytes) -> None:
        self.end = end  # the node that is pinned now instead of the caller's
        self.given_up = given_up  # pages that the tree replaced by the caller's; the caller must free them
        self.not_taken = not_taken  # pages that remain the caller's
        # Where the tree had pages for the same ids already:
        self.kept = kept  # those that it has now
        self.other = other  # those that hold the same, given up or not taken, in the same order


class RadixCache:
    """Prefixes and their pages. Deterministic: time is a counter and ties are broken by creation, so the same calls give the same tree.

    Evicts the least recently used leaf first; with `by_frequency` the leaf with the fewest hits, and the least recently used of those.
    """

    def __init__(self, page_size: int, *, by_frequency: bool = False) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * ITEM  # size of a page's ids
        self._by_frequency = by_frequency
        self.num_pages = 0
        self.num_evictable = 0  # pages without pins: all of them can be evicted, leaf by leaf
        self.num_evicted = 0  # since the start
        self._num_nodes = 1
        self._num_retired = 0
        self._clock = 0
        self._serial = 0
        # Evictable leaves. With `by_frequency` all of them are in the heap. Otherwise a leaf goes to the end of a linked list when it
        # loses its last pin, because it was just used. A node that becomes a leaf when its last child is evicted would belong in the
        # middle of that list, so it goes to the heap instead. `_pop_least` looks at both.
        self._evictable: list[_Offer] = []  # the heap; may have outdated entries
        self._line = RadixNode(-1, None, b"", NO_PAGES, NO_PAGES)  # sentinel that closes the list to a ring
        self._line.older = self._line.newer = self._line
        self.root = RadixNode(0, None, b"", NO_PAGES, NO_PAGES)

    def pin_prefix(self, ids: bytes, salt: str, max_pages: int) -> tuple[RadixNode, bytes]:
        """Pin the longest cached prefix of `ids`, at most `max_pages` long, and return its end and its pages."""
        node, position, found = self.root, 0, list[bytes]()
        while position < max_pages:
            child = node.children.get(self._key(node, salt, ids, position))
            if child is None:
                break
            same = self._common_pages(child, ids, position, max_pages)
            if same < child.num_pages:
                child = self._split(child, same)
            found.append(child.pages)
            node, position = child, position + same
        self._pin(node)
        return node, b"".join(found)

    def find(self, ids: bytes, salt: str, max_pages: int) -> bytes:
        """Return the pages that `pin_prefix` would find, without changing anything."""
        node, position, found = self.root, 0, list[bytes]()
        while position < max_pages:
            child = node.children.get(self._key(node, salt, ids, position))
            if child is None:
                break
            same = self._common_pages(child, ids, position, max_pages)
            position += same
            if same < child.num_pages:
                found.append(child.pages[: same * ITEM])
                break
            found.append(child.pages)
            node = child
        return b"".join(found)

    def note_hit(self, node: RadixNode) -> None:
        """Count a hit on the prefix that ends at `node`, which the caller has pinned: a request did not have to compute it."""
        step: RadixNode | None = node
        while step is not None:
            step.num_hits += 1
            step = step.parent

    def extend(self, node: RadixNode, salt: str, ids: bytes, pages: bytes) -> Extension:
        """Continue the prefix that ends at `node`, which the caller has pinned, by `pages` that hold `ids`.

        The caller's pin moves to the new end. The tree may already have pages for the same ids. If those are pinned, they stay, and the
        caller keeps its own. Otherwise the tree takes the caller's pages and gives up its own, so that one set of pages becomes free.
        Without that exchange the call would lower the number of pages that are free or can be evicted.
        """
        position, count, given_up, not_taken = 0, len(pages) // ITEM, NO_PAGES, NO_PAGES
        kept, other = NO_PAGES, NO_PAGES
        while position < count:
            key = self._key(node, salt, ids, position)
            child = node.children.get(key)
            if child is None:
                node = self._append(node, key, ids[position * self._page_bytes :], pages[position * ITEM :])
                break
            same = self._common_pages(child, ids, position, count)
            if same < child.num_pages:
                child = self._split(child, same)
            doubles = pages[position * ITEM : (position + same) * ITEM]
            if child.pins:
                not_taken += doubles
                other += doubles
            else:
                given_up += child.pages
                other += child.pages
                child.pages = doubles
            kept += child.pages
            self._add_pin(child)
            node, position = child, position + same
        return Extension(node, given_up, not_taken, kept, other)

    def unpin(self, node: RadixNode) -> None:
        """Release one pin of this node; its whole path counts as just used."""
        self._clock += 1
        step: RadixNode | None = node
        while step is not None:
            assert step.pins > 0, "a prefix was unpinned more often than pinned"
            step.pins -= 1
            step.last_used = self._clock
            if step.pins == 0 and step is not self.root:
                self.num_evictable += step.num_pages
                if self._by_frequency:
                    self._offer(step)
                elif not step.children:
                    _put_before(self._line, step)
            step = step.parent

    def evict(self, count: int) -> bytes:
        """Forget the `count` least valuable pages and return them; the caller must have checked `num_evictable`."""
        assert count <= self.num_evictable, f"{count} pages to evict, {self.num_evictable} are evictable"
        evicted, missing = list[bytes](), count
        while missing > 0:
            node = self._pop_least()
            kept = max(node.num_pages - missing, 0)
            evicted.append(node.pages[kept * ITEM :])
            missing -= node.num_pages - kept
            if kept:
                node.become(node.ids[: kept * self._page_bytes], node.pages[: kept * ITEM])
                self._offer(node)
            else:
                self._remove(node)
        self.num_pages -= count
        self.num_evictable -= count
        self.num_evicted += count
        return b"".join(evicted)

    def drop(self, node: RadixNode) -> bytes:
        """Forget the prefix that ends here, back to the first node that is pinned or shared. Return its pages to the caller."""
        dropped = list[bytes]()
        while node.parent is not None and not node.pins and not node.children:
            parent = node.parent
            dropped.append(node.pages)
            if node.newer is not None:
                _unlink(node)
            self.num_pages -= node.num_pages
            self.num_evictable -= node.num_pages
            self._remove(node)
            node = parent
        return b"".join(dropped)

    def clear(self) -> bytes:
        """Forget everything and return the pages, which become the caller's. No prefix may be pinned."""
        assert self.num_evictable == self.num_pages, "the prefix cache is cleared while prefixes are pinned"
        return self.evict(self.num_pages)

    def retire(self) -> bytes:
        """Forget everything that is not pinned and return its pages, which become the caller's. What is pinned is not found any more."""
        pages = self.evict(self.num_evictable)
        self._num_retired += 1
        mark = RETIRED + self._num_retired.to_bytes(8, "little")
        retired: dict[bytes, RadixNode] = {}
        for node in self.root.children.values():
            node.key = mark + node.key
            retired[node.key] = node
        self.root.children = retired
        return pages

    @property
    def num_pinned(self) -> int:
        return self.num_pages - self.num_evictable

    def nodes(self) -> list[RadixNode]:
        """Return every node, parents before children."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found

    def check(self, pinned: list[RadixNode]) -> bytes:
        """Return the tree's pages. Raise AssertionError if the tree contradicts itself, or `pinned`, the nodes that callers pinned."""
        nodes = self.nodes()
        pins = {node.serial: 0 for node in nodes}
        for node in pinned:
            step: RadixNode | None = node
            while step is not None:
                assert step.serial in pins, "a request pins a prefix that is not in the tree"
                pins[step.serial] += 1
                step = step.parent
        for node in nodes:
            assert node.pins == pins[node.serial], f"prefix has {node.pins} pins, requests hold {pins[node.serial]}"
            assert len(node.pages) == node.num_pages * ITEM, "an edge's pages are counted wrong"
            assert len(node.ids) == node.num_pages * self._page_bytes, "an edge's ids and pages do not match"
            assert all(child.parent is node and child.key == key for key, child in node.children.items())
        pages = b"".join(node.pages for node in nodes)
        loose = sum(node.num_pages for node in nodes if node.pins == 0)
        assert len(pages) == self.num_pages * ITEM and len(nodes) == self._num_nodes, "the tree's counts are wrong"
        assert loose == self.num_evictable, f"{loose} pages are evictable, the count says {self.num_evictable}"
        return pages

    def _key(self, node: RadixNode, salt: str, ids: bytes, position: int) -> bytes:
        """Return the key of an edge from `node`: its first page of ids, at the root preceded by the salt."""
        start = position * self._page_bytes
        page = ids[start : start + self._page_bytes]
        return salt.encode() + page if salt and node is self.root else page

    def _common_pages(self, child: RadixNode, ids: bytes, position: int, max_pages: int) -> int:
        """Return how many pages of this edge equal those of `ids` from page `position` on. At least 1, because the key matched."""
        pages = min(child.num_pages, max_pages - position)
        start, length = position * self._page_bytes, pages * self._page_bytes
        ours, theirs = child.ids[:length], ids[start : start + length]
        if ours == theirs:
            return pages
        differs = np.frombuffer(ours, np.int32) != np.frombuffer(theirs, np.int32)
        return int(differs.argmax()) // self.page_size

    def _split(self, node: RadixNode, pages: int) -> RadixNode:
        """Cut the edge after `pages` pages and return the new upper node. `node` remains the end, so references to it stay valid."""
        assert node.parent is not None
        cut = pages * self._page_bytes
        upper = self._new_node(node.parent, node.key, node.ids[:cut], node.pages[: pages * ITEM])
        upper.pins, upper.last_used, upper.num_hits = node.pins, node.last_used, node.num_hits
        node.parent = upper
        node.become(node.ids[cut:], node.pages[pages * ITEM :])
        node.key = node.ids[: self._page_bytes]
        upper.children[node.key] = node
        return upper

    def _append(self, node: RadixNode, key: bytes, ids: bytes, pages: bytes) -> RadixNode:
        """Append new pages to `node` and return their end. A leaf that only the caller has pinned simply becomes longer."""
        self.num_pages += len(pages) // ITEM
        if node.pins == 1 and not node.children and node is not self.root:
            node.become(node.ids + ids, node.pages + pages)
            return node
        child = self._new_node(node, key, ids, pages)
        child.pins = 1
        return child

    def _new_node(self, parent: RadixNode, key: bytes, ids: bytes, pages: bytes) -> RadixNode:
        self._serial += 1
        self._num_nodes += 1
        node = RadixNode(self._serial, parent, key, ids, pages)
        parent.children[key] = node
        return node

    def _pop_least(self) -> RadixNode:
        """Remove the least valuable leaf from the list or the heap and return it."""
        heap, oldest = self._evictable, self._line.newer
        assert oldest is not None
        while heap:
            _, last_used, _, node = heap[0]
            if node.parent is None or node.pins or node.children or node.last_used != last_used:
                heapq.heappop(heap)
            elif oldest is self._line or last_used < oldest.last_used:
                heapq.heappop(heap)
                return node
            else:
                break
        assert oldest is not self._line, "pages are counted as evictable, but no leaf is"
        _unlink(oldest)
        return oldest

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1
        if parent.pins == 0 and parent is not self.root:
            self._offer(parent)

    def _pin(self, node: RadixNode) -> None:
        step: RadixNode | None = node
        while step is not None:
            self._add_pin(step)
            step = step.parent

    def _add_pin(self, node: RadixNode) -> None:
        if node.pins == 0 and node is not self.root:
            self.num_evictable -= node.num_pages
            if node.newer is not None:
                _unlink(node)
        node.pins += 1

    def _offer(self, node: RadixNode) -> None:
        """Put `node` into the heap, where `evict` finds it, if it is a leaf."""
        if node.children:
            return
        heapq.heappush(self._evictable, self._offer_of(node))
        if len(self._evictable) > 4 * self._num_nodes + 256:
            self._evictable = [
                self._offer_of(n) for n in self.nodes() if not n.pins and not n.children and n.parent and not n.newer
            ]
            heapq.heapify(self._evictable)

    def _offer_of(self, node: RadixNode) -> _Offer:
        return node.num_hits if self._by_frequency else 0, node.last_used, node.serial, node


def _put_before(place: RadixNode, node: RadixNode) -> None:
    older = place.older
    assert older is not None
    node.older, node.newer = older, place
    older.newer = place.older = node


def _unlink(node: RadixNode) -> None:
    older, newer = node.older, node.newer
    assert older is not None and newer is not None
    older.newer, newer.older = newer, older
    node.older = node.newer = None


class NoPrefixCache(RadixCache):
    """A cache that never finds or keeps a prefix (--disable-radix-cache)."""

    def pin_prefix(self, ids: bytes, salt: str, max_pages: int) -> tuple[RadixNode, bytes]:
        return super().pin_prefix(ids, salt, 0)

    def find(self, ids: bytes, salt: str, max_pages: int) -> bytes:
        return NO_PAGES
