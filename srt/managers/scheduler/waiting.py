"""The queues of requests that wait for a slot, and the choice of the next one, with `--schedule-policy lpm` by cached prefix."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from srt.managers.scheduler.request import Request, Status

Order = tuple[float, int]  # unique, so that a heap never compares the requests themselves
NUM_COMPARED: Final = 32  # earliest requests, compared by the length of their cached prefix
NUM_MATCHED_AGAIN: Final = 2  # of these, matched again in each plan, because the cache changes
MAX_PASSED: Final = 64  # later requests that may be admitted before a request


class WaitingQueue:
    """The waiting requests by `Place.order`, including those that come back after standing aside or a preemption.

    A request that comes after all others, as most do, joins a line, so that the cost does not grow with the number of requests; the
    others go to a heap. Ended requests are dropped when they are met.
    """

    def __init__(self) -> None:
        self._line: deque[Request] = deque()
        self._last: Request | None = None  # the last request that joined the line
        self._heap: list[tuple[Order, Request]] = []
        self._num_dead = 0
        self._held: set[Request] = set()

    @property
    def num_held(self) -> int:
        """Number of requests that wait beside the queue, until the workers have prepared what they need."""
        return len(self._held)

    def hold(self, request: Request) -> None:
        """Let a request wait beside the queue."""
        self._held.add(request)

    def let_go(self, request: Request) -> bool:
        """Return whether the request waited beside the queue; it does so no more."""
        was_held = request in self._held
        self._held.discard(request)
        return was_held

    def enter(self, request: Request, order: Order) -> None:
        """Give a request that arrives its place in the order, for good. It does not wait before it is pushed."""
        request.place.order = order

    def push(self, request: Request) -> None:
        if not self._line or (self._last is not None and _comes_before(self._last, request)):
            self._line.append(request)
            self._last = request
        else:
            heapq.heappush(self._heap, (request.place.order, request))

    def first(self) -> Request | None:
        line, heap = self._line, self._heap
        while line and line[0].progress.status is not Status.WAITING:
            line.popleft()
            self._num_dead -= 1
        while heap and heap[0][1].progress.status is not Status.WAITING:
            heapq.heappop(heap)
            self._num_dead -= 1
        if self._is_heap_first():
            return heap[0][1]
        return line[0] if line else None

    def pop(self) -> None:
        """Remove the request that `first` returned: it is admitted."""
        if self._is_heap_first():
            heapq.heappop(self._heap)
        else:
            self._line.popleft()

    def stand_aside(self) -> None:
        """Remove the request that `first` returned for the rest of the plan. It is pushed again before the next plan."""
        self.pop()

    def begin_plan(self) -> None:
        """Prepare for the next plan."""

    def note_end(self) -> None:
        """Note that a request in the queue has ended. Ended requests are removed together once they are the majority."""
        self._num_dead += 1
        if self._num_dead > (len(self._line) + len(self._heap)) // 2 + 16:
            self._line = deque(request for request in self._line if request.progress.status is Status.WAITING)
            self._heap = [entry for entry in self._heap if entry[1].progress.status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def _is_heap_first(self) -> bool:
        return bool(self._heap) and (not self._line or self._heap[0][0] < self._line[0].place.order)


def _comes_before(one: Request, other: Request) -> bool:
    """Return whether `one` has the smaller `order`. Compiled code would have to build objects to compare the tuples themselves."""
    mine, others = one.place, other.place
    if mine.order[0] != others.order[0]:
        return mine.order[0] < others.order[0]
    return mine.order[1] < others.order[1]


class LongestPrefixQueue(WaitingQueue):
    """A queue that prefers the longest cached prefix among the 32 earliest requests; one that 64 later ones have passed goes first.

    A plan's cost does not depend on the length of the queue: a request is matched when it becomes one of the 32, and two of these are
    matched again per plan.
    """

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        super().__init__()
        self._num_cached = num_cached
        self._near: list[Request] = []  # the earliest, in order; some may have ended
        self._turn = 0  # index in `_near` of the request last matched again
        self._best: Request | None = None  # None: not chosen yet
        self._aside: list[Request] = []  # requests that stood aside in this plan

    def push(self, request: Request) -> None:
        super().push(request)
        self._best = None

    def first(self) -> Request | None:
        if self._best is None or self._best.progress.status is not Status.WAITING:
            self._come_near()
            self._best = self._choose()
        return self._best

    def pop(self) -> None:
        best = self._best
        assert best is not None
        place = 0
        for request in self._near:
            if request is best:
                break
            request.place.num_passed += 1
            place += 1
        del self._near[place]
        for request in self._aside:
            if _comes_before(request, best):
                request.place.num_passed += 1
        self._best = None

    def stand_aside(self) -> None:
        assert self._best is not None
        self._near.remove(self._best)
        self._aside.append(self._best)
        self._best = None

    def begin_plan(self) -> None:
        self._near = [request for request in self._near if request.progress.status is Status.WAITING]
        self._aside.clear()
        for _ in range(min(NUM_MATCHED_AGAIN, len(self._near))):
            self._turn = (self._turn + 1) % len(self._near)
            request = self._near[self._turn]
            request.place.num_matched = self._num_cached(request)
        self._best = None

    def _come_near(self) -> None:
        near = self._near
        while (coming := super().first()) is not None:
            if len(near) == NUM_COMPARED:
                last = near[-1]
                if _comes_before(last, coming):
                    return
                super().pop()  # before another is pushed, which would have to be behind this one
                near.pop()
                if last.progress.status is Status.WAITING:
                    super().push(last)
            else:
                super().pop()
            coming.place.num_matched = self._num_cached(coming)
            place = len(near)
            while place > 0 and _comes_before(coming, near[place - 1]):
                place -= 1
            near.insert(place, coming)

    def _choose(self) -> Request | None:
        earliest: Request | None = None
        best: Request | None = None
        overdue: Request | None = None
        for request in self._near:
            if request.progress.status is not Status.WAITING:
                continue
            if earliest is None:
                earliest = request
            if overdue is None and request.place.num_passed >= MAX_PASSED:
                overdue = request
            if best is None or request.place.num_matched > best.place.num_matched:
                best = request
        if earliest is None or earliest.urgent:
            return earliest
        return best if overdue is None else overdue
