"""Bugs to plant in how the pages of windows are held, given back and found again."""

from __future__ import annotations

from tests.scheduler.mutations import Mutation

_WINDOWS = "mem_cache/window_pages.py"

WINDOW_MUTATIONS = (
    Mutation(
        "a page of a window is given back one token too early",
        _WINDOWS,
        "firsts = (positions.astype(np.int64) - self.window + 1)",
        "firsts = (positions.astype(np.int64) - self.window + 2)",
    ),
    Mutation(
        "pages behind a window are kept",
        _WINDOWS,
        "is_due = firsts > self._held_from[slots]",
        "is_due = firsts > self._held_from[slots] + 2",
    ),
    Mutation(
        "a hit counts without the pages of its window",
        _WINDOWS,
        "missing = np.flatnonzero(self._page_of[numbers] < 0)",
        "missing = np.flatnonzero(self._page_of[numbers] < 0)[:0]",
    ),
    Mutation(
        "a page of a window is given away while a row of the same plan reads it",
        "managers/scheduler/planner.py",
        "        self._plan_decodes(draft, rows)\n        if not must_measure",
        "        self._plan_decodes(draft, rows); self._memory.give_back_passed(True)\n        if not must_measure",
    ),
    Mutation(
        "positions that no result has confirmed move a window",
        "managers/scheduler/kv_memory.py",
        "        if not has_certain_lengths:",
        "        if not has_certain_lengths and not len(rows):",
    ),
)
