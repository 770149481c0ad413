"""The choice of a replica for a request, by --load-balance-method.

Each frontend chooses for its own clients. It knows its own requests at once, and those of other frontends from the replicas' reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from srt.managers.tokenizer_manager.prefix_table import PrefixTable
from srt.managers.tokenizer_manager.replica_client import ReplicaClient
from srt.protocol.messages import GenerateRequest

# A replica that has the prefix is preferred while it has at most MOST_SHARE times the other's requests, plus MOST_MORE.
MOST_SHARE = 1.25
MOST_MORE = 8


class ReplicaRouter:
    """Chooses one of the replicas that serve at the moment."""

    def __init__(
        self, method: str = "auto", draw: random.Random | None = None, *, has_prefix_cache: bool = True
    ) -> None:
        """Choose by the --load-balance-method with this name."""
        self._method: Callable[[GenerateRequest, Sequence[ReplicaClient]], ReplicaClient] = {
            "auto": self._by_prefix if has_prefix_cache else self._by_requests,
            "round_robin": self._in_turn,
            "total_requests": self._by_requests,
            "total_tokens": self._by_tokens,
        }[method]
        self._draw = draw or random.Random()
        self._prefixes = PrefixTable()
        self._num_chosen = 0

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaClient]) -> ReplicaClient:
        """Return one of `replicas`, of which there must be one."""
        return replicas[0] if len(replicas) == 1 else self._method(request, replicas)

    def forget(self, replica: ReplicaClient) -> None:
        """Record that a replica was replaced, so that its prefix cache is empty."""
        self._prefixes.forget(replica.number)

    def _by_prefix(self, request: GenerateRequest, replicas: Sequence[ReplicaClient]) -> ReplicaClient:
        lower = min(self._draw.sample(replicas, 2), key=num_requests)
        hashes = self._prefixes.hashes_of(request)
        having = self._prefixes.find(hashes)
        best = min((replica for replica in replicas if replica.number in having), key=num_requests, default=lower)
        is_too_busy = num_requests(best) > MOST_SHARE * num_requests(lower) + MOST_MORE
        chosen = lower if is_too_busy else best
        self._prefixes.record(hashes, chosen.number)
        return chosen

    def _in_turn(self, request: GenerateRequest, replicas: Sequence[ReplicaClient]) -> ReplicaClient:
        self._num_chosen += 1
        return replicas[(self._num_chosen - 1) % len(replicas)]

    def _by_requests(self, request: GenerateRequest, replicas: Sequence[ReplicaClient]) -> ReplicaClient:
        return min(self._draw.sample(replicas, len(replicas)), key=num_requests)

    def _by_tokens(self, request: GenerateRequest, replicas: Sequence[ReplicaClient]) -> ReplicaClient:
        return min(self._draw.sample(replicas, len(replicas)), key=lambda replica: replica.deliveries.num_tokens)


def num_requests(replica: ReplicaClient) -> int:
    """Return the number of requests at a replica, as far as this frontend knows them."""
    reported = 0 if replica.load is None else replica.load.num_running + replica.load.num_waiting
    return max(replica.deliveries.num_requests, reported + replica.num_sent)
