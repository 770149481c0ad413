"""What the prefix cache must have, and in which order it was used, as plans tell.

- What somebody who runs has computed, or one who has left since anything was evicted, nobody computes again.
- What is computed in this very plan nobody else computes beside it: it waits for the next.
- No more is evicted than is needed, and a little.
- Of two prefixes that nobody uses, the one that was left later counts as used later.
- Each hit counts once.

Prefixes are known by the hashes of their tokens, and their times are the ticks in which slots were left. Only where nobody has
waited is it certain that none was used in between: who waits may be tried, and has its prefix touched.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.core import SchedulerCore
from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Int32Array, StepPlan
from srt.protocol.views import AdmissionView
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.reference import UInt64Array
from tests.scheduler.settings import Settings

MOST_PAGES = 2000  # of a memory whose clock is looked at


class Prefixes:
    """One server's. It is told who leaves a slot, and shown each plan before the worker hears of it."""

    def __init__(self, settings: Settings, statistics: Counter[str], worker: FakeWorker) -> None:
        self._settings = settings
        self._statistics = statistics
        self._worker = worker
        self._left: set[int] = set()  # hashes of what was left since anything was evicted
        self._just_left: set[int] = set()  # the same since the tick began
        self._left_at: NDArray[np.int64] = np.zeros(settings.num_pages, np.int64)  # by page
        self._turn = 0
        self._waited_at = 0  # the last turn with somebody waiting
        self._num_evicted = self._num_failed = 0
        self._num_hits = 0
        self._admitted: set[int] = set()  # by seed
        self._counts = Counter(num_prompt_tokens=0, num_cached_tokens=0, num_recomputed_tokens=0)

    def begin(self, core: SchedulerCore) -> None:
        """A tick. Who has left since the last is known."""
        self._turn += 1
        self._left |= self._just_left
        self._just_left.clear()
        self._forget_evicted(core)

    def leave(self, slot: int, request: Request) -> None:
        """It has lost its slot, or ended. The worker has all plans that it was in but those of this tick."""
        if not self._settings.caches:
            return
        hashes = self._hashes_of(slot, request)
        self._just_left.update(hashes.tolist())
        if self._settings.num_pages <= MOST_PAGES:
            self._note_time(slot, hashes)

    def _note_time(self, slot: int, hashes: UInt64Array) -> None:
        """What is in flight may be in the cache, too: when that was used nobody can tell."""
        worker, size, count = self._worker, self._settings.page_size, len(hashes)
        unsure = worker._hashes[slot, (count + 1) * size - 1 :: size]
        self._left_at[np.isin(worker._page_hash, unsure)] = 0
        self._left_at[worker._pages[slot, count : worker._num_pages[slot]]] = 0
        self._left_at[np.isin(worker._page_hash, hashes)] = self._turn

    def judge(self, core: SchedulerCore, kept: list[int], plans: list[StepPlan], *, have_all_stayed: bool) -> None:
        """`kept` are the slots whose requests have stayed."""
        for plan in plans:
            for admission in cast("list[AdmissionView]", plan.sections[0].admissions):
                self._count(admission)
        if not self._settings.caches:
            return
        if len(plans) < 2:  # of several, the first may have come before a slot was left
            self._left |= self._just_left
        is_evicting = self._forget_evicted(core)
        if plans and plans[0].sections[0].admissions and not is_evicting:
            self._check_admissions(kept, plans[0])
        if is_evicting and have_all_stayed:
            self._check_evicted(core, plans)
        if core.planner.num_waiting:
            self._waited_at = self._turn

    def _count(self, admission: AdmissionView) -> None:
        num_known = len(admission.ids) // ITEM
        self._num_hits += admission.cached > 0
        if admission.seed in self._admitted:
            self._counts["num_recomputed_tokens"] += num_known - admission.cached
            return
        self._admitted.add(admission.seed)
        self._counts["num_prompt_tokens"] += num_known
        self._counts["num_cached_tokens"] += admission.cached

    def check_books(self, core: SchedulerCore) -> None:
        """Hits and times as the tree has them, and tokens as they are counted."""
        tree, values = core.memory.tree, core.counters.values()
        self._statistics["rule: tokens of prompts are counted right"] += bool(self._admitted)
        for name, count in self._counts.items():
            assert values[name] == count, f"{name} is {values[name]}, not {count}"
        self._statistics["rule: each hit counts once"] += self._num_hits > 0
        assert tree.root.num_hits == self._num_hits, f"{tree.root.num_hits} hits are counted, not {self._num_hits}"
        if self._settings.num_pages > MOST_PAGES or self._waited_at == self._turn:
            return
        times = []
        for node in tree.nodes():
            if node.parent is not None and not node.pins:
                turn = int(self._left_at[np.frombuffer(node.pages, np.int32)].min())
                if turn > self._waited_at:
                    times.append((turn, node.last_used))
        times.sort()
        latest = before = -1
        for (turn, used), (next_turn, next_used) in pairwise(times):
            latest = max(latest, used)
            if turn < next_turn:
                self._statistics["rule: who was left later was used later"] += 1
                before = latest
            assert next_used > before, f"what was left in tick {next_turn} counts as used before others"

    def _forget_evicted(self, core: SchedulerCore) -> bool:
        """Whether anything was evicted since. What failed is not trusted: with it may go what others have left."""
        before, num_failed = (self._num_evicted, self._num_failed), core.counters.num_failed
        self._num_evicted, self._num_failed = core.memory.tree.num_evicted, num_failed
        if before != (self._num_evicted, num_failed):
            self._left.clear()
            self._just_left.clear()
        if before[1] != num_failed:
            self._waited_at = self._turn
        return before[0] != self._num_evicted

    def _hashes_of(self, slot: int, request: Request) -> UInt64Array:
        """Of the pages that the cache has of it now, at least: of prompts, and of all outputs that are known."""
        worker = self._worker
        through = int(worker._extended[slot])
        if through == worker._num_admitted[slot]:
            through = max(through, request.prompt_len + request.progress.num_output - 1)
        size = self._settings.page_size
        hashes: UInt64Array = worker._hashes[slot, size - 1 : through : size]
        return hashes

    def _check_admissions(self, kept: list[int], plan: StepPlan) -> None:
        size, worker, (section,) = self._settings.page_size, self._worker, plan.sections
        admissions = {admission.slot: admission for admission in section.admissions}
        coming = set()  # that are computed next, by others
        for slot, start in zip(section.extend_slots.tolist(), section.extend_starts.tolist(), strict=True):
            end = (start // size + 1) * size
            if slot not in admissions and end <= worker._num_admitted[slot]:
                coming.add(int(worker._hashes[slot, end - 1]))
        slots = np.array(kept, np.int32)
        for admission in cast("list[AdmissionView]", section.admissions):
            end, choice = (admission.cached // size + 1) * size, worker._by_seed[admission.seed]
            if end > self._most_cached(admission):
                continue
            wanted = int(choice.hashes[end - 1])
            self._statistics["rule: what is being computed is waited for"] += len(section.extend_slots) > 1
            assert wanted not in coming, f"{choice.name} computes in step {plan.step} what another one does"
            coming.add(wanted)
            self._statistics["rule: what is there is not computed again"] += bool(len(slots) or self._left)
            is_all_kept = not self._settings.windows  # what is behind a window may be gone
            assert not is_all_kept or (wanted not in self._left and not self._is_there(slots, end, wanted)), (
                f"{choice.name} gets {admission.cached} tokens from the cache, which has more of it"
            )

    def _is_there(self, slots: Int32Array, end: int, wanted: int) -> bool:
        """Has one of these computed this page?"""
        if not len(slots) or end > self._worker._hashes.shape[1]:
            return False
        has = (self._worker._hashes[slots, end - 1] == np.uint64(wanted)) & (self._worker._extended[slots] >= end)
        return b"\1" in has.tobytes()

    @staticmethod
    def _most_cached(admission: AdmissionView) -> int:
        """Tokens: the last is computed in any case, and those whose logprobs are asked for."""
        most, start = len(admission.ids) // ITEM - 1, admission.logprobs.prompt_start
        return most if start < 0 else min(most, start - 1)

    def _check_evicted(self, core: SchedulerCore, plans: list[StepPlan]) -> None:
        s = self._settings
        num_tokens = sum(int(plan.sections[0].extend_counts.sum()) for plan in plans)
        most = max(s.num_pages // 256, min(s.num_pages // 32, 64)) + num_tokens // s.page_size + len(plans)
        self._statistics["rule: no more is evicted than is needed"] += 1
        assert core.memory.num_free <= most, f"after an eviction {core.memory.num_free} pages are free"
