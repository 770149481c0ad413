"""Copy hidden states and ids between the stages of a pipeline on GPUs of one host: CUDA C++ kernels that write the other stages' memory.

Compute capability 9.0 only, like all CUDA C++ kernels here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from srt.kernels.build.hopper import launch, source_of

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_THREADS: Final = 256
_PROGRAMS: Final = 128
"""Most programs of a copy. Those that wait for another stage must not fill the GPU, on which that stage may run in a test."""
UNIT_BYTES: Final = 16
"""A row's size must be a multiple of this."""
NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class LinkKernel:
    """One of the kernels in stage_link.cu."""

    name: Literal["send_rows", "receive_rows", "send_ids", "receive_ids"]

    shared_bytes = 0
    num_threads = _THREADS
    cluster = 1

    @property
    def source(self) -> str:
        return source_of(_SOURCE)

    @property
    def constants(self) -> Mapping[str, int]:
        return {"THREADS": _THREADS}


KERNELS: Final = tuple(LinkKernel(name) for name in ("send_rows", "receive_rows", "send_ids", "receive_ids"))
SEND_ROWS, RECEIVE_ROWS, SEND_IDS, RECEIVE_IDS = KERNELS


class Rows(ctypes.Structure):
    """Mirror of the argument of `send_rows` and `receive_rows`."""

    _fields_ = (
        *((name, ctypes.c_ulonglong) for name in ("rows", "entry", "numbers", "number", "missing", "patience_ns")),
        *((name, ctypes.c_int) for name in ("count", "units", "sender")),
    )


class Ids(ctypes.Structure):
    """Mirror of the argument of `send_ids` and `receive_ids`."""

    _fields_ = (
        *((name, ctypes.c_ulonglong) for name in ("entry", "source", "tokens", "missing", "patience_ns", "stride")),
        ("number", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("count", "width", "sender")),
    )


def copy_rows(kernel: LinkKernel, rows: Rows) -> None:
    """Launch `send_rows` or `receive_rows` on the current stream."""
    launch(kernel, (min(rows.count, _PROGRAMS), 1, 1), (), (rows,))


def copy_ids(kernel: LinkKernel, ids: Ids) -> None:
    """Launch `send_ids` or `receive_ids` on the current stream."""
    launch(kernel, (1, 1, 1), (), (ids,))
