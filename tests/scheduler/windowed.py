"""Worlds whose model has layers with a window: page groups of their own, whose pages are given back behind the window.

Seeds from `FIRST_WINDOWED` on draw them, each like any other world, theme and callers included. All other worlds have one page group.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.scheduler.settings import Settings, Window

FIRST_WINDOWED = 1_000_000
SMALL_SHARE = 0.6
MOST_REQUESTS = 60  # more would lose their slots to each other for most of a soak's steps
WINDOWS_SHARE = 0.3  # of worlds with two different windows


def with_windows(settings: Settings, seed: int) -> Settings:
    """Return the same settings, or those of a world with windows, seldom with room for much more than what these hold."""
    if seed < FIRST_WINDOWED:
        return settings
    rng = random.Random(f"windows of {seed}")
    s = _small(settings, rng) if rng.random() < SMALL_SHARE else settings
    s = replace(s, num_requests=min(s.num_requests, MOST_REQUESTS))
    longest = s.longest_prompt + s.longest_answer
    sizes = (rng.choice((1, s.page_size)), 2 * s.page_size + 1, longest // 8 + 1, longest // 3 + 1, longest)
    chosen = {rng.choice(sizes) for _ in range(2 if rng.random() < WINDOWS_SHARE else 1)}
    windows = tuple(Window(tokens, _num_pages(s, tokens, rng)) for tokens in sorted(chosen))
    return replace(s, windows=windows, is_alike=True, rarely_new=rng.random() < 0.5)


def _num_pages(s: Settings, tokens: int, rng: random.Random) -> int:
    ahead = s.row_tokens * (s.most_in_flight + 2)
    least = (tokens + ahead) // s.page_size + 4
    columns = tokens // s.page_size + 2
    return least + int(rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)) * columns * s.num_slots) + rng.randint(0, 3)


def _small(s: Settings, rng: random.Random) -> Settings:
    """Return settings with few slots, whose requests have little room together."""
    num_slots = min(s.num_slots, rng.choice((2, 5, 12)))
    longest = s.longest_prompt + s.longest_answer
    pages = int(rng.choice((0.3, 0.6, 1.5)) * num_slots * longest) // s.page_size
    requests = min(s.num_requests, 6 * num_slots + 10)
    least = longest // s.page_size + s.most_in_flight + 3
    return replace(s, num_slots=num_slots, num_pages=least + pages, num_requests=requests)
