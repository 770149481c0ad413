"""When workers are asked to capture graphs: one at a time, when nobody waits for it; and as soon as it pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from srt.managers.scheduler.scheduler import CAPTURE_REST_S

MOST_IDLE_S = 1.0  # without a capture, if there is one to make


class Captures:
    """Of one server's workers."""

    def __init__(self, statistics: Counter[str], num_ranks: int, num_left: Callable[[], int]) -> None:
        self.is_missed = False  # as the last result says of steps behind the last capture
        self._statistics = statistics
        self._num_ranks = num_ranks
        self._num_left = num_left  # graphs that no worker was asked for
        self._num_capturing = 0  # ranks whose word that they have captured has not come
        self._rests_until = 0.0  # before that no worker is asked again

    def may_begin(self, now: float) -> bool:
        """Some graph is left, none is on its way, and the workers do not compile."""
        return self._num_left() > 0 and not self._num_capturing and now >= self._rests_until

    def begin(self, now: float, *, is_busy: bool) -> None:
        """One at a time, where a step missed it, or nobody waits for anything else."""
        assert not self._num_capturing, "two graphs are captured at once"
        assert now >= self._rests_until, "workers that are compiling have no rest"
        assert self._num_left() >= 0, "more graphs are captured than there are"
        assert self.is_missed or not is_busy, "requests wait for a graph that no step has missed"
        self._statistics["captures while busy" if is_busy else "captures while idle"] += 1
        self._statistics["rule: captures wait for their time"] += 1
        self._num_capturing = self._num_ranks

    def end(self, rank: int, now: float, *, is_compiling: bool) -> None:
        """This rank has answered."""
        self._num_capturing -= 1
        if is_compiling:
            self._rests_until = now + CAPTURE_REST_S
        self.is_missed &= rank != 0

    def check_begun(self, *, must_begin: bool) -> None:
        """Behind a tick, before which it was due."""
        self._statistics["rule: graphs are captured when that pays"] += must_begin
        assert self._num_capturing or not must_begin, "a step has missed a graph, and nobody is asked to capture it"

    def check_idle(self, now: float, since: float) -> None:
        """Nobody is there, and nothing was heard since then."""
        is_due = self.may_begin(now) and now > since + MOST_IDLE_S
        self._statistics["rule: graphs are captured when that pays"] += is_due
        assert not is_due, f"workers have nothing to do since {since:.3f} s, and are not asked to capture"
