"""The deadline of a step: every rank must answer the oldest step in time. Reads no clock.

A step has `--watchdog-timeout` seconds for each TOKENS_PER_TIMEOUT tokens (a constant of watchdog.py). Smaller steps have that time, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from srt.managers.process.watchdog import TOKENS_PER_TIMEOUT
from srt.protocol.engine_work import CaptureGraph, EngineWork
from srt.protocol.messages import StepPlan, ToWorker, WorkPlan

CHANGE_TIMEOUTS = 60  # time-outs that work may take which clients ask for: disks differ, and trainers are waited for
CAPTURE_TIMEOUTS = 10  # time-outs that a capture may take: it may compile kernels


@dataclass(slots=True)
class _Item:
    step: int
    num_tokens: int
    timeouts: float  # time-outs that it may take
    waiting_for: set[int] = field(default_factory=set)  # ranks


class StepDeadline:
    """The items that ranks have not answered. They work in order, so an item's time begins when all have answered the one before."""

    def __init__(self, timeout_s: float, num_ranks: int) -> None:
        self._timeout_s = timeout_s
        self._num_ranks = num_ranks
        self._items: deque[_Item] = deque()
        self._begun_s = 0.0  # when the time of the first item began

    @property
    def due_s(self) -> float | None:
        """Time by which the oldest item must be answered; None without items."""
        return self._begun_s + self._limit_s(self._items[0]) if self._items else None

    def sent(self, message: ToWorker, now_s: float) -> None:
        if not isinstance(message, StepPlan | WorkPlan):
            return  # resources are prepared beside the steps, and have a limit of their own
        if not self._items:
            self._begun_s = now_s
        self._items.append(_Item(message.step, _num_tokens(message), _timeouts(message), set(range(self._num_ranks))))

    def answered(self, rank: int, step: int, now_s: float) -> None:
        """Record a rank's answer. Answers come in order; the Scheduler itself rejects an answer to an item that was never sent."""
        for item in self._items:
            if item.step == step:
                item.waiting_for.discard(rank)
        while self._items and not self._items[0].waiting_for:
            self._items.popleft()
            self._begun_s = now_s

    def excuse(self, now_s: float) -> None:
        """Restart the oldest item's time: this process itself was stopped for a while, and perhaps the workers too."""
        self._begun_s = now_s

    def is_nearly_over(self, now_s: float) -> bool:
        """Return whether two thirds of the time are over: new requests should then go elsewhere. Any thread may call this."""
        try:
            limit_s = self._limit_s(self._items[0])
        except IndexError:
            return False
        return now_s - self._begun_s > limit_s * 2 / 3

    def complaint(self, now_s: float) -> str | None:
        """Return the reason to end the engine if the time is over, else None."""
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return None
        item = self._items[0]
        late = sorted(item.waiting_for)
        who = f"Worker {late[0]} has" if len(late) == 1 else f"Workers {', '.join(map(str, late))} have"
        return (
            f"{who} not answered step {item.step} ({item.num_tokens} tokens) within"
            f" {self._limit_s(item):g} s (see --watchdog-timeout)."
        )

    def _limit_s(self, item: _Item) -> float:
        return self._timeout_s * item.timeouts


def _timeouts(message: StepPlan | WorkPlan) -> float:
    if isinstance(message, WorkPlan) and isinstance(message.work, CaptureGraph):
        return CAPTURE_TIMEOUTS
    if isinstance(message, WorkPlan) and isinstance(message.work, EngineWork):
        return CHANGE_TIMEOUTS
    return max(1.0, _num_tokens(message) / TOKENS_PER_TIMEOUT)


def _num_tokens(message: StepPlan | WorkPlan) -> int:
    if not isinstance(message, StepPlan):
        return 0
    return sum(int(section.extend_counts.sum()) + len(section.decode_slots) for section in message.sections)
