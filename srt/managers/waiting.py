"""The requests that wait for a slot, and who of them is next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from srt.managers.request import Request, Status

Order = tuple[float, int]  # unique: comparisons never get to the request behind it
_Near = tuple[int, Order, Request]  # less the tokens that the cache has of it, as far as is known
NUM_COMPARED = 32  # so many of the earliest are compared by what the cache has of them
NUM_MATCHED_AGAIN = 2  # of these per plan: the cache may have more of them, or less, than when they came
MAX_PASSED = 64  # so many may be admitted before the earliest


class WaitingQueue:
    """In `Request.order`, also for requests that stood aside for a while or were preempted, and come back.

    Who comes behind all others, as most do, stands in a line, so that the cost does not grow with its length; the others in a heap.
    Who ended meanwhile is dropped when met.
    """

    def __init__(self) -> None:
        self._line: deque[Request] = deque()
        self._heap: list[tuple[Order, Request]] = []
        self._num_dead = 0

    def push(self, request: Request) -> None:
        if not self._line or self._line[-1].order < request.order:
            self._line.append(request)
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
        """Take out the request that `first` returned."""
        if self._is_heap_first():
            heapq.heappop(self._heap)
        else:
            self._line.popleft()

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


class LongestPrefixQueue(WaitingQueue):
    """Of the 32 earliest, first the one of which the cache has most; but nobody is passed by more than 64.

    What a plan costs does not depend on how many wait: requests are matched when they come among the 32, and two of them anew.
    """

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        super().__init__()
        self._num_cached = num_cached
        self._near: dict[int, _Near] = {}  # by serial, in the order in which they were matched; some may have ended
        self._by_match: list[_Near] = []  # the same, sorted
        self._by_order: list[tuple[Order, Request]] = []
        self._best: Request | None = None  # None: to be found
        self._num_passed = 0  # admitted before the earliest, since it is that
        self._earliest: Request | None = None

    def push(self, request: Request) -> None:
        super().push(request)
        self._best = None

    def first(self) -> Request | None:
        if self._best is None or self._best.status is not Status.WAITING:
            self._come_near()
            self._best = self._choose()
        return self._best

    def pop(self) -> None:
        assert self._best is not None
        self._num_passed += self._best is not self._earliest
        self._forget(self._best)
        self._best = None

    def begin_plan(self) -> None:
        for _, _, request in list(self._near.values()):
            if request.status is not Status.WAITING:
                self._forget(request)
        for _, _, request in list(self._near.values())[:NUM_MATCHED_AGAIN]:
            self._forget(request)
            self._enter(request)  # behind the others: each has its turn
        self._best = None

    def _come_near(self) -> None:
        while (coming := super().first()) is not None:
            if len(self._near) == NUM_COMPARED:
                order, last = self._by_order[-1]
                if order < coming.order:
                    return
                self._forget(last)
                if last.status is Status.WAITING:
                    super().push(last)
            super().pop()
            self._enter(coming)

    def _choose(self) -> Request | None:
        while self._by_order and self._by_order[0][1].status is not Status.WAITING:
            self._forget(self._by_order[0][1])
        if not self._near:
            return None
        _, earliest = self._by_order[0]
        if self._earliest is None or self._earliest.status is not Status.WAITING:
            self._earliest, self._num_passed = (
                earliest,
                0,
            )  # else it is that one, or stands aside and is passed all the same
        if self._num_passed >= MAX_PASSED or earliest.urgent:
            return earliest
        while self._by_match[0][2].status is not Status.WAITING:
            self._forget(self._by_match[0][2])
        return self._by_match[0][2]

    def _enter(self, request: Request) -> None:
        near = (-self._num_cached(request), request.order, request)
        self._near[request.serial] = near
        insort(self._by_match, near)
        insort(self._by_order, (request.order, request))

    def _forget(self, request: Request) -> None:
        near = self._near.pop(request.serial)
        del self._by_match[bisect_left(self._by_match, near)]
        del self._by_order[bisect_left(self._by_order, (request.order, request))]
