"""Requests that lost their slots to others, until they run again."""

from __future__ import annotations

from srt.managers.scheduler.request import Request


class PreemptedRequests:
    """A preempted request is away while rows of it are in flight; then it may return. Its tokens are entered meanwhile."""

    def __init__(self) -> None:
        self._answered_step = 0
        self._away: dict[int, tuple[int, Request]] = {}  # by incarnation, with the last step that may have its rows
        self._all: dict[int, Request] = {}  # by serial, those that may return included
        self._new: list[Request] = []

    @property
    def are_some_away(self) -> bool:
        return bool(self._away)

    def add(self, request: Request, last_step: int) -> list[Request]:
        """`last_step` is the last that was planned. Returns who may return at once."""
        self._away[request.incarnation] = (last_step, request)
        self._all[request.serial] = request
        self._new.append(request)
        return self._come_back()

    def note_answered(self, step: int) -> list[Request]:
        """The results of all steps up to this one are entered. Returns who may return now."""
        self._answered_step = step
        return self._come_back()

    def find(self, incarnation: int) -> Request | None:
        """The request that lost its slot with rows in flight, if that is what this incarnation was."""
        _, request = self._away.get(incarnation, (0, None))
        return request

    def take_new(self) -> list[Request]:
        """Who lost its slot since this was asked last, and has neither ended nor got another one."""
        new, self._new = self._new, []
        return [request for request in new if request.serial in self._all]

    def remove(self, request: Request) -> bool:
        """It runs again, or has ended. True if it was still away. May be asked of any request."""
        self._all.pop(request.serial, None)
        return self._away.pop(request.incarnation, None) is not None

    def requests(self) -> list[Request]:
        return list(self._all.values())

    def _come_back(self) -> list[Request]:
        back = [request for last_step, request in self._away.values() if last_step <= self._answered_step]
        for request in back:
            del self._away[request.incarnation]
            request.know_all()
        return back
