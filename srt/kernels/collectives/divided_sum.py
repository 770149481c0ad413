"""Finish a sum over two ranks that divide its rows: a CUDA C++ kernel that adds, adds the residual stream and norms.

Each rank finishes half of the rows, and the ranks send each other the norms. `srt/distributed/row_division.py` says how they do that
while products run. Compute capability 9.0 only, like all CUDA C++ kernels here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from srt.kernels.build.arrival import ARRIVAL, Arrival
from srt.kernels.build.hopper import launch, source_of
from srt.kernels.collectives.large_sum import WORD_BYTES
from srt.kernels.collectives.peer_sum import KINDS, SUMMANDS, WORDS

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_THREADS: Final = 256
_MOST_PARTS: Final = 4
MOST_ROW_BYTES: Final = _MOST_PARTS * _THREADS * WORD_BYTES
"""A program holds a whole row."""


@dataclass(frozen=True, slots=True)
class DividedKernel:
    """A variant of the kernel that finishes rows, or of the one that only waits."""

    dtype: torch.dtype
    parts: int = _MOST_PARTS  # words of a row per thread
    only_waits: bool = False

    shared_bytes = 0
    cluster = 1

    @property
    def name(self) -> str:
        return "await_arrival" if self.only_waits else "divided_sum"

    @property
    def num_threads(self) -> int:
        return 1 if self.only_waits else _THREADS

    @property
    def source(self) -> str:
        return source_of(_SOURCE, 0, ARRIVAL, SUMMANDS, WORDS)

    @property
    def programs_at_once(self) -> int:
        """Programs that a multiprocessor runs at once."""
        return 4 if self.parts <= 2 else 2

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "RANKS": 2,
            "PARTS": self.parts,
            "THREADS": _THREADS,
            "PROGRAMS_AT_ONCE": self.programs_at_once,
            "KIND": KINDS[self.dtype],
            "FLOAT16": KINDS[torch.float16],
            "FLOAT32": KINDS[torch.float32],
        }


class _Rows(ctypes.Structure):
    """Mirror of the kernel's argument `Rows`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part", "sent", "hidden", "weight", "normed")),
        *((name, ctypes.c_int) for name in ("num_rows", "row_words")),
        ("eps", ctypes.c_float),
    )


def is_divisible(dtype: torch.dtype, row_bytes: int) -> bool:
    """Return whether the kernel finishes rows of this size."""
    return dtype in KINDS and row_bytes % WORD_BYTES == 0 and 0 < row_bytes <= MOST_ROW_BYTES


def finish_rows(
    part: torch.Tensor,
    sent: torch.Tensor,
    arrival: Arrival,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
) -> None:
    """Wait for `sent`, add `part` + `sent` to `hidden`, and write the norm of that to `normed`: all [rows, columns].

    The sum is added in float32 and rounded, and so is the stream's. The norm is of the rounded stream.
    """
    rows = part, sent, hidden, normed
    assert all(one.shape == part.shape and one.is_contiguous() and one.dtype is part.dtype for one in rows)
    assert all(one.data_ptr() % WORD_BYTES == 0 for one in (*rows, weight)) and weight.shape == part.shape[1:]
    row_words = part.shape[1] * part.itemsize // WORD_BYTES
    kernel = DividedKernel(part.dtype, parts=-(-row_words // _THREADS))
    pointers = [one.data_ptr() for one in (part, sent, hidden, weight, normed)]
    processors = torch.cuda.get_device_properties(part.device).multi_processor_count
    programs = min(len(part), processors * kernel.programs_at_once)
    with torch.cuda.device(part.device):
        launch(kernel, (programs, 1, 1), (), (arrival, _Rows(*pointers, len(part), row_words, eps)))


def await_arrival(arrival: Arrival, device: torch.device) -> None:
    """Let kernels that are launched from now on wait for this arrival."""
    with torch.cuda.device(device):
        launch(DividedKernel(torch.bfloat16, 1, only_waits=True), (1, 1, 1), (), (arrival,))
