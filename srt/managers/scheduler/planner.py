"""The planner of steps: it decides which requests get a slot, which prompts advance, and which rows decode.

There are no phases: a step decodes for running requests, and has a budget of tokens and time for chunks of prompts. Running prompts that
fit into the step come first, then new requests, then running prompts that do not fit. Half of the budget is reserved for those last
ones. So long prompts always advance, and short ones overtake them.

Requests are admitted for the memory that they are expected to need. When memory runs out, the last in rank is preempted: it loses its
slot and pages, its computed prefix stays in the cache, and it waits again in its old place. So the first in rank always advances.

Suspects are requests that may have killed workers. They run before all others, one at a time and each alone in its steps (trials.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.counters import Counters
from srt.managers.scheduler.draft_length import DraftLength
from srt.managers.scheduler.forecast import OutputForecast
from srt.managers.scheduler.kv_memory import KvMemory
from srt.managers.scheduler.plan_draft import Draft, NextPage, Planned, admission_of
from srt.managers.scheduler.preempted import PreemptedRequests
from srt.managers.scheduler.ranking import Ranking
from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.slots import SlotTable
from srt.managers.scheduler.step_times import StepTimes
from srt.managers.scheduler.trials import Trials
from srt.managers.scheduler.waiting import WaitingQueue
from srt.mem_cache.radix_cache import ITEM, RadixNode
from srt.protocol.arrays import INT32, int32_bytes
from srt.protocol.messages import Admission, Int32Array, Int64Array, PlanSection, StepPlan, int32_array

UNLIMITED: Final = 1 << 40
NO_SLOTS: Int64Array = np.zeros(0, np.int64)
NO_NUMBERS = int32_array()
NO_EXTENDS: dict[int, int] = {}


class Planner:
    """Makes the plans. Owns the waiting requests and the order of the running ones, and alone allocates and frees slots and pages."""

    def __init__(
        self,
        slots: SlotTable,
        memory: KvMemory,
        counters: Counters,
        forecast: OutputForecast,
        ranking: Ranking,
        queue: WaitingQueue,
        step_times: StepTimes,
        chunk_size: int,
        *,
        max_row_tokens: int = 1,
        num_stages: int = 1,
    ) -> None:
        self._slots = slots
        self._memory = memory
        self._counters = counters
        self._forecast = forecast
        self._ranking = ranking
        self._step_times = step_times
        self._chunk_size = UNLIMITED if chunk_size < 0 else chunk_size
        self._queue = queue
        self._max_row_tokens = max_row_tokens  # most ids of a decode in any step
        self._draft_length = DraftLength(max_row_tokens)
        self.row_tokens = max_row_tokens  # most ids of a decode in the present step
        self._num_stages = num_stages  # of a pipeline; 1 except in tests
        self._running: list[Request | None] = [None] * slots.num_slots
        self._prefilling: list[Request] = []
        self._decoding = NO_SLOTS
        self._num_admitted = 0
        self._something_ended = False  # since the last plan
        self._no_room_for: Request | None = None  # the first in the queue: not tried again until something is freed
        self._num_urgent = 0  # urgent requests in the queue
        self._now = 0.0  # time of the present plan
        self._planned_step = 0
        self._answered_step = 0
        self.preempted = PreemptedRequests()
        self.trials = Trials(slots, counters)
        self.num_waiting = 0

    # ---- Arrival and end of requests

    def add(self, request: Request, *, is_ready: bool = True) -> None:
        """Accept a new request. One that is not ready waits beside the queue, until `make_ready` is called."""
        self.num_waiting += 1
        self._queue.enter(request, self._ranking.order(request))
        self._num_urgent += request.urgent
        if request.suspect:
            self.trials.add(request)
        if is_ready:
            self._line_up(request)
        else:
            self._queue.hold(request)

    def make_ready(self, request: Request) -> None:
        """Let a request wait in the queue from now on: the workers have prepared what it needs."""
        self._queue.let_go(request)
        self._line_up(request)

    def _line_up(self, request: Request) -> None:
        if not self.trials.line_up(request):
            self._queue.push(request)

    def end(self, request: Request, *, keep_prefix: bool = True) -> None:
        """End a request and free what it holds. `keep_prefix` is False after a 500: the computed prefix may be wrong, so it is dropped."""
        was_waiting = request.progress.status is Status.WAITING
        request.progress.status = Status.ENDED
        self._no_room_for = None
        if was_waiting:
            self.num_waiting -= 1
            self._num_urgent -= request.urgent
            was_elsewhere = self.preempted.remove(request) | self._queue.let_go(request)
            if not self.trials.remove(request) and not was_elsewhere:
                self._queue.note_end()
        else:
            self._vacate(request, keep_prefix=keep_prefix)
            if not request.urgent:
                self._forecast.note_end(request.progress.num_output, request.max_new)
        if not keep_prefix:
            self._memory.distrust(request)

    def request_in(self, slot: int) -> Request:
        request = self._running[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def running(self) -> list[Request]:
        return [request for request in self._running if request is not None]

    def preempt_all(self) -> None:
        for request in self.running():
            self._preempt(request)

    def note_answered(self, planned: Planned, num_ids: int, step_us: int) -> None:
        """Note that the results of all plans up to this one are applied. It had this number of ids."""
        self._answered_step = planned.plan.step
        num_decodes = len(planned.sampling_slots) - planned.num_prompt_ends
        self._step_times.record(num_decodes, planned.num_tokens, planned.num_pairs, step_us)
        if planned.num_tokens:
            self._counters.count_prompt_step(planned.num_tokens, step_us)
        else:
            self._draft_length.record(num_decodes, planned.row_tokens, num_ids, step_us)
        for request in self.preempted.note_answered(planned.plan.step):
            self._line_up(request)

    def started(self) -> list[Request]:
        """Return the requests that run, and those that were preempted and wait to run again."""
        return [*self.running(), *self.preempted.requests()]

    # ---- The next step

    def plan(self, step: int, now: float) -> Planned | None:
        """Plan the next step, or return None if there is nothing to do. The step's work counts as done from now on.

        While trials are left, call this only after all ranks have answered all earlier steps.
        """
        self._now = now
        self._forget_ended()
        if self._memory.windows and self._memory.give_back_passed(self._max_row_tokens == 1):
            self._no_room_for = None
        if self._max_row_tokens > 1:
            self._choose_row_tokens(step)
        on_trial = self.trials.find_on_trial()
        if on_trial is not None:
            return self._plan_trial(step, on_trial)
        self._queue.begin_plan()
        is_short = self._preempt_for_room(step)
        rows = self._decode_rows(step)
        must_measure = self._step_times.must_measure(len(rows))
        if not is_short and not must_measure and (self._ranking.has_priorities or self._num_urgent):
            if self._displace():
                rows = self._decode_rows(step)
        times, num_streams = self._step_times, int(np.count_nonzero(self._slots.stream[rows]))
        draft = Draft(min(self._chunk_size, times.most_tokens(num_streams)), times.budget_us(num_streams))
        self._plan_decodes(draft, rows)
        if not must_measure and (self._prefilling or self.num_waiting):
            # A plan that preempts leaves the room to running requests. If nothing runs or is in flight, only an admission leads on.
            is_all_answered = self._slots.num_used == 0 and self._planned_step == self._answered_step
            self._plan_prompts(draft, may_admit=not is_short or is_all_answered)
        for request in draft.aside:
            self._queue.push(request)
        if not draft.extends and not len(rows):
            return None
        self._counters.num_held_back += len(draft.aside)
        return self._finish_plan(step, draft, rows)

    def _choose_row_tokens(self, step: int) -> None:
        """Choose how many ids a decode may get. Drafts take no other request's room: where it is short, rows bring none."""
        self.row_tokens = self._draft_length.choose(len(self._decode_rows(step)))
        if self.row_tokens > 1 and self._is_short(step):
            self.row_tokens = 1

    def _plan_trial(self, step: int, request: Request) -> Planned:
        """Plan a step that holds only the request on trial. Other requests keep their slots unless the trial needs room."""
        draft, rows, memory = Draft(self._chunk_size, inf), NO_SLOTS, self._memory
        if request.progress.status is Status.WAITING:
            self._admit_to_trial(draft, request)
        elif request.progress.prompt_done:
            rows = np.array([request.progress.slot], np.int64)
            self._make_room_beside(request, lambda: memory.num_available >= self._num_lacking(rows))
            self._plan_decodes(draft, rows)
        else:
            self._make_room_beside(request, lambda: memory.num_available > 0)
            self._plan_chunk(draft, request)
        return self._finish_plan(step, draft, rows)

    def _admit_to_trial(self, draft: Draft, request: Request) -> None:
        memory, expected = self._memory, self._expected_tokens(request)
        self._make_room_beside(request, lambda: self._slots.num_free > 0 and memory.has_room(expected, 0))
        node, cached = memory.pin_prefix(request)
        self._start(request, node, cached, expected)
        draft.admissions.append(admission_of(request, len(cached) // ITEM * memory.page_size))
        self._plan_chunk(draft, request)

    def _make_room_beside(self, request: Request, is_enough: Callable[[], bool]) -> None:
        """Preempt other requests, from the last in rank on, until there is room or no other is left. No row may be in flight."""
        while not is_enough():
            others = [other for other in self.running() if other is not request]
            if not others:
                return
            self._preempt(max(others, key=_order))
        self._forget_ended()

    def _forget_ended(self) -> None:
        if self._something_ended:
            self._decoding = self._decoding[self._slots.incarnation[self._decoding] != 0]
            self._something_ended = False

    def _preempt_for_room(self, step: int) -> bool:
        """Preempt until all decodes and the first in rank can advance. Return True if a request was preempted."""
        before = self._counters.num_preempted
        while self._is_short(step):
            self._preempt(max(self.running(), key=_order))
            self._forget_ended()
        return self._counters.num_preempted > before

    def _displace(self) -> bool:
        """Make room for the first waiting request by preempting lower ones. Return False, preempting none, if that cannot suffice."""
        request = self._queue.first()
        if request is None:
            return False
        lower = [r for r in self._running if r is not None and self._ranking.may_displace(request, r)]
        if not lower:
            return False
        lower.sort(key=_order, reverse=True)
        expected = self._expected_tokens(request)
        missing = self._memory.missing_for(request, expected)  # by group
        needs_slot = self._slots.num_free == 0
        victims: list[Request] = []
        while lower and (max(missing) > 0 or (needs_slot and not victims)):
            victims.append(lower.pop(0))
            held = self._memory.held_by(victims[-1].progress.slot)
            missing = [lacking - freed for lacking, freed in zip(missing, held, strict=True)]
        if max(missing) > 0 or self._will_stand_aside(request, victims):
            return False
        for victim in victims:
            self._preempt(victim)
        while lower and not self._memory.has_room_for(request, expected):  # victims may have shared pages
            self._preempt(lower.pop(0))
        self._forget_ended()
        return True

    def _will_stand_aside(self, request: Request, victims: list[Request]) -> bool:
        """Return whether a prompt that goes on computes the page that `request` needs first, so that `request` is not admitted yet."""
        memory, ids = self._memory, request.progress.id_bytes
        cached = memory.num_cached(request) // memory.page_size
        if not memory.caches or cached >= request.progress.cacheable_pages(memory.page_size):
            return False
        end = (cached + 1) * memory.page_size * ITEM
        going_on = (other for other in self._prefilling if other.salt == request.salt and other not in victims)
        return any(o.hold.num_in_tree == cached and o.progress.id_bytes[:end] == ids[:end] for o in going_on)

    def _is_short(self, step: int) -> bool:
        available = self._memory.num_available
        if available > len(self._decoding) * self._memory.pages_for(self._max_row_tokens):
            return False
        left = available - self._num_lacking(self._decode_rows(step))
        if left != 0 or not self._prefilling:
            return left < 0
        first = min(self.running(), key=_order)
        slot = first.progress.slot
        has_no_page = self._slots.computed_at[slot] >= self._slots.num_pages_of(slot) * self._memory.page_size
        return not first.progress.prompt_done and has_no_page

    def _preempt(self, request: Request) -> None:
        """Take the request's slot and pages. It still gets the results of its rows in flight; then it may be admitted again."""
        computed = self._slots.computed_at[request.progress.slot]
        self._vacate(request, keep_prefix=True)
        request.progress.lose_slot(computed, request.prompt_len)
        self._counters.num_preempted += 1
        self.num_waiting += 1
        self._num_urgent += request.urgent
        self._no_room_for = None
        self.trials.lose_slot(request)
        for back in self.preempted.add(request, self._planned_step):
            self._line_up(back)

    def _decode_rows(self, step: int) -> Int64Array:
        rows = self._decoding
        wants = self._slots.computed[rows] < self._slots.most_computed[rows]
        wanting: Int64Array = rows[wants] if 0 in wants.tobytes() else rows
        return wanting if self._num_stages == 1 else self._whose_turn_it_is(step, wanting)

    def _whose_turn_it_is(self, step: int, rows: Int64Array) -> Int64Array:
        """Return this step's share of the rows, those that have waited longest. A pipeline is full when each step has its share.

        The share counts all decoding rows. If it counted only rows that still want tokens, it would shrink and starve the last rows.
        """
        share = -(-len(self._decoding) // self._num_stages)
        rows = rows[self._is_back(step, rows)]
        if len(rows) <= share:
            return rows
        waited_longest = np.argsort(self._slots.planned_at[rows], kind="stable")[:share]
        turn: Int64Array = rows[np.sort(waited_longest)]
        return turn

    def _is_back(self, step: int, slots: Int64Array) -> NDArray[np.bool_]:
        """Return for each slot whether its row is in no stage of the pipeline any more when this step enters the first stage."""
        planned_at = self._slots.planned_at[slots]
        back: NDArray[np.bool_] = planned_at <= max(step - self._num_stages, self._answered_step)
        return back

    def _ends(self, rows: Int64Array) -> Int32Array:
        """Return the largest number of positions that each row can have after the step, within its request's limit."""
        ends: Int32Array = self._slots.computed[rows]
        ends += 1 if self.row_tokens == 1 else np.minimum(self._slots.most_computed[rows] - ends, self.row_tokens)
        return ends

    def _num_lacking(self, rows: Int64Array) -> int:
        """Return the number of pages that these rows need for the step and do not have."""
        missing = -(-self._ends(rows) // self._memory.page_size) - self._slots.num_pages[rows]
        return int(missing.clip(0).sum())

    def _plan_decodes(self, draft: Draft, rows: Int64Array) -> None:
        """Plan the next tokens of these rows. Each row's last id is on the device before the step runs."""
        slots = self._slots
        if not len(rows):
            return
        ends = self._ends(rows)
        is_lacking = ends > slots.num_pages[rows] * self._memory.page_size
        if 1 in is_lacking.tobytes():
            self._grow(draft, rows[is_lacking], ends[is_lacking])
        slots.computed[rows] = ends if self.row_tokens == 1 else slots.computed[rows] + self.row_tokens

    def _grow(self, draft: Draft, lacking: Int64Array, ends: Int32Array) -> None:
        if self.row_tokens > 1:
            for slot, end in zip(lacking.tolist(), ends.tolist(), strict=True):
                draft.add_pages(slot, self._memory.grow(slot, end))
            return
        slots = lacking.tolist()
        draft.pages.append(self._memory.grow_by_one_each(slots))
        draft.page_slots += slots
        draft.page_counts += [1] * len(lacking)

    def _plan_prompts(self, draft: Draft, *, may_admit: bool) -> None:
        short: list[Request] = []
        long: list[Request] = []
        for request in self._prefilling:
            (long if self._count_within(draft, request) < self._missing(request) else short).append(request)
        kept, kept_us = 0, 0.0
        if long:
            kept, kept_us = (draft.budget + 1) // 2, draft.budget_us / 2 if draft.is_timed else 0.0
            draft.budget -= kept
            draft.budget_us -= kept_us
        for request in long:
            draft.coming.add(self._page_behind(request))
        for request in short:
            if draft.has_budget:
                self._plan_chunk(draft, request)
        if may_admit:
            self._admit(draft)
        draft.budget, draft.budget_us = draft.budget + kept, max(draft.budget_us, 0.0) + kept_us
        finds_no_page = False
        for request in long:
            if draft.has_budget:
                self._plan_chunk(draft, request)
                lacks = self._slots.computed_at[request.progress.slot] == self._memory.capacity(request.progress.slot)
                finds_no_page |= lacks and self._missing(request) > 0
        if finds_no_page:
            self._lengthen_chunks(draft)

    def _lengthen_chunks(self, draft: Draft) -> None:
        """Lengthen chunks of this plan by the budget that is left because long prompts lack pages. No chunk gets a new page for this."""
        for index, request in enumerate(draft.extends):
            if not draft.has_budget:
                return
            slot = request.progress.slot
            start = self._slots.computed_at[slot]
            room = min(request.progress.num_known, self._slots.num_pages_of(slot) * self._memory.page_size) - start
            count = min(self._count_within(draft, request), room)
            if count > 0:
                self._spend(draft, start, count)
                self._slots.computed_at[slot] = start + count
                draft.lengthen_chunk(index, count, samples=start + count == request.progress.num_known)

    def _missing(self, request: Request) -> int:
        computed: int = self._slots.computed_at[request.progress.slot]
        return request.progress.num_known - computed

    def _count_within(self, draft: Draft, request: Request) -> int:
        if not draft.is_timed:
            return draft.budget
        start = self._slots.computed_at[request.progress.slot]
        return min(draft.budget, self._step_times.tokens_within(draft.budget_us, start))

    def _plan_chunk(self, draft: Draft, request: Request, behind: NextPage | None = None) -> None:
        """Plan the next known ids of this request, as far as budget and memory allow. `behind` is its `_page_behind`, if known."""
        slots, memory, progress = self._slots, self._memory, request.progress
        slot = progress.slot
        start = slots.computed_at[slot]
        count = self._count_within(draft, request)
        end = min(progress.num_known, memory.capacity(slot))
        if start + count > end:
            count = end - start
        if count <= 0:
            return
        self._spend(draft, start, count)
        end = start + count
        had = slots.num_pages_of(slot) if progress.num_chunks == 0 else 0  # cached pages, not sent yet
        pages = memory.grow(slot, end)
        draft.add_pages(slot, slots.pages_of(slot, 0, had) + pages if had else pages)
        slots.computed_at[slot] = end
        progress.num_chunks += 1
        if memory.caches:
            draft.coming.add(self._page_behind(request) if behind is None else behind)
        draft.add_chunk(request, start, count, samples=end == progress.num_known)

    def _spend(self, draft: Draft, start: int, count: int) -> None:
        draft.budget -= count
        if draft.is_timed:
            draft.budget_us -= self._step_times.cost_us(start, count)

    def _admit(self, draft: Draft) -> None:
        """Give slots to waiting requests, in order, while there is room and budget."""
        slots, memory = self._slots, self._memory
        while draft.has_budget and slots.num_free > 0:
            request = self._queue.first()
            if request is None or request is self._no_room_for:
                return
            node, cached = memory.pin_prefix(request)
            num_cached = len(cached) // ITEM
            behind = self._next_page(request, node, num_cached) if memory.caches else None
            if behind in draft.coming and num_cached < request.progress.cacheable_pages(memory.page_size):
                # Another request computes this page in this very plan, and the next plan finds it in the cache. Usually it finds all
                # that the two have in common: budget is left, so the other request's chunk was not cut short.
                memory.unpin(node)
                self._queue.stand_aside()
                draft.aside.append(request)
                if len(draft.aside) == slots.num_free:
                    return  # the next plan cannot admit more than these
                continue
            expected = self._expected_tokens(request)
            if not memory.has_room(expected, num_cached):
                memory.unpin(node)
                self._no_room_for = request
                return
            self._queue.pop()
            self._start(request, node, cached, expected)
            draft.admissions.append(admission_of(request, num_cached * memory.page_size))
            self._plan_chunk(draft, request, behind)

    def _expected_tokens(self, request: Request) -> int:
        """Return the tokens, prompt and output, that the request needs room for: the forecast, or its maximum if it was preempted."""
        if request.progress.num_preempted:
            return request.max_tokens
        expected = self._forecast.expected_outputs(request.max_new)
        return max(request.prompt_len + expected, request.progress.num_known + 1)

    def _page_behind(self, request: Request) -> NextPage:
        """Return the key of a running request's first page that is not in the prefix tree."""
        hold = request.hold
        assert hold.node is not None
        return self._next_page(request, hold.node, hold.num_in_tree)

    def _next_page(self, request: Request, node: RadixNode, num_pages: int) -> NextPage:
        """Return the key of the page that follows the request's first `num_pages`, which end at `node`."""
        size = self._memory.page_size * ITEM
        return node.serial, request.salt, request.progress.id_bytes[num_pages * size : (num_pages + 1) * size]

    def _start(self, request: Request, node: RadixNode, cached: bytes, expected_tokens: int) -> None:
        self.num_waiting -= 1
        self._num_urgent -= request.urgent
        self._num_admitted += 1
        progress = request.progress
        progress.status = Status.RUNNING
        progress.incarnation = self._num_admitted
        progress.slot = self._slots.allocate()
        num_cached = len(cached) // ITEM * self._memory.page_size
        self._memory.hold_prefix(request, node, cached)
        self._slots.fill(request, cached, num_cached)
        self._memory.promise(request, expected_tokens)
        self._running[progress.slot] = request
        self._prefilling.append(request)
        if progress.started_s is None:
            progress.started_s = self._now
            if not request.urgent:
                self._counters.count_wait(self._now - request.arrived_s)
        if progress.num_preempted:
            self.preempted.remove(request)
            self._counters.num_recomputed_tokens += progress.num_known - num_cached
            return
        self._counters.num_prompt_tokens += progress.num_known
        self._counters.num_cached_tokens += num_cached

    def _publish(self, draft: Draft) -> None:
        """Insert the pages that the finished draft computes into the prefix cache, and let the prompts that it completes decode next."""
        finished: list[int] = []
        for i, request in enumerate(draft.extends):
            progress = request.progress
            self._memory.insert_computed(request, progress.id_bytes, draft.starts[i] + draft.counts[i])
            if draft.samples[i]:
                progress.prompt_done = True
                finished.append(progress.slot)
                self._counters.count_prompt(progress.num_chunks, self._memory.pages_for(request.prompt_len))
        if finished:
            self._prefilling = [request for request in self._prefilling if not request.progress.prompt_done]
            self._decoding = np.concatenate((self._decoding, np.array(finished, np.int64)))

    def _finish_plan(self, step: int, draft: Draft, decodes: Int64Array) -> Planned:
        self._planned_step = step
        self._publish(draft)
        self._counters.count_step(len(draft.extends), len(decodes))
        self._step_times.note_planned(len(decodes), draft.num_tokens)
        if not draft.num_tokens:
            self._draft_length.note_planned(len(decodes), self.row_tokens)
        slots, rows = self._slots, decodes
        columns, extends, num_prompt_ends = [NO_NUMBERS] * 4, NO_EXTENDS, 0
        if draft.extends:
            progresses = [request.progress for request in draft.extends]
            extend_slots = [progress.slot for progress in progresses]
            numbers = int32_bytes(extend_slots + draft.starts + draft.counts + draft.samples)
            columns = list(np.frombuffer(numbers, INT32).reshape(4, -1))
            extends = {progress.slot: progress.incarnation for progress in progresses}
            sampling = [progress.slot for progress in progresses if progress.prompt_done]
            num_prompt_ends = len(sampling)
            rows = np.concatenate((np.array(sampling, np.int64), decodes))
            if self._num_stages > 1:
                slots.planned_at[extend_slots] = step
        if self._num_stages > 1:
            slots.planned_at[decodes] = step
        news = cast("list[Admission]", draft.admissions), draft.page_deltas(self._memory.windows)  # types of the wire
        chunks = columns[0], columns[1], columns[2], columns[3]
        section = PlanSection(*news, *chunks, decodes.astype(np.int32), self.row_tokens)
        of_step = slots.incarnation[rows], num_prompt_ends, extends, draft.num_tokens, draft.num_pairs, self.row_tokens
        return Planned(StepPlan(step, [section]), rows, *of_step)

    def _vacate(self, request: Request, *, keep_prefix: bool) -> None:
        slots, slot = self._slots, request.progress.slot
        slots.give_back(request)
        if keep_prefix:
            self._memory.insert_computed(request, request.bytes_with_outputs(), self._num_written(request))
        self._memory.release(request)
        slots.release(slot)
        self._running[slot] = None
        if not request.progress.prompt_done:
            self._prefilling.remove(request)
        self._something_ended = True

    def _num_written(self, request: Request) -> int:
        """Return the number of positions whose KV the steps so far compute from known ids. KV of rejected ids may follow them."""
        computed: int = self._slots.computed_at[request.progress.slot]
        if self._max_row_tokens == 1:
            return computed
        return min(computed, max(request.progress.num_known, request.prompt_len + request.progress.num_output - 1))

    def check(self) -> None:
        """Raise AssertionError unless slots, pages, promises and lists of requests agree."""
        running = self.running()
        self._slots.check()
        self._memory.check(running)
        assert [r.progress.slot for r in running] == self._slots.used_slots(), (
            "a used slot has no running request, or two"
        )
        in_lists = sorted(
            [r.progress.slot for r in self._prefilling] + [int(s) for s in self._decoding if self._slots.incarnation[s]]
        )
        assert in_lists == self._slots.used_slots(), "a running request is in no list of the planner, or in two"


def _order(request: Request) -> tuple[float, int]:
    return request.place.order
