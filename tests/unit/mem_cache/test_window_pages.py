"""Which pages of a window group are evicted first."""

from __future__ import annotations

import numpy as np

from srt.mem_cache.window_pages import WindowPages


def test_what_is_evicted_from_an_ended_request_leaves_a_prefix_that_can_be_found() -> None:
    """A request of 4 pages, shorter than the window, has ended; others need 1 of its pages, then 2 more."""
    pages = WindowPages(window=100, num_pages=5, page_size=16, num_full_pages=12, num_slots=2)
    full_pages = np.arange(12, dtype=np.int32)
    ended = full_pages[:4].tobytes()
    pages.begin(0, b"")
    pages.append([0], ended)
    pages.release(0)
    assert pages.num_usable(ended) == 4
    pages.begin(1, b"")
    pages.append([1], full_pages[4:6].tobytes())
    assert pages.num_usable(ended) == 3
    pages.append([1], full_pages[6:8].tobytes())
    assert pages.num_usable(ended) == 1
    pages.check([1], full_pages[8:])
