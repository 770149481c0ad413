from __future__ import annotations

import numpy as np
import pytest

from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.protocol.messages import int32_array


def numbers(pages: bytes) -> list[int]:
    values: list[int] = np.frombuffer(pages, np.int32).tolist()
    return values


def joined(*pages: int) -> bytes:
    return int32_array(pages).tobytes()


def test_every_page_is_given_out_once_and_in_a_fixed_order() -> None:
    allocator = TokenToKVPoolAllocator(4)
    assert numbers(allocator.allocate(3) + allocator.allocate(1)) == [0, 1, 2, 3]
    assert allocator.num_free == 0
    allocator.check()


def test_the_page_freed_last_is_given_out_first() -> None:
    allocator = TokenToKVPoolAllocator(4)
    allocator.allocate(4)
    allocator.free(joined(1))
    allocator.free(joined(2, 3))
    assert numbers(allocator.allocate(3)) == [2, 3, 1]
    allocator.check()


@pytest.mark.parametrize("count", [2, 100])
def test_a_page_that_is_freed_twice_is_an_error_that_names_it(count: int) -> None:
    allocator = TokenToKVPoolAllocator(200)
    pages = allocator.allocate(count)
    allocator.free(joined(1))
    allocator.check()
    allocator.free(pages)
    with pytest.raises(AssertionError, match=r"\[1\] are freed twice"):
        allocator.check()


def test_no_page_is_given_out_before_those_given_back_are_checked() -> None:
    allocator = TokenToKVPoolAllocator(4)
    pages = allocator.allocate(4)
    allocator.free(pages)
    allocator.free(joined(3))
    with pytest.raises(AssertionError, match="one is freed twice"):
        allocator.allocate(1)


def test_more_pages_than_are_free_cannot_be_allocated() -> None:
    allocator = TokenToKVPoolAllocator(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("count", [2, 100])
def test_a_page_freed_twice_in_one_call_is_found_by_the_check(count: int) -> None:
    allocator = TokenToKVPoolAllocator(200)
    allocator.allocate(200)

    def free_and_check() -> None:
        allocator.free(joined(*[2] * count))
        allocator.check()

    with pytest.raises(AssertionError, match="twice"):
        free_and_check()


def test_freeing_nothing_and_allocating_nothing_change_nothing() -> None:
    allocator = TokenToKVPoolAllocator(1)
    allocator.free(b"")
    assert len(allocator.allocate(0)) == 0
    assert allocator.num_free == 1
