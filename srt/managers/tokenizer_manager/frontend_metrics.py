"""Request metrics of one frontend, in memory shared with the other frontends: any of them can answer /metrics for all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from srt.utils.shared_numbers import SharedNumbers

FRONTEND_PREFIX = "metrics-frontend-"

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
BETWEEN_TOKENS_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
WHOLE_S = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)

HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token": FIRST_TOKEN_S,
    "inter_token_latency": BETWEEN_TOKENS_S,
    "e2e_request_latency": WHOLE_S,
}
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "cached_tokens",
    "num_requests",
    "num_aborted_requests",
    "num_failed_requests",
    "num_refused_requests",
)
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")


def histogram_names(name: str) -> list[str]:
    """Return the names of a histogram's numbers: a count for each bucket, a count above all bounds, and the sum of all values."""
    return [*(f"{name}_to_{bound:g}" for bound in HISTOGRAMS[name]), f"{name}_above", f"{name}_sum"]


NAMES = (
    *COUNTERS,
    *(f"http_{status}" for status in STATUS_CLASSES),
    *(one for name in HISTOGRAMS for one in histogram_names(name)),
)


class FrontendMetrics:
    """The counters and histograms of one frontend. A replacement frontend continues the counts of its predecessor."""

    def __init__(self, run_dir: str | Path | None = None, index: int = 0) -> None:
        """Open the numbers of frontend `index` in `run_dir`; without a folder they are private to this process."""
        self.numbers = _numbers(run_dir, index)
        self._cells = self.numbers.cells
        self.first_token_s = SharedHistogram(self.numbers, "time_to_first_token")
        self.between_tokens_s = SharedHistogram(self.numbers, "inter_token_latency")
        self.whole_s = SharedHistogram(self.numbers, "e2e_request_latency")
        self._http = [self.numbers.place(f"http_{status}") for status in STATUS_CLASSES]

    def add(self, name: str, count: float = 1.0) -> None:
        self._cells[self.numbers.place(name)] += count

    def count_response(self, status: int) -> None:
        self._cells[self._http[status // 100 - 1]] += 1.0


class SharedHistogram:
    def __init__(self, numbers: SharedNumbers, name: str) -> None:
        names = histogram_names(name)
        self._bounds = HISTOGRAMS[name]
        self._cells = numbers.cells
        self._first, self._sum = numbers.place(names[0]), numbers.place(names[-1])

    def record(self, value: float, times: int = 1) -> None:
        self._cells[self._first + bisect_left(self._bounds, value)] += times
        self._cells[self._sum] += value * times


def _numbers(run_dir: str | Path | None, index: int) -> SharedNumbers:
    if run_dir is None:
        return SharedNumbers.private(NAMES)
    path = Path(run_dir) / f"{FRONTEND_PREFIX}{index}"
    before = SharedNumbers.open(path)
    if before is not None and before.names == NAMES:
        return before
    return SharedNumbers.fresh(path, NAMES)
