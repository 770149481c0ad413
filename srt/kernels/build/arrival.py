"""How a kernel waits for what another rank writes into this rank's memory: for the number that is written behind it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, NamedTuple

ARRIVAL: Final = Path(__file__).with_suffix(".cuh")


class Arrival(ctypes.Structure):
    """Data that another rank is sending, and the number that it writes when all of it is there. Mirror of the kernels' struct."""

    _fields_ = (
        ("at", ctypes.c_ulonglong),  # address of the number, in this rank's memory
        ("number", ctypes.c_ulonglong),
        ("missing", ctypes.c_void_p),  # in host memory: 1 + the rank on which this one has given up
        ("patience_ns", ctypes.c_ulonglong),
        ("from_rank", ctypes.c_int),
    )


class LateRows(NamedTuple):
    """The rows of a tensor that are there when a kernel starts, and what it must wait for before it reads the others."""

    own: slice
    arrival: Arrival
