"""Where a worker's own time goes, step by step: what the device waits for if it waits."""

from __future__ import annotations

from collections import deque

import numpy as np

from srt.protocol.messages import Scalar

REMEMBERED = 2048  # steps that the figures are about


class WorkerTimes:
    """Microseconds of the latest steps. Reading a clock is all that it costs while steps run.

    `launch`: from a plan's arrival until its work is enqueued. `answer`: from a result's arrival until it is sent. `loop`: from a
    result's arrival until the plan that it led to is launched, while a step is in flight; beyond one step's time the device waits.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._launch: deque[float] = deque(maxlen=REMEMBERED)
        self._answer: deque[float] = deque(maxlen=REMEMBERED)
        self._loop: deque[float] = deque(maxlen=REMEMBERED)
        self._ready_s: deque[tuple[int, float]] = deque(maxlen=8)

    def launched(self, step: int, arrived_s: float, now_s: float, is_busy: bool) -> None:
        self._launch.append(now_s - arrived_s)
        while self._ready_s and self._ready_s[0][0] < step - self._window:
            self._ready_s.popleft()
        if is_busy and self._ready_s and self._ready_s[0][0] == step - self._window:
            self._loop.append(now_s - self._ready_s[0][1])

    def answered(self, step: int, ready_s: float, now_s: float) -> None:
        self._answer.append(now_s - ready_s)
        self._ready_s.append((step, ready_s))

    def values(self) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {}
        for name, seconds in (("launch", self._launch), ("answer", self._answer), ("loop", self._loop)):
            if seconds:
                p50, p99 = np.percentile(np.array(seconds), (50, 99))
                values |= {f"{name}_us_p50": round(p50 * 1e6), f"{name}_us_p99": round(p99 * 1e6)}
        return values
