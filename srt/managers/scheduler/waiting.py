"""The requests that wait for a slot, and who of them is next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from srt.managers.scheduler.request import Request, Status

Order = tuple[float, int]  # unique: comparisons never get to the request behind it
NUM_COMPARED: Final = 32  # so many of the earliest are compared by what the cache has of them
NUM_MATCHED_AGAIN: Final = 2  # of these per plan: the cache may have more of them, or less, than when they came
MAX_PASSED: Final = 64  # so many may be admitted before the earliest


class WaitingQueue:
    """In `Request.order`, also for requests that stood aside for a while or were preempted, and come back.

    Who comes behind all others, as most do, stands in a line, so that the cost does not grow with its length; the others in a heap.
    Who ended meanwhile is dropped when met.
    """

    def __init__(self) -> None:
        self._line: deque[Request] = deque()
        self._last: Request | None = None  # to enter the line
        self._heap: list[tuple[Order, Request]] = []
        self._num_dead = 0

    def push(self, request: Request) -> None:
        if not self._line or (self._last is not None and _comes_before(self._last, request)):
            self._line.append(request)
            self._last = request
        else:
            heapq.heappush(self._heap, (request.order, request))

    def first(self) -> Request | None:
        line, heap = self._line, self._heap
        while line and line[0].status is not Status.WAITING:
            line.popleft()
            self._num_dead -= 1
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
            self._num_dead -= 1
        if self._is_heap_first():
            return heap[0][1]
        return line[0] if line else None

    def pop(self) -> None:
        """Take out the request that `first` returned, and that is admitted."""
        if self._is_heap_first():
            heapq.heappop(self._heap)
        else:
            self._line.popleft()

    def stand_aside(self) -> None:
        """Take it out for the rest of the plan; it is pushed again before the next."""
        self.pop()

    def begin_plan(self) -> None:
        """A plan is about to be made."""

    def note_end(self) -> None:
        """A request in here has ended. Its place is cleared when most places are such."""
        self._num_dead += 1
        if self._num_dead > (len(self._line) + len(self._heap)) // 2 + 16:
            self._line = deque(request for request in self._line if request.status is Status.WAITING)
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def _is_heap_first(self) -> bool:
        return bool(self._heap) and (not self._line or self._heap[0][0] < self._line[0].order)


def _comes_before(one: Request, other: Request) -> bool:
    """By `order`; comparing the tuples themselves would make them objects first."""
    if one.order[0] != other.order[0]:
        return one.order[0] < other.order[0]
    return one.order[1] < other.order[1]


class LongestPrefixQueue(WaitingQueue):
    """Of the 32 earliest, first the one of which the cache has most; but nobody is passed by more than 64 that came later.

    What a plan costs does not depend on how many wait: requests are matched when they come among the 32, and two of them anew.
    """

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        super().__init__()
        self._num_cached = num_cached
        self._near: list[Request] = []  # in order; some may have ended
        self._turn = 0  # place among them of who was matched anew last
        self._best: Request | None = None  # None: to be found
        self._aside: list[Request] = []  # who stood aside in this plan

    def push(self, request: Request) -> None:
        super().push(request)
        self._best = None

    def first(self) -> Request | None:
        if self._best is None or self._best.status is not Status.WAITING:
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
            request.num_passed += 1
            place += 1
        del self._near[place]
        for request in self._aside:
            if _comes_before(request, best):
                request.num_passed += 1
        self._best = None

    def stand_aside(self) -> None:
        assert self._best is not None
        self._near.remove(self._best)
        self._aside.append(self._best)
        self._best = None

    def begin_plan(self) -> None:
        self._near = [request for request in self._near if request.status is Status.WAITING]
        self._aside.clear()
        for _ in range(min(NUM_MATCHED_AGAIN, len(self._near))):
            self._turn = (self._turn + 1) % len(self._near)
            request = self._near[self._turn]
            request.num_matched = self._num_cached(request)
        self._best = None

    def _come_near(self) -> None:
        near = self._near
        while (coming := super().first()) is not None:
            if len(near) == NUM_COMPARED:
                last = near[-1]
                if _comes_before(last, coming):
                    return
                near.pop()
                if last.status is Status.WAITING:
                    super().push(last)
            super().pop()
            coming.num_matched = self._num_cached(coming)
            place = len(near)
            while place > 0 and _comes_before(coming, near[place - 1]):
                place -= 1
            near.insert(place, coming)

    def _choose(self) -> Request | None:
        earliest: Request | None = None
        best: Request | None = None
        overdue: Request | None = None
        for request in self._near:
            if request.status is not Status.WAITING:
                continue
            if earliest is None:
                earliest = request
            if overdue is None and request.num_passed >= MAX_PASSED:
                overdue = request
            if best is None or request.num_matched > best.num_matched:
                best = request
        if earliest is None or earliest.urgent:
            return earliest
        return best if overdue is None else overdue
