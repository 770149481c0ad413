"""Resources of requests, not of the host: what rows need on every worker before they may run, such as a compiled grammar.

A resource is known by its key, a hash of all that makes it what it is. The scheduler asks the workers to prepare it, keeps the
requests that need it out of the waiting queue until every rank has, and asks them to release it when nobody has needed it for long.
If none is free of requests, those that the workers have had longest take no new ones until others had their turn.

Its content comes with each request, and goes to the workers once per key; so a replaced engine needs to remember nothing.
"""

from __future__ import annotations

from typing import Final

from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.worker_stream import BrokenReplica
from srt.protocol.messages import PinResources, Prepare, Prepared, Release, Resource

LONGEST_S: Final = 60.0  # for all ranks to prepare one
PATIENCE_S: Final = 0.25
"""How long a resource waits for a place before one that has requests takes no new ones."""
TOO_LATE: Final = f"The workers have not prepared what the request needs within {LONGEST_S:.0f} s. Try again later."


class _Entry:
    """A resource that requests need, or that the workers still hold."""

    __slots__ = (
        "asked_s",
        "is_asked",
        "is_closed",
        "is_late",
        "ranks_left",
        "reason",
        "resource",
        "unused_since",
        "users",
        "waiting",
        "wanted_s",
    )

    def __init__(self, resource: Resource, ranks: set[int]) -> None:
        self.resource = resource
        self.wanted_s: float | None = None  # when there was no room for it at first
        self.is_asked = False  # the workers were told to prepare it
        self.asked_s = 0.0
        self.is_closed = False  # it takes no new users, and makes room when it has none
        self.is_late = (
            False  # a rank took too long: it does not count as held any more, and is released when all have answered
        )
        self.ranks_left = ranks  # that have not answered
        self.reason = ""  # why a rank could not prepare it
        self.users = 0  # requests that need it and have not ended
        self.unused_since = 0  # the number of times that others had been left without users before it was
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
        self._unasked: dict[str, _Entry] = {}  # there was no room for them, in the order in which they were wanted
        self._later: dict[str, _Entry] = {}  # of these, the entries of those that have come to a closed one
        self._preparing: dict[str, _Entry] = {}  # asked for, and not answered by all ranks; that of longest ago first
        self._pins_version = 0
        self._pinned: set[str] = set()  # keys of those that are held whether requests need them or not
        self._idle: dict[str, _Entry] = {}  # ready and needed by nobody, that of longest ago first
        self._num_closed = 0
        self._num_unused = 0  # times that a resource was left without users
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
        while (entry := self._next_unasked()) is not None:
            if self._num_held == self._most_held:
                if not self._idle:
                    break
                # First those that nothing waits for.
                longest_ago = next(iter(self._idle.values()))
                self._release(next((one for key, one in self._idle.items() if key not in self._later), longest_ago))
            del self._unasked[entry.resource.key]
            entry.is_asked, entry.asked_s = True, now
            self._preparing[entry.resource.key] = entry
            self._num_held += 1
            self._messages.append(Prepare(entry.resource))
        for entry in self._unasked.values():
            if entry.wanted_s is None:
                entry.wanted_s = now
        messages, self._messages = self._messages, []
        return messages

    def _next_unasked(self) -> _Entry | None:
        """Return the entry to be asked for next: the first one that the workers do not hold."""
        return next((entry for key, entry in self._unasked.items() if key not in self._later), None)

    def enter(self, request: Request) -> bool:
        """Note that a new request needs its resource until `leave`.

        Return whether it is ready. If not, `answered` or `overdue` returns the request later.
        """
        resource = self.resource_of(request)
        if resource is None:
            return True
        entry = self._entry_for_new(resource)
        entry.users += 1
        if entry.is_ready:
            self._idle.pop(resource.key, None)
            return True
        entry.waiting.append(request)
        return False

    def _entry_for_new(self, resource: Resource) -> _Entry:
        key = resource.key
        entry = self._entries.get(key)
        if entry is not None and not entry.is_closed:
            return entry
        if entry is not None and key in self._later:
            return self._later[key]
        new = self._unasked[key] = _Entry(resource, set(range(self._num_ranks)))
        if entry is None:
            self._entries[key] = new
        else:
            self._later[key] = new
        return new

    def pin(self, message: PinResources) -> list[Request]:
        """Hold these from now on, in place of those pinned before, whether requests need them or not.

        One place is left for others: if all would be taken, the last ones are not pinned. Return the requests that need not wait any
        more, because a pinned resource is never closed.
        """
        if message.version < self._pins_version:
            return []
        self._pins_version = message.version
        before, wanted = self._pinned, {one.key: one for one in message.resources[: self._most_held - 1]}
        self._pinned = set(wanted)
        for key, entry in list(self._entries.items()):
            if entry.users == 0 and key in before and key not in wanted:
                self._forget_or_keep(entry)
        self._idle = dict(sorted(self._idle.items(), key=lambda item: item[1].unused_since))
        ready: list[Request] = []
        for key, resource in wanted.items():
            self._idle.pop(key, None)
            held = self._entries.get(key)
            if held is None:
                self._entry_for_new(resource)
            elif held.is_closed:
                ready += self._open(held)
        return ready

    def leave(self, request: Request) -> None:
        """Note that a request has ended."""
        resource = self.resource_of(request)
        if resource is None:
            return
        entry = self._entry_of(request, resource.key)
        entry.users -= 1
        if request in entry.waiting:
            entry.waiting.remove(request)
        if entry.users == 0:
            self._note_unused(entry)

    def _entry_of(self, request: Request, key: str) -> _Entry:
        later = self._later.get(key)
        return later if later is not None and request in later.waiting else self._entries[key]

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
        entry = self._entry_of(request, resource.key)
        if entry.is_late:
            return 503, TOO_LATE
        return (400, entry.reason) if entry.reason else None

    def next_overdue_s(self) -> float | None:
        """Return the time at which `overdue` has something to do, or None."""
        if self._num_closed > len(self._unasked) - len(self._later):
            return 0.0
        for entry in self._preparing.values():
            if entry.waiting or not entry.is_late:
                return entry.asked_s + LONGEST_S
        return None

    def overdue(self, now: float) -> list[Request]:
        """Return the requests that need not wait for their resource any more; ask `failure` for each.

        Those that the workers should have prepared by now fail, and others get their places. Those that took no new requests may take
        them again when nothing else waits for a place.
        """
        opened = self._take_turns(now)
        late = [entry for entry in self._preparing.values() if now >= entry.asked_s + LONGEST_S]
        for entry in late:
            self._num_held -= not entry.is_late
            entry.is_late = True
        return opened + [request for entry in late for request in entry.waiting]

    def _take_turns(self, now: float) -> list[Request]:
        """Close as many of the resources that have requests as others have long waited for a place, those held longest first.

        Return the requests that come to use one that is opened again, because fewer wait than are closed.
        """
        outside = [entry for key, entry in self._unasked.items() if key not in self._later]
        ready: list[Request] = []
        while self._num_closed > len(outside):
            ready += self._open([entry for entry in self._entries.values() if entry.is_closed][-1])
        num_patient = sum(entry.wanted_s is not None and now >= entry.wanted_s + PATIENCE_S for entry in outside)
        if num_patient > self._num_closed:
            used = [
                one
                for key, one in self._entries.items()
                if one.is_ready and one.users and not one.is_closed and key not in self._pinned
            ]
            used.sort(key=lambda entry: entry.asked_s)
            for entry in used[: num_patient - self._num_closed]:
                entry.is_closed = True
                self._num_closed += 1
        return ready

    def _open(self, entry: _Entry) -> list[Request]:
        """Let a closed one take requests again. Return those that have come meanwhile."""
        entry.is_closed = False
        self._num_closed -= 1
        later = self._later.pop(entry.resource.key, None)
        if later is None:
            return []
        del self._unasked[entry.resource.key]
        self._idle.pop(entry.resource.key, None)
        entry.users += later.users
        return later.waiting

    def waits(self, request: Request) -> bool:
        """Return whether a request that has not ended waits for its resource."""
        resource = self.resource_of(request)
        if resource is None or resource.key not in self._entries:
            return False
        return request in self._entry_of(request, resource.key).waiting

    def check(self, requests: list[Request]) -> None:
        """Raise AssertionError unless users are counted right. `requests` are all that have not ended."""
        users: dict[str, int] = dict.fromkeys(self._entries, 0)
        for request in requests:
            resource = self.resource_of(request)
            if resource is not None:
                users[resource.key] += 1
        for key, entry in self._entries.items():
            later = self._later.get(key)
            counted = entry.users + (0 if later is None else later.users)
            assert counted == users[key], f"{counted} users of {key} are counted, {users[key]} there are"
            assert later is None or (entry.is_closed and later.users), f"requests come to {key} twice"
            assert entry.ranks_left or not entry.waiting, f"requests wait for {key}, which all ranks have answered"
            assert all(request.progress.status is Status.WAITING for request in entry.waiting), (
                f"who waits for {key} runs"
            )
        closed = sum(entry.is_closed for entry in self._entries.values())
        assert closed == self._num_closed, f"{self._num_closed} closed resources are counted, {closed} there are"
        assert not self._pinned & self._idle.keys(), "a pinned resource may be released"
        held = sum(entry.is_asked and not entry.is_late for entry in self._entries.values())
        assert held == self._num_held <= self._most_held, (
            f"{self._num_held} held resources are counted, {held} there are"
        )

    def _note_unused(self, entry: _Entry) -> None:
        """Nobody needs it any more."""
        self._num_unused += 1
        entry.unused_since = self._num_unused
        self._forget_or_keep(entry)

    def _forget_or_keep(self, entry: _Entry) -> None:
        """Nobody needs it. What was never asked for, or has failed, is forgotten; what is being prepared goes on."""
        key = entry.resource.key
        if key in self._pinned and not (entry.reason or entry.is_late):
            return
        if not entry.is_asked:
            del self._unasked[key]
            if self._later.pop(key, None) is None:
                del self._entries[key]
        elif entry.ranks_left:
            return
        elif entry.reason or entry.is_late:
            self._release(entry)
        else:
            self._idle[key] = entry

    def _release(self, entry: _Entry) -> None:
        key = entry.resource.key
        del self._entries[key]
        self._num_closed -= entry.is_closed
        if (later := self._later.pop(key, None)) is not None:
            self._entries[key] = later
        self._idle.pop(key, None)
        self._num_held -= not entry.is_late
        self._messages.append(Release(key))
