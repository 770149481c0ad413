"""Of requests that begin alike and come together, the first computes what they share, and the others wait for it to appear.

A running request announces the next full page of its prompt that it will compute: where it continues the prefix tree, and with
which ids. A waiting request whose own match ends right there, and goes on with those ids, stands aside until the pages that both
have are in the tree, or until the leader is gone. Leaders always run, so nobody waits in a circle.
"""

from __future__ import annotations

from srt.managers.request import Follower, Request, Status
from srt.mem_cache.radix_cache import RadixNode

_Key = tuple[int, str, bytes]  # serial of the node, salt, ids of the page behind it


class PrefixFollowers:
    """Who waits for whose prefix. Not enabled (there is no prefix cache): nobody."""

    def __init__(self, page_size: int, *, enabled: bool) -> None:
        self._page_size = page_size
        self._enabled = enabled
        self._leaders: dict[_Key, Request] = {}

    def announce(self, leader: Request) -> None:
        """What this running request computes next; nothing if all full pages of what it knows are in the tree."""
        if not self._enabled:
            return
        self._withdraw(leader)
        assert leader.node is not None
        key = self._next_page(leader, leader.node, leader.num_in_tree)
        if key is not None and key not in self._leaders:
            self._leaders[key] = leader
            leader.announced = key

    def stand_aside(self, request: Request, node: RadixNode, num_matched: int) -> bool:
        """Should this request wait for another one's prefix? Then it does so from now on. Its match ends at `node`."""
        most = request.cacheable_pages(self._page_size)
        if num_matched >= most or not self._leaders:
            return False
        key = self._next_page(request, node, num_matched)
        leader = None if key is None else self._leaders.get(key)
        if leader is None:
            return False
        leader.followers.append(Follower(request, min(most, self._num_common_pages(leader, request))))
        return True

    def advance(self, leader: Request) -> list[Request]:
        """The leader's computed pages are in the tree: announce the next one, and return who need not wait any longer."""
        self.announce(leader)
        if not leader.followers:
            return []
        if leader.announced is None:
            return self.leave(leader)  # it computes nothing more that others could share
        waiting = [f for f in leader.followers if f.request.status is Status.WAITING]
        leader.followers = [f for f in waiting if f.num_pages > leader.num_in_tree]
        return [f.request for f in waiting if f.num_pages <= leader.num_in_tree]

    def leave(self, leader: Request) -> list[Request]:
        """The leader ends: return all who waited for it."""
        self._withdraw(leader)
        released = [f.request for f in leader.followers if f.request.status is Status.WAITING]
        leader.followers = []
        return released

    def _withdraw(self, leader: Request) -> None:
        if leader.announced is not None:
            del self._leaders[leader.announced]
            leader.announced = None

    def _next_page(self, request: Request, node: RadixNode, num_pages: int) -> _Key | None:
        start = num_pages * self._page_size
        page = request.known_ids[start : start + self._page_size]
        return (node.serial, request.salt, page.tobytes()) if len(page) == self._page_size else None

    def _num_common_pages(self, leader: Request, request: Request) -> int:
        length = min(leader.num_known, request.num_known)
        differs = leader.known_ids[:length] != request.known_ids[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self._page_size
