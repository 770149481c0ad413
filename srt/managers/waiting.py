"""The requests that wait for a slot, in order of arrival."""

from __future__ import annotations

import heapq

from srt.managers.request import Request, Status


class WaitingQueue:
    """In `Request.order`, also for requests that stood aside for a while or were preempted, and come back."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []  # who ended meanwhile is dropped when met
        self._num_dead = 0

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def first(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request.status is Status.WAITING:
                return request
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return None

    def pop(self) -> None:
        """Take out the request that `first` returned."""
        heapq.heappop(self._heap)

    def note_end(self) -> None:
        """A request in here has ended. Its place is cleared when most places are such."""
        self._num_dead += 1
        if self._num_dead > len(self._heap) // 2 + 16:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0
