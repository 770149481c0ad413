"""Timing of a worker's host work in decode steps, which shows what the device waits for if it waits."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from srt.protocol.messages import Scalar

REMEMBERED = 2048  # latest steps kept, for each number of rows


def _latest() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass(slots=True)
class _Seconds:
    """Times of decode steps with the same number of rows."""

    launch: deque[float] = field(default_factory=_latest)
    answer: deque[float] = field(default_factory=_latest)
    loop: deque[float] = field(default_factory=_latest)
    step: deque[float] = field(default_factory=_latest)


class WorkerTimes:
    """Percentiles of decode steps' times, in microseconds. Recording costs no more than reading a clock.

    `launch`: from a plan's arrival until its work, sampling included, is enqueued. `answer`: from a result's arrival until it is
    sent. `loop`: from a result's arrival until the plan that follows from it is launched, while a step is in flight; if this is
    longer than a step, the device waits. `step`: time on the device.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._by_rows: defaultdict[int, _Seconds] = defaultdict(_Seconds)
        self._rows: dict[int, int] = {}  # decode steps in flight -> their rows
        self._ready_s: deque[tuple[int, float]] = deque(maxlen=8)

    def launched(self, step: int, num_decodes: int, arrived_s: float, now_s: float, is_busy: bool) -> None:
        """Record a launch. `num_decodes` is the step's number of rows, or 0 if not all of them decode."""
        while self._ready_s and self._ready_s[0][0] < step - self._window:
            self._ready_s.popleft()
        if not num_decodes:
            return
        self._rows[step] = num_decodes
        seconds = self._by_rows[num_decodes]
        seconds.launch.append(now_s - arrived_s)
        if is_busy and self._ready_s and self._ready_s[0][0] == step - self._window:
            seconds.loop.append(now_s - self._ready_s[0][1])

    def answered(self, step: int, begun_s: float, ready_s: float, now_s: float) -> None:
        self._ready_s.append((step, ready_s))
        if (num_decodes := self._rows.pop(step, 0)) != 0:
            self._by_rows[num_decodes].answer.append(now_s - ready_s)
            self._by_rows[num_decodes].step.append(ready_s - begun_s)

    def pop(self) -> dict[str, Scalar]:
        """Return the percentiles since the last call: `step` of all decode steps, the others of the most frequent number of rows.

        Empty if no decode step ran.
        """
        by_rows, self._by_rows = self._by_rows, defaultdict(_Seconds)
        if not by_rows:
            return {}
        rows = max(by_rows, key=lambda rows: len(by_rows[rows].launch))
        most = by_rows[rows]
        steps = [second for seconds in by_rows.values() for second in seconds.step]
        values: dict[str, Scalar] = {"decode_rows": rows}
        kinds = {"launch": most.launch, "answer": most.answer, "loop": most.loop, "step": steps}
        for name, found in kinds.items():
            if found:
                p50, p99 = np.percentile(np.array(found), (50, 99))
                values |= {f"{name}_us_p50": round(p50 * 1e6), f"{name}_us_p99": round(p99 * 1e6)}
        return values
