"""How fast requests end: what to say to somebody who asks when to come again."""

from __future__ import annotations

import math
from collections import deque

NUM_REMEMBERED = 32
SHARE = 8  # an eighth of those that wait is gone when a client comes again
MOST_S = 60


class EndRate:
    """The times of the last ends."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def note_end(self, now: float) -> None:
        self._ends.append(now)

    def retry_after_s(self, num_waiting: int, now: float) -> int:
        """Whole seconds, between 1 and 60: until an eighth of those that wait will have gone, if it goes on as it went."""
        if not self._ends:
            return 1
        seconds_each = (now - self._ends[0]) / len(self._ends)
        return min(max(1, math.ceil(seconds_each * num_waiting / SHARE)), MOST_S)
