"""A bounded table of the prefixes that each replica has computed, as far as this frontend knows.

It holds hashes, no tokens. They are keyed at random and cover the cache's namespace, as the prefix caches themselves do.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator

from srt.protocol.messages import GenerateRequest

SHORTEST = 64  # tokens of the shortest prefix that is recorded
MOST_PREFIXES = 1 << 16  # to remember: a prompt has at most some thirty
_HASH_BYTES = 16


class PrefixTable:
    """Remembers, for prefixes of prompts, the replicas that have them. The prefixes used least recently are forgotten.

    Only prefixes of certain lengths are recorded: 64 tokens, 96, 144 and so on, each half as long again. So if a prompt shares n >= 64
    tokens with an earlier one, a prefix of more than two thirds of these n is found.
    """

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        self._replicas: OrderedDict[bytes, frozenset[int]] = OrderedDict()
        self._most = most
        self._key = os.urandom(_HASH_BYTES)

    def __len__(self) -> int:
        return len(self._replicas)

    def hashes_of(self, request: GenerateRequest) -> list[bytes]:
        """Return the hashes of the request's prefixes, the shortest first."""
        salt = request.cache_salt.encode()
        digest = hashlib.blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=_HASH_BYTES, key=self._key)
        ids, begin, hashes = request.prompt_ids, 0, []
        for end in prefix_lengths(len(ids)):
            digest.update(ids[begin:end].tobytes())
            hashes.append(digest.copy().digest())
            begin = end
        return hashes

    def find(self, hashes: list[bytes]) -> frozenset[int]:
        """Return the replicas that have the longest of these prefixes that is known; none if none is."""
        for one in reversed(hashes):
            if one in self._replicas:
                return self._replicas[one]
        return frozenset()

    def record(self, hashes: list[bytes], replica: int) -> None:
        """Record that a replica has these prefixes from now on."""
        for one in hashes:
            self._replicas[one] = self._replicas.pop(one, frozenset()) | {replica}
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Record that a replica has no prefix any more: it was replaced."""
        left = ((one, having - {replica}) for one, having in self._replicas.items())
        self._replicas = OrderedDict((one, having) for one, having in left if having)


def prefix_lengths(num_tokens: int) -> Iterator[int]:
    """Yield the lengths of the prefixes that are recorded of a prompt of `num_tokens` tokens, the shortest first."""
    length = SHORTEST
    while length <= num_tokens:
        yield length
        length += length // 2
