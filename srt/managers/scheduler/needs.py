"""What a request needs before it enters the queue: an adapter, then a grammar, each held by all workers.

A request asks for the second only when it has the first. So a request that holds a grammar waits for nothing, and no two requests can
wait for each other.
"""

from __future__ import annotations

from srt.managers.scheduler.request import Request
from srt.managers.scheduler.resources import Resources
from srt.protocol.messages import PinResources, Prepare, Prepared, Release, Resource


class _Adapters(Resources):
    def resource_of(self, request: Request) -> Resource | None:
        return request.adapter


class Needs:
    """The resources of one engine, of both kinds. The methods are those of `Resources`."""

    def __init__(self, num_ranks: int, most_held: int, most_adapters: int) -> None:
        self._adapters = _Adapters(num_ranks, most_adapters)
        self._grammars = Resources(num_ranks, most_held)
        self._in_second: set[Request] = set()  # that have their adapter, if they need one, and have asked for a grammar

    @property
    def num_held(self) -> int:
        return self._adapters.num_held + self._grammars.num_held

    def pop_messages(self, now: float) -> list[Prepare | Release]:
        return self._adapters.pop_messages(now) + self._grammars.pop_messages(now)

    def enter(self, request: Request) -> bool:
        return self._adapters.enter(request) and self._enter_second(request)

    def pin(self, message: PinResources) -> list[Request]:
        """Hold these adapters, whether requests need them or not. Return the requests that need not wait for them any more."""
        return self._behind_adapters(self._adapters.pin(message))

    def leave(self, request: Request) -> None:
        self._adapters.leave(request)
        if request in self._in_second:
            self._in_second.discard(request)
            self._grammars.leave(request)

    def answered(self, rank: int, answer: Prepared) -> list[Request]:
        if not self._adapters.knows(answer.key):
            return self._grammars.answered(rank, answer)
        return self._behind_adapters(self._adapters.answered(rank, answer))

    def failure(self, request: Request) -> tuple[int, str] | None:
        return self._adapters.failure(request) or (
            self._grammars.failure(request) if request in self._in_second else None
        )

    def next_overdue_s(self) -> float | None:
        times = [self._adapters.next_overdue_s(), self._grammars.next_overdue_s()]
        return min([at for at in times if at is not None], default=None)

    def overdue(self, now: float) -> list[Request]:
        return self._behind_adapters(self._adapters.overdue(now)) + self._grammars.overdue(now)

    def waits(self, request: Request) -> bool:
        return self._adapters.waits(request) or (request in self._in_second and self._grammars.waits(request))

    def check(self, requests: list[Request]) -> None:
        """Raise AssertionError unless users are counted right. `requests` are all that have not ended."""
        self._adapters.check(requests)
        self._grammars.check([request for request in requests if request in self._in_second])
        assert self._in_second <= set(requests), "an ended request still needs its grammar"

    def _behind_adapters(self, requests: list[Request]) -> list[Request]:
        """Return those of these that wait for no adapter any more and either fail or need no grammar that is not there."""
        return [one for one in requests if self._adapters.failure(one) is not None or self._enter_second(one)]

    def _enter_second(self, request: Request) -> bool:
        if request.resource is None:
            return True
        self._in_second.add(request)
        return self._grammars.enter(request)
