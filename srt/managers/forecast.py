"""How long answers are expected to become, from how long those were that ended lately."""

from __future__ import annotations

import math
from typing import Final

NUM_REMEMBERED: Final = 128
NUM_NEEDED: Final = 16  # fewer say nothing: until then all that a request may use counts
TENTH_LONGEST: Final = 0.9
NUM_KINDS: Final = 33  # a request's tokens are counted with 64 bits


class OutputForecast:
    """The share of `max_new_tokens` that a request is expected to use: nine of ten of the last 128 of its kind used less.

    Of a kind are those that may use about as much, within a factor of four: who asks for one token always uses all of it, which
    says nothing about those who may use thousands. `conservativeness` (--schedule-conservativeness) multiplies the share; at most
    everything is expected. Where the forecast is wrong, requests are preempted; that costs time, never an answer.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._used: list[list[float]] = [[] for _ in range(NUM_KINDS)]  # each a ring, once it is full
        self._num_ends = [0] * NUM_KINDS
        self._ordered: list[list[float]] = [[] for _ in range(NUM_KINDS)]  # the same, the smallest first
        self._last_kind = 0

    def note_end(self, num_output: int, max_new: int) -> None:
        self._last_kind = kind = _kind(max_new)
        used, ordered, share = self._used[kind], self._ordered[kind], num_output / max_new
        if len(used) < NUM_REMEMBERED:
            used.append(share)
        else:
            oldest = self._num_ends[kind] % NUM_REMEMBERED
            ordered.pop(_place(ordered, used[oldest]))
            used[oldest] = share
        self._num_ends[kind] += 1
        ordered.insert(_place(ordered, share), share)

    @property
    def latest_share(self) -> float:
        """Of requests like the one that ended last."""
        return self._share(self._last_kind)

    def expected_outputs(self, max_new: int) -> int:
        """Between 1 and `max_new`."""
        return max(1, min(max_new, math.ceil(self._share(_kind(max_new)) * max_new)))

    def _share(self, kind: int) -> float:
        ordered = self._ordered[kind]
        most = ordered[int(len(ordered) * TENTH_LONGEST)] if len(ordered) >= NUM_NEEDED else 1.0
        return min(1.0, self._conservativeness * most)


def _place(ordered: list[float], value: float) -> int:
    """Before all that are not smaller. As bisect_left, which would need objects instead of numbers."""
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def _kind(max_new: int) -> int:
    return (max_new.bit_length() + 1) // 2
