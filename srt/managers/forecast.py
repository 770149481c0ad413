"""How long answers are expected to become, from how long those were that ended lately."""

from __future__ import annotations

from collections import deque

NUM_REMEMBERED = 128
NUM_NEEDED = 16  # fewer say nothing: until then all that a request may use counts
TENTH_LONGEST = 0.9
NUM_KINDS = 33  # a request's tokens are counted with 64 bits


class OutputForecast:
    """The share of `max_new_tokens` that a request is expected to use: nine of ten of the last 128 of its kind used less.

    Of a kind are those that may use about as much, within a factor of four: who asks for one token always uses all of it, which
    says nothing about those who may use thousands. `conservativeness` (--schedule-conservativeness) multiplies the share; at most
    everything is expected. Where the forecast is wrong, requests are preempted; that costs time, never an answer.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._used: list[deque[float]] = [deque(maxlen=NUM_REMEMBERED) for _ in range(NUM_KINDS)]
        self._shares: list[float | None] = [None] * NUM_KINDS  # None: to be found anew
        self._last_kind = 0

    def note_end(self, num_output: int, max_new: int) -> None:
        self._last_kind = kind = _kind(max_new)
        self._used[kind].append(num_output / max_new)
        self._shares[kind] = None

    @property
    def latest_share(self) -> float:
        """Of requests like the one that ended last."""
        return self._share(self._last_kind)

    def expected_outputs(self, max_new: int) -> int:
        """Between 1 and `max_new`."""
        return max(1, min(max_new, -int(-self._share(_kind(max_new)) * max_new // 1)))

    def _share(self, kind: int) -> float:
        share = self._shares[kind]
        if share is None:
            share = self._shares[kind] = self._forecast(kind)
        return share

    def _forecast(self, kind: int) -> float:
        used = sorted(self._used[kind])
        most = used[int(len(used) * TENTH_LONGEST)] if len(used) >= NUM_NEEDED else 1.0
        return min(1.0, self._conservativeness * most)


def _kind(max_new: int) -> int:
    return (max_new.bit_length() + 1) // 2
