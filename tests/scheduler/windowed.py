"""Worlds whose model has layers with a window: a second page group, whose pages are given back behind the window."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tests.scheduler.settings import Settings
from tests.scheduler.world import World

# Counted where each had something to judge, as those in rules.py are. They have nothing to judge in worlds without a window.
WINDOW_RULES = (
    "rule: a window's page has one writer",
    "rule: a window's pages hold what its row reads",
    "rule: pages behind windows are given back",
)


def windowed(seed: int) -> Settings:
    """The settings of a world, drawn as others are, with a window and seldom with room for much more than what windows hold."""
    rng = random.Random(f"windows of {seed}")
    s = _small(Settings.draw(rng, random.Random(f"graphs beside windows of {seed}")), rng)
    longest = s.longest_prompt + s.longest_answer
    window = rng.choice((1, s.page_size, 2 * s.page_size + 1, longest // 8 + 1, longest // 3 + 1))
    ahead = s.row_tokens * (s.most_in_flight + 2)
    least = (window + ahead) // s.page_size + 4
    columns = window // s.page_size + 2
    pages = int(rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)) * columns * s.num_slots) + rng.randint(0, 3)
    return replace(s, window_tokens=window, window_pages=least + pages, is_alike=True, rarely_new=rng.random() < 0.5)


def _small(settings: Settings, rng: random.Random) -> Settings:
    """With few slots, whose requests have little room together."""
    s, num_slots = settings, min(settings.num_slots, rng.choice((2, 5, 12)))
    longest = s.longest_prompt + s.longest_answer
    pages = int(rng.choice((0.3, 0.6, 1.5)) * num_slots * longest) // s.page_size
    requests = min(s.num_requests, 6 * num_slots + 10)
    least = longest // s.page_size + s.most_in_flight + 3
    return replace(s, num_slots=num_slots, num_pages=least + pages, num_requests=requests)


def run_windowed(seeds: Iterable[int]) -> Counter[str]:
    """What happened in all of these worlds. AssertionError names the seed that breaks a promise."""
    statistics = Counter[str]()
    for seed in seeds:
        world = World(seed, windowed(seed), check_every=2)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(
                f"World {seed} with a window broke at {world.now:.3f} s: {type(error).__name__}: {error}\n{world.settings}"
            ) from error
        statistics.update(world.statistics)
    return statistics
