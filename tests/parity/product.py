"""The settings under which every answer must be the same, and a small set of them in which every pair of values occurs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Setting:
    tp: int
    page_size: int
    chunk: int
    cache: bool

    def __str__(self) -> str:
        chunk = "unlimited" if self.chunk == UNLIMITED else self.chunk
        return f"tp{self.tp}-page{self.page_size}-chunk{chunk}-{'cache' if self.cache else 'nocache'}"


VALUES: tuple[tuple[int, ...], ...] = ((1, 2), (1, 16), (1, 7, 64, UNLIMITED), (0, 1))
PRODUCT = [Setting(tp, page, chunk, bool(cache)) for tp, page, chunk, cache in itertools.product(*VALUES)]


def pairs(setting: Setting) -> set[tuple[int, int, int, int]]:
    """Every two values that meet in this setting, each with the position of its dimension."""
    values = (setting.tp, setting.page_size, setting.chunk, int(setting.cache))
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(4), 2)}


def pairwise() -> list[Setting]:
    """Settings that cover all pairs, found greedily: few, and always the same ones."""
    missing = set().union(*(pairs(s) for s in PRODUCT))
    chosen: list[Setting] = []
    while missing:
        best = max(PRODUCT, key=lambda s: len(pairs(s) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
