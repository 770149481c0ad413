"""The trials of suspects, which are requests that may have killed workers. Each runs alone, before all others, until it gets further."""

from __future__ import annotations

from srt.managers.scheduler.counters import Counters
from srt.managers.scheduler.request import Request, Status
from srt.managers.scheduler.slots import SlotTable


class Trials:
    """Chooses the request on trial, one at a time, in the order in which the suspects came.

    A trial ends when its request has ended or has TRIAL_TOKENS new outputs (`Request.trial_end`). Then the next suspect's trial begins. A
    request that loses its slot during its trial is tried again.
    """

    def __init__(self, slots: SlotTable, counters: Counters) -> None:
        self._slots = slots
        self._counters = counters
        self._untried: set[int] = set()  # serials of live suspects whose trial has not begun, or must begin again
        self._queue: list[Request] = []  # those of them that may be admitted
        self._on_trial: Request | None = None

    @property
    def are_some_left(self) -> bool:
        """True if a request is or will be on trial."""
        return bool(self._queue) or self._on_trial is not None

    def add(self, request: Request) -> None:
        """Add a suspect that has arrived."""
        self._untried.add(request.serial)

    def line_up(self, request: Request) -> bool:
        """Line up a request that may be admitted, if it is still to be tried. Return False if it needs no trial."""
        if not self.is_untried(request):
            return False
        if request.progress.num_output >= request.trial_end:  # its last row in flight has shown enough
            self._untried.remove(request.serial)
            return False
        self._queue.append(request)
        return True

    def is_untried(self, request: Request) -> bool:
        return request.serial in self._untried

    def lose_slot(self, request: Request) -> None:
        """Note that a request was preempted. If it was on trial, its trial begins again."""
        if request is self._on_trial:
            self._untried.add(request.serial)
            self._on_trial = None

    def remove(self, request: Request) -> bool:
        """Remove a waiting request that has ended; any request may be passed. Return True if it was lined up for its trial."""
        self._untried.discard(request.serial)
        if request not in self._queue:
            return False
        self._queue.remove(request)
        return True

    def find_on_trial(self) -> Request | None:
        """Return the request on trial, or None. When the present one has ended or is far enough, the next suspect's trial begins."""
        tried = self._on_trial
        if tried is not None and (
            tried.progress.status is not Status.RUNNING
            or self._slots.num_output_at[tried.progress.slot] >= tried.trial_end
        ):
            tried = None
        if tried is None and self._queue:
            tried = self._queue.pop(0)
            self._untried.discard(tried.serial)
            self._counters.num_tried += 1
        self._on_trial = tried
        return tried
