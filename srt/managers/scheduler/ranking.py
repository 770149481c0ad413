"""The rank of a request by arrival or priority, and the rule by which one may preempt another.

The longest cached prefix first (`--schedule-policy lpm`) is a queue of its own, in waiting.py.
"""

from __future__ import annotations

from math import inf

from srt.managers.scheduler.request import Request
from srt.server_args import ServerArgs


class Ranking:
    """Gives each request its `order`, once: the smallest is admitted first and preempted last.

    Without priorities the order is that of arrival. With them, one step of priority is worth `--priority-aging-time` seconds of
    waiting. All waiting requests age alike, so the order among them never changes, and one that waits long enough becomes the first.
    """

    def __init__(self, args: ServerArgs) -> None:
        self.has_priorities: bool = args.uses_priorities
        self._threshold: int = args.priority_scheduling_preemption_threshold
        self._aging_s: float = args.priority_aging_time

    def order(self, request: Request) -> tuple[float, int]:
        if request.urgent:
            return -inf, request.serial
        if not self.has_priorities:
            return 0.0, request.serial
        if self._aging_s == inf:  # without aging, high priorities can starve low ones
            return float(-request.priority), request.serial
        return request.arrived_s - request.priority * self._aging_s, request.serial

    def may_displace(self, request: Request, running: Request) -> bool:
        """Return whether `running` may be preempted so that `request` can start at once."""
        if request.urgent:
            return not running.urgent
        is_worth_it = request.priority - running.priority >= self._threshold
        return self.has_priorities and is_worth_it and request.place.order < running.place.order
