"""Requests that were preempted, until they run again."""

from __future__ import annotations

from srt.managers.scheduler.request import Request
from srt.mem_cache.radix_cache import ITEM


class PreemptedRequests:
    """Preempted requests. One is away while rows of it are in flight, and still gets their tokens; then it may be admitted again."""

    def __init__(self) -> None:
        self._answered_step = 0
        self._away: dict[int, tuple[int, Request]] = {}  # by incarnation, with the last step that may have its rows
        self._all: dict[int, Request] = {}  # by serial, including those that may be admitted again
        self._new: list[Request] = []

    @property
    def are_some_away(self) -> bool:
        return bool(self._away)

    def add(self, request: Request, last_step: int) -> list[Request]:
        """Add a request; `last_step` is the last planned step. Return the requests that may be admitted again now."""
        self._away[request.progress.incarnation] = (last_step, request)
        self._all[request.serial] = request
        self._new.append(request)
        return self._come_back()

    def note_answered(self, step: int) -> list[Request]:
        """Note that results up to this step are applied. Return the requests that may be admitted again now."""
        self._answered_step = step
        return self._come_back()

    def find(self, incarnation: int) -> Request | None:
        """Return the request that had this incarnation, if it was preempted and rows of it are in flight."""
        _, request = self._away.get(incarnation, (0, None))
        return request

    def append(self, request: Request, token: int) -> None:
        """Append a token that was in flight when the request was preempted."""
        request.progress.outputs += token.to_bytes(ITEM, "little", signed=True)

    def pop_new(self) -> list[Request]:
        """Return the requests preempted since the last call that have neither ended nor got a slot again."""
        new, self._new = self._new, []
        return [request for request in new if request.serial in self._all]

    def remove(self, request: Request) -> bool:
        """Remove a request that runs again or has ended; any request may be passed. Return True if it was still away."""
        self._all.pop(request.serial, None)
        return self._away.pop(request.progress.incarnation, None) is not None

    def requests(self) -> list[Request]:
        return list(self._all.values())

    def _come_back(self) -> list[Request]:
        back = [request for last_step, request in self._away.values() if last_step <= self._answered_step]
        for request in back:
            del self._away[request.progress.incarnation]
            request.progress.know(request.bytes_with_outputs())
        return back
