"""Forecast of the lengths of answers, from those that ended lately."""

from __future__ import annotations

import math
from typing import Final

NUM_REMEMBERED: Final = 128
NUM_NEEDED: Final = 16  # ends; before that, requests are expected to use all that they may
TENTH_LONGEST: Final = 0.9
NUM_PARTS: Final = 256  # shares are rounded up to a multiple of 1/256
NUM_KINDS: Final = 33  # enough for token counts of 64 bits
UNKNOWN: Final = -1.0


class OutputForecast:
    """The share of `max_new_tokens` that a request is expected to use: the 90th percentile of the last 128 requests of its kind.

    Requests are of one kind if their `max_new_tokens` are within a factor of four: a request for one token always uses all of it,
    which says nothing about requests for thousands. `conservativeness` (--schedule-conservativeness) multiplies the share, up to 1.
    If the forecast is wrong, requests are preempted: that costs time, but no answer is lost.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._used: list[list[int]] = [[] for _ in range(NUM_KINDS)]  # in parts; a ring once full
        self._counts = [[0] * (NUM_PARTS + 1) for _ in range(NUM_KINDS)]  # of requests in the ring, by parts
        self._num_ends = [0] * NUM_KINDS
        self._shares = [UNKNOWN] * NUM_KINDS  # UNKNOWN until they are asked for
        self._last_kind = 0

    def note_end(self, num_output: int, max_new: int) -> None:
        self._last_kind = kind = _kind(max_new)
        used, counts, part = self._used[kind], self._counts[kind], -(-num_output * NUM_PARTS // max_new)
        if len(used) < NUM_REMEMBERED:
            used.append(part)
        else:
            oldest = self._num_ends[kind] % NUM_REMEMBERED
            counts[used[oldest]] -= 1
            used[oldest] = part
        self._num_ends[kind] += 1
        counts[part] += 1
        self._shares[kind] = UNKNOWN

    @property
    def latest_share(self) -> float:
        """Share expected of requests of the kind that ended last."""
        return self._share(self._last_kind)

    def expected_outputs(self, max_new: int) -> int:
        """Return the number of output tokens to expect, between 1 and `max_new`."""
        return max(1, min(max_new, math.ceil(self._share(_kind(max_new)) * max_new)))

    def _share(self, kind: int) -> float:
        share = self._shares[kind]
        if share == UNKNOWN:
            share = self._shares[kind] = min(1.0, self._conservativeness * self._most_parts(kind) / NUM_PARTS)
        return share

    def _most_parts(self, kind: int) -> int:
        """Return the 90th percentile of the share used, in 1/256ths; the whole share while too few requests have ended."""
        num_used, counts, part = len(self._used[kind]), self._counts[kind], NUM_PARTS
        if num_used < NUM_NEEDED:
            return NUM_PARTS
        missing = num_used - int(num_used * TENTH_LONGEST)
        while counts[part] < missing:
            missing -= counts[part]
            part -= 1
        return part


def _kind(max_new: int) -> int:
    return (max_new.bit_length() + 1) // 2
