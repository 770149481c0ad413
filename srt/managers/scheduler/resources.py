"""Resources of requests, not of the host: what rows need on every worker before they may run, such as a compiled grammar.

A resource is known by its key, a hash of all that makes it what it is. The scheduler asks the workers to prepare it, keeps the
requests that need it out of the waiting queue until every rank has, and asks them to release it when nobody has needed it for long.
Its content comes with each request, and goes to the workers once per key; so a replaced engine needs to remember nothing.
"""

from __future__ import annotations

from typing import Final

from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.worker_stream import BrokenReplica
from srt.protocol.messages import Prepare, Prepared, Release, Resource

LONGEST_S: Final = 60.0  # for all ranks to prepare one
TOO_LATE: Final = f"The workers have not prepared what the request needs within {LONGEST_S:.0f} s. Try again later."


class _Entry:
    """A resource that requests need, or that the workers still hold."""

    __slots__ = ("asked_s", "is_asked", "is_late", "ranks_left", "reason", "resource", "users", "waiting")

    def __init__(self, resource: Resource, ranks: set[int]) -> None:
        self.resource = resource
        self.is_asked = False  # the workers were told to prepare it
        self.asked_s = 0.0
        self.is_late = (
            False  # a rank took too long: it does not count as held any more, and is released when all have answered
        )
        self.ranks_left = ranks  # that have not answered
        self.reason = ""  # why a rank could not prepare it
        self.users = 0  # requests that need it and have not ended
        self.waiting: list[Request] = []  # of these, those that it keeps from the queue

    @property
    def is_ready(self) -> bool:
        return self.is_asked and not (self.ranks_left or self.reason or self.is_late)


class Resources:
    """The resources of one engine. `pop_messages` gives what is to be said to the workers, in order."""

    def __init__(self, num_ranks: int, most_held: int) -> None:
        self._num_ranks = num_ranks
        self._most_held = most_held
        self._entries: dict[str, _Entry] = {}
        self._unasked: dict[str, _Entry] = {}  # there was no room for them
        self._preparing: dict[str, _Entry] = {}  # asked for, and not answered by all ranks; that of longest ago first
        self._idle: dict[str, _Entry] = {}  # ready and needed by nobody, that of longest ago first
        self._num_held = 0  # those that the workers hold, or were asked to prepare
        self._messages: list[Prepare | Release] = []

    @property
    def num_held(self) -> int:
        return self._num_held

    def resource_of(self, request: Request) -> Resource | None:
        """Return which resource of a request this is about."""
        return request.resource

    def knows(self, key: str) -> bool:
        """Return whether the workers hold this resource, or were asked to prepare it."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_asked

    def pop_messages(self, now: float) -> list[Prepare | Release]:
        """Return what the workers are to release and to prepare, in order. They are asked for what is needed while there is room."""
        while self._unasked:
            if self._num_held == self._most_held:
                if not self._idle:
                    break
                self._release(next(iter(self._idle.values())))
            entry = self._unasked.pop(next(iter(self._unasked)))
            entry.is_asked, entry.asked_s = True, now
            self._preparing[entry.resource.key] = entry
            self._num_held += 1
            self._messages.append(Prepare(entry.resource))
        messages, self._messages = self._messages, []
        return messages

    def enter(self, request: Request) -> bool:
        """Note that a new request needs its resource until `leave`.

        Return whether it is ready. If not, `answered` returns the request later.
        """
        resource = self.resource_of(request)
        if resource is None:
            return True
        entry = self._entries.get(resource.key)
        if entry is None:
            entry = self._entries[resource.key] = _Entry(resource, set(range(self._num_ranks)))
            self._unasked[resource.key] = entry
        entry.users += 1
        self._idle.pop(resource.key, None)
        if entry.is_ready:
            return True
        entry.waiting.append(request)
        return False

    def leave(self, request: Request) -> None:
        """Note that a request has ended."""
        resource = self.resource_of(request)
        if resource is None:
            return
        entry = self._entries[resource.key]
        entry.users -= 1
        if request in entry.waiting:
            entry.waiting.remove(request)
        if entry.users == 0:
            self._note_unused(entry)

    def answered(self, rank: int, answer: Prepared) -> list[Request]:
        """Note a rank's answer. Return the requests that need not wait for the resource any more; ask `failure` for each."""
        entry = self._preparing.get(answer.key)
        if entry is None or rank not in entry.ranks_left:
            raise BrokenReplica(f"Worker {rank} has prepared {answer.key}, which it was not asked for.")
        entry.ranks_left.remove(rank)
        if answer.reason and not entry.reason:
            entry.reason = answer.reason
        if entry.ranks_left:
            return []
        del self._preparing[answer.key]
        done, entry.waiting = entry.waiting, []
        if entry.users == 0:
            self._note_unused(entry)
        return done

    def failure(self, request: Request) -> tuple[int, str] | None:
        """Return the status and sentence with which the request must end, as its resource is not there; None if it is."""
        resource = self.resource_of(request)
        if resource is None:
            return None
        entry = self._entries[resource.key]
        if entry.is_late:
            return 503, TOO_LATE
        return (400, entry.reason) if entry.reason else None

    def next_overdue_s(self) -> float | None:
        """Return the time at which a rank will have taken too long, or None."""
        for entry in self._preparing.values():
            if entry.waiting or not entry.is_late:
                return entry.asked_s + LONGEST_S
        return None

    def overdue(self, now: float) -> list[Request]:
        """Return the requests whose resource the workers should have prepared by now. They must end, and others get its place."""
        late = [entry for entry in self._preparing.values() if now >= entry.asked_s + LONGEST_S]
        for entry in late:
            self._num_held -= not entry.is_late
            entry.is_late = True
        return [request for entry in late for request in entry.waiting]

    def check(self, requests: list[Request]) -> None:
        """Raise AssertionError unless users are counted right. `requests` are all that have not ended."""
        users: dict[str, int] = dict.fromkeys(self._entries, 0)
        for request in requests:
            resource = self.resource_of(request)
            if resource is not None:
                users[resource.key] += 1
        for key, entry in self._entries.items():
            assert entry.users == users[key], f"{entry.users} users of {key} are counted, {users[key]} there are"
            assert entry.ranks_left or not entry.waiting, f"requests wait for {key}, which all ranks have answered"
            assert all(request.progress.status is Status.WAITING for request in entry.waiting), (
                f"who waits for {key} runs"
            )
        held = sum(entry.is_asked and not entry.is_late for entry in self._entries.values())
        assert held == self._num_held <= self._most_held, (
            f"{self._num_held} held resources are counted, {held} there are"
        )

    def _note_unused(self, entry: _Entry) -> None:
        """Nobody needs it. What was never asked for, or has failed, is forgotten; what is being prepared goes on."""
        key = entry.resource.key
        if not entry.is_asked:
            del self._entries[key], self._unasked[key]
        elif entry.ranks_left:
            return
        elif entry.reason or entry.is_late:
            self._release(entry)
        else:
            self._idle[key] = entry

    def _release(self, entry: _Entry) -> None:
        key = entry.resource.key
        del self._entries[key]
        self._idle.pop(key, None)
        self._num_held -= not entry.is_late
        self._messages.append(Release(key))
