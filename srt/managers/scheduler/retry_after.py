"""The Retry-After value of a refusal, estimated from the rate at which requests end."""

from __future__ import annotations

import math
from collections import deque

NUM_REMEMBERED = 32
SHARE = 8  # a client should retry when an eighth of the waiting requests is gone
MOST_S = 60


class EndRate:
    """The times at which the last requests ended."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def record_end(self, now: float) -> None:
        self._ends.append(now)

    def retry_after_s(self, num_waiting: int, now: float) -> int:
        """Return the whole seconds, between 1 and 60, until an eighth of the waiting requests is gone at the recent rate."""
        if not self._ends:
            return 1
        seconds_each = (now - self._ends[0]) / len(self._ends)
        return min(max(1, math.ceil(seconds_each * num_waiting / SHARE)), MOST_S)
