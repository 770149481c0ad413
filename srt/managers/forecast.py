"""How long answers are expected to become, from how long those were that ended lately."""

from __future__ import annotations

from collections import deque

NUM_REMEMBERED = 128
NUM_NEEDED = 16  # fewer say nothing: until then all that a request may use counts
TENTH_LONGEST = 0.9


class OutputForecast:
    """The share of `max_new_tokens` that a request is expected to use: nine of ten of the last 128 that ended used less.

    `conservativeness` (--schedule-conservativeness) multiplies it; at most everything is expected. Where the forecast is wrong,
    requests are preempted; that costs time, never an answer.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._shares: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._share: float | None = None  # until the next end

    def note_end(self, num_output: int, max_new: int) -> None:
        self._shares.append(num_output / max_new)
        self._share = None

    @property
    def share(self) -> float:
        if self._share is None:
            self._share = self._forecast()
        return self._share

    def expected_outputs(self, max_new: int) -> int:
        """Between 1 and `max_new`."""
        return max(1, min(max_new, -int(-self.share * max_new // 1)))

    def _forecast(self) -> float:
        shares = sorted(self._shares)
        used = shares[int(len(shares) * TENTH_LONGEST)] if len(shares) >= NUM_NEEDED else 1.0
        return min(1.0, self._conservativeness * used)
