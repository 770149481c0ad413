from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from srt.mem_cache.radix_cache import NoPrefixCache, RadixCache, RadixNode
from srt.protocol.messages import int32_array

FAR = 1 << 20  # more pages than any prefix has


def ids(text: str) -> bytes:
    return packed([ord(c) for c in text])


def packed(values: Iterable[int]) -> bytes:
    return int32_array(list(values)).tobytes()


def numbers(pages: bytes) -> list[int]:
    values: list[int] = np.frombuffer(pages, np.int32).tolist()
    return values


class Tree:
    """A tree of pages with 2 letters each, and what is held of it."""

    def __init__(self) -> None:
        self.cache = RadixCache(page_size=2)
        self.held: list[RadixNode] = []
        self._next_page = 0

    def put(self, text: str, salt: str = "") -> list[int]:
        """Compute and let go of a text from its first letter on, as a request does. Returns the pages that it brought."""
        node, _ = self.cache.pin_prefix(ids(text), salt, 0)
        pages = range(self._next_page, self._next_page + len(text) // 2)
        self._next_page += len(pages)
        self.cache.unpin(self.cache.extend(node, salt, ids(text), packed(pages)).end)
        return list(pages)

    def pin(self, text: str, salt: str = "", max_pages: int = FAR) -> list[int]:
        node, pages = self.cache.pin_prefix(ids(text), salt, min(max_pages, len(text) // 2))
        self.held.append(node)
        self.cache.check(self.held)
        return numbers(pages)

    def find(self, text: str, salt: str = "", max_pages: int = FAR) -> list[int]:
        pages = self.pin(text, salt, max_pages)
        self.cache.unpin(self.held.pop())
        return pages


def test_the_longest_common_prefix_of_whole_pages_is_found() -> None:
    tree = Tree()
    pages = tree.put("abcdef")
    assert tree.find("abcdef") == pages
    assert tree.find("abcdXY") == pages[:2]
    assert tree.find("abcdeX") == pages[:2]
    assert tree.find("Xbcdef") == []


def test_a_match_ends_where_the_caller_says() -> None:
    tree = Tree()
    pages = tree.put("abcdef")
    assert tree.find("abcdef", max_pages=2) == pages[:2]
    assert tree.find("abcdef", max_pages=0) == []


def test_a_dropped_prefix_is_forgotten_as_far_back_as_nobody_holds_it_or_goes_on_from_it() -> None:
    tree = Tree()
    first, second = tree.put("abcdefgh"), tree.put("abcdXYZW")
    node, _ = tree.cache.pin_prefix(ids("abcdefgh"), "", FAR)
    assert tree.cache.drop(node) == b"", "somebody holds it"
    tree.cache.unpin(node)
    assert sorted(numbers(tree.cache.drop(node))) == first[2:]
    assert tree.cache.drop(tree.cache.root) == b""
    tree.cache.check([])
    assert tree.find("abcdefgh") == tree.find("abcd")
    node, _ = tree.cache.pin_prefix(ids("abcdXYZW"), "", FAR)
    tree.cache.unpin(node)
    assert len(tree.cache.drop(node)) == 4 * 4, "with what only the first had beside it"
    assert (tree.cache.num_pages, tree.cache.num_evictable, len(second)) == (0, 0, 4)
    tree.cache.check([])


def test_texts_that_part_inside_an_edge_share_what_comes_before() -> None:
    tree = Tree()
    first, second = tree.put("abcdef"), tree.put("abcdXY")
    assert tree.find("abcdXY")[2:] == second[2:]
    assert tree.find("abcdef")[2:] == first[2:]
    assert tree.find("abcdXY")[:2] == tree.find("abcdef")[:2]
    assert tree.cache.num_pages == 4


def test_another_salt_is_another_world() -> None:
    tree = Tree()
    plain, salted = tree.put("abcd"), tree.put("abcd", salt="s")
    assert tree.find("abcd") == plain
    assert tree.find("abcd", salt="s") == salted
    assert tree.find("abcd", salt="t") == []


def test_what_others_use_is_kept_and_the_double_stays_with_the_caller() -> None:
    tree = Tree()
    pages = tree.put("abcd")
    tree.pin("abcd")
    node, _ = tree.cache.pin_prefix(ids("abcdef"), "", 0)
    extension = tree.cache.extend(node, "", ids("abcdef"), packed([10, 11, 12]))
    assert numbers(extension.not_taken) == [10, 11]
    assert numbers(extension.given_up) == []
    tree.held.append(extension.end)
    assert tree.find("abcdef") == [*pages, 12]


def test_what_nobody_uses_is_exchanged_for_the_callers_pages() -> None:
    """So that a pin never keeps more pages from eviction than its holder has brought or was promised."""
    tree = Tree()
    pages = tree.put("abcdef")
    free_or_evictable = tree.cache.num_evictable
    node, _ = tree.cache.pin_prefix(ids("abcd"), "", 0)
    extension = tree.cache.extend(node, "", ids("abcd"), packed([10, 11]))
    assert numbers(extension.given_up) == pages[:2]
    assert numbers(extension.not_taken) == []
    assert tree.cache.num_evictable + len(numbers(extension.given_up)) == free_or_evictable
    tree.held.append(extension.end)
    assert tree.find("abcdef") == [10, 11, pages[2]]


def test_a_prefix_that_grows_under_one_pin_stays_one_edge() -> None:
    tree = Tree()
    node, _ = tree.cache.pin_prefix(ids(""), "", 0)
    for page, text in enumerate(("ab", "cd", "ef")):
        node = tree.cache.extend(node, "", ids(text), packed([page])).end
    assert len(tree.cache.nodes()) == 2
    tree.held.append(node)
    assert tree.find("abcdef") == [0, 1, 2]


def test_an_edge_that_two_hold_does_not_grow_but_gets_a_child() -> None:
    tree = Tree()
    tree.put("ab")
    tree.pin("ab")
    node, _ = tree.cache.pin_prefix(ids("ab"), "", 1)
    end = tree.cache.extend(node, "", ids("cd"), packed([7])).end
    assert end is not node
    tree.cache.check([*tree.held, end])


def test_pages_used_longest_ago_are_evicted_first_and_from_the_end() -> None:
    tree = Tree()
    old, new = tree.put("abcdef"), tree.put("xyzw")
    assert numbers(tree.cache.evict(2)) == old[1:]
    tree.find("ab")
    assert numbers(tree.cache.evict(1)) == new[1:]
    assert tree.find("abcdef") == old[:1]
    tree.cache.check([])


def test_a_pinned_prefix_is_never_evicted() -> None:
    tree = Tree()
    pages = tree.put("abcdef")
    assert tree.pin("abcd") == pages[:2]
    assert tree.cache.num_evictable == 1
    assert numbers(tree.cache.evict(1)) == pages[2:]
    with pytest.raises(AssertionError, match="1 pages to evict, 0 are evictable"):
        tree.cache.evict(1)


def test_a_parent_becomes_evictable_when_its_last_child_is_gone() -> None:
    tree = Tree()
    tree.put("abcd")
    tree.put("abxy")
    assert len(numbers(tree.cache.evict(3))) == 3
    assert tree.cache.num_pages == 0
    assert len(tree.cache.nodes()) == 1


def test_a_pin_survives_that_its_edge_is_cut() -> None:
    tree = Tree()
    pages = tree.put("abcdef")
    tree.pin("abcdef")
    tree.put("abXX")
    assert numbers(tree.cache.evict(tree.cache.num_evictable)) == [4]
    assert tree.find("abcdef") == pages
    tree.cache.unpin(tree.held.pop())
    tree.cache.check([])


def test_clearing_gives_back_everything_unless_something_is_pinned() -> None:
    tree = Tree()
    tree.put("abcdef")
    tree.put("abXX")
    tree.pin("ab")
    with pytest.raises(AssertionError, match="cleared while"):
        tree.cache.clear()
    tree.cache.unpin(tree.held.pop())
    assert len(numbers(tree.cache.clear())) == 4
    assert tree.cache.num_pages == tree.cache.num_evictable == 0


def test_an_unpin_too_many_is_an_error() -> None:
    tree = Tree()
    tree.put("ab")
    tree.pin("ab")
    node = tree.held.pop()
    tree.cache.unpin(node)
    with pytest.raises(AssertionError, match="more often"):
        tree.cache.unpin(node)


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache = NoPrefixCache(page_size=2)
    node, pages = cache.pin_prefix(ids("abcd"), "", 2)
    assert node is cache.root
    assert len(pages) == 0


@pytest.mark.parametrize("page_size", [1, 3])
def test_any_history_finds_what_a_plain_list_of_texts_says(page_size: int) -> None:
    """The oracle: every prefix of whole pages that was put in is found, as long as nothing was evicted."""
    rng = random.Random(page_size)
    cache = RadixCache(page_size)
    known: dict[tuple[int, ...], None] = {}
    next_page = 0
    for _ in range(300):
        text = [rng.randrange(3) for _ in range(rng.randint(0, 8) * page_size)]
        expected = max(n for n in range(len(text) // page_size + 1) if n == 0 or tuple(text[: n * page_size]) in known)
        node, pages = cache.pin_prefix(packed(text), "", len(text) // page_size)
        assert len(numbers(pages)) == expected
        new = range(next_page, next_page + len(text) // page_size - expected)
        next_page += len(new)
        cache.unpin(cache.extend(node, "", packed(text[expected * page_size :]), packed(new)).end)
        known |= {tuple(text[: n * page_size]): None for n in range(1, len(text) // page_size + 1)}
        cache.check([])
    assert cache.num_pages == len(known) == next_page


def test_very_many_prefixes_are_evicted_in_the_order_of_their_use() -> None:
    cache = RadixCache(page_size=1)
    for i in range(10_000):
        node, _ = cache.pin_prefix(packed([i]), "", 0)
        cache.unpin(cache.extend(node, "", packed([i]), packed([i])).end)
    visits = [numbers(cache.evict(1))[0] for _ in range(10_000)]
    assert visits == list(range(10_000))
