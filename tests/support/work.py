"""How much work a function does, in numbers that do not depend on the machine."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def num_calls(function: Callable[[], object]) -> int:
    """The number of calls that happen within a call of `function`, those of functions written in C included."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return number


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that Python's objects take at a time within a call of `function`, beyond what they took before."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
