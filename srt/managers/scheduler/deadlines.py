"""Time limits for requests that wait or run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from srt.managers.scheduler.request import Request, Status


class Deadlines:
    """The limits `--request-waiting-timeout`, from arrival to the first admission, and `--request-running-timeout`, from there on."""

    def __init__(self, waiting_s: float | None, running_s: float | None) -> None:
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._by_arrival: deque[Request] = deque()
        self.are_set = waiting_s is not None or running_s is not None

    def add(self, request: Request) -> None:
        if self._waiting_s is not None:
            self._by_arrival.append(request)

    def overdue(self, started: list[Request], now: float) -> Iterator[tuple[Request, str]]:
        """Yield the requests that must end, each with a sentence that says why. `started`: those that run, or ran and were preempted."""
        while (first := self._first_waiting()) is not None and self._waiting_s is not None:
            if now < first.arrived_s + self._waiting_s:
                break
            self._by_arrival.popleft()
            yield (
                first,
                f"The request has waited for {self._waiting_s:g} s, the longest that this server allows.",
            )
        if self._running_s is None:
            return
        for request in started:
            if request.progress.started_s is not None and now >= request.progress.started_s + self._running_s:
                yield (
                    request,
                    f"The request has run for {self._running_s:g} s, the longest that this server allows.",
                )

    def next_s(self, started: list[Request]) -> float | None:
        """Return the time at which the next request becomes overdue, or None."""
        times = []
        first = self._first_waiting()
        if first is not None and self._waiting_s is not None:
            times.append(first.arrived_s + self._waiting_s)
        if self._running_s is not None:
            times += [
                request.progress.started_s + self._running_s
                for request in started
                if request.progress.started_s is not None
            ]
        return min(times, default=None)

    def _first_waiting(self) -> Request | None:
        """Return the earliest request that has never run, or None."""
        waiting = self._by_arrival
        while waiting and (waiting[0].progress.status is Status.ENDED or waiting[0].progress.started_s is not None):
            waiting.popleft()
        return waiting[0] if waiting else None
