from __future__ import annotations

import pytest

from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.protocol.messages import int32_array


def test_every_page_is_given_out_once_and_in_a_fixed_order() -> None:
    allocator = TokenToKVPoolAllocator(4)
    assert [*allocator.allocate(3), *allocator.allocate(1)] == [0, 1, 2, 3]
    assert allocator.num_free == 0
    allocator.check()


def test_the_page_freed_last_is_given_out_first() -> None:
    allocator = TokenToKVPoolAllocator(4)
    pages = allocator.allocate(4)
    allocator.free(pages[1:2])
    allocator.free(pages[2:4])
    assert allocator.allocate(3).tolist() == [2, 3, 1]
    allocator.check()


def test_a_page_that_is_freed_twice_is_an_error_that_names_it() -> None:
    allocator = TokenToKVPoolAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match=r"freed twice: \[1\]"):
        allocator.free(int32_array([1]))


def test_more_pages_than_are_free_cannot_be_allocated() -> None:
    allocator = TokenToKVPoolAllocator(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_a_page_freed_twice_in_one_call_is_found_by_the_check() -> None:
    allocator = TokenToKVPoolAllocator(4)
    allocator.allocate(4)
    allocator.free(int32_array([2, 2]))
    with pytest.raises(AssertionError, match="twice"):
        allocator.check()


def test_freeing_nothing_and_allocating_nothing_change_nothing() -> None:
    allocator = TokenToKVPoolAllocator(1)
    allocator.free(int32_array())
    assert len(allocator.allocate(0)) == 0
    assert allocator.num_free == 1
