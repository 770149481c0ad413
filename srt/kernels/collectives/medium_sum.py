"""Add up tensors of up to a few MiB over the ranks of a host in one launch: a CUDA C++ kernel that writes the other ranks' memory.

Such sums take as long as their bytes need from GPU to GPU, so nothing but the data is sent. `peer_sum.py` sends twice as many bytes, and
`large_sum.py` waits for larger pieces. Compute capability 9.0 only, like all CUDA C++ kernels here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from srt.kernels.build.arrival import ARRIVAL
from srt.kernels.build.hopper import launch, source_of
from srt.kernels.collectives.peer_sum import KINDS, PROGRAMS, SUMMANDS, WORDS, Mail

_SOURCE: Final = Path(__file__).with_suffix(".cu")
THREADS: Final = 512
WORD_BYTES: Final = 16
"""Bytes that a thread sends at once."""
BOX_BYTES: Final = THREADS * WORD_BYTES
EMPTY_BYTE: Final = b"\xff"
"""Boxes must be filled with it before any rank sends."""
_MOST_PARTS: Final = 4  # boxes of a program
_FEW_RANKS: Final = 4
_BLOCK_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class MediumKernel:
    """A variant of the kernel."""

    ranks: int
    dtype: torch.dtype
    is_normed: bool = False  # whether to add the sum to the residual stream and norm its rows
    rows: int = 1  # of a program. Without norms, what a box holds is a row
    parts: int = 1  # boxes of a row

    name = "medium_sum"
    shared_bytes = 0
    num_threads = THREADS
    cluster = 1

    @property
    def source(self) -> str:
        return source_of(_SOURCE, 0, ARRIVAL, SUMMANDS, WORDS)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "RANKS": self.ranks,
            "ROWS": self.rows,
            "PARTS": self.parts,
            "THREADS": THREADS,
            "BOXES": num_boxes(self.ranks),
            "NORMS": int(self.is_normed),
            "KIND": KINDS[self.dtype],
            "FLOAT16": KINDS[torch.float16],
            "FLOAT32": KINDS[torch.float32],
        }


class _Sum(ctypes.Structure):
    """Mirror of the kernel's argument `Sum`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part", "out", "hidden", "weight", "normed")),
        *((name, ctypes.c_int) for name in ("num_words", "row_words")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class MediumSums:
    """How a rank sums: its addresses, and the number of ranks."""

    mail: Mail
    ranks: int

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' `x`, added in rank order in float32 and rounded once."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel = MediumKernel(self.ranks, x.dtype, rows=_rows_of_program(_num_boxes_of(x.nbytes)))
        self._launch(kernel, x, _Sum(out=out.data_ptr(), row_words=THREADS))
        return out

    def add_and_norm(
        self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the norm of hidden + sum, hidden + sum) for [rows, columns], with the sum of `add`. The norm is of the rounded sum."""
        assert hidden.shape == x.shape and hidden.is_contiguous() and weight.shape == x.shape[1:], x.shape
        assert not hidden.data_ptr() % WORD_BYTES and not weight.data_ptr() % WORD_BYTES
        total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        row_bytes = x.shape[1] * x.itemsize
        kernel = MediumKernel(self.ranks, x.dtype, True, _rows_of_program(len(x)), _num_boxes_of(row_bytes))
        pointers = [one.data_ptr() for one in (total, hidden, weight, normed)]
        self._launch(kernel, x, _Sum(0, *pointers, row_words=row_bytes // WORD_BYTES, eps=eps))
        return normed, total

    def _launch(self, kernel: MediumKernel, x: torch.Tensor, sum_: _Sum) -> None:
        """Launch the kernel for `sum_`, which has all but the part."""
        part = x.contiguous()
        if part.data_ptr() % WORD_BYTES:
            part = part.clone()
        sum_.part, sum_.num_words = part.data_ptr(), part.nbytes // WORD_BYTES
        num_rows = -(-sum_.num_words // sum_.row_words)
        programs = -(-num_rows // kernel.rows)
        assert programs <= PROGRAMS and num_rows * kernel.parts <= num_boxes(self.ranks), (kernel, x.shape)
        with torch.cuda.device(x.device):
            launch(kernel, (programs, 1, 1), (), (self.mail, sum_), is_dependent=True)


def num_boxes(ranks: int) -> int:
    """Return the number of boxes on a side for each other rank. More ranks have fewer, because each sends all of them its part."""
    if ranks == 2:
        return PROGRAMS * _MOST_PARTS
    return PROGRAMS * 2 if ranks <= _FEW_RANKS else PROGRAMS


def memory_bytes(ranks: int) -> int:
    """Return the size of a rank's memory: two sides, with boxes for every other rank."""
    return -(-2 * (ranks - 1) * num_boxes(ranks) * BOX_BYTES // _BLOCK_BYTES) * _BLOCK_BYTES


def most_bytes(ranks: int) -> int:
    """Return the largest size of a part: 4 MiB of two ranks, 2 MiB of up to four, 512 KiB of more."""
    return num_boxes(ranks) * BOX_BYTES // (1 if ranks <= _FEW_RANKS else 2)


def is_summable(dtype: torch.dtype, num_bytes: int, ranks: int) -> bool:
    return dtype in KINDS and 0 < num_bytes <= most_bytes(ranks) and num_bytes % WORD_BYTES == 0


def is_normable(dtype: torch.dtype, num_rows: int, row_bytes: int, ranks: int) -> bool:
    """Return whether one launch can add and norm: a program holds whole rows. A single row is normed by the product that reads it."""
    if num_rows < 2 or row_bytes % WORD_BYTES or not is_summable(dtype, num_rows * row_bytes, ranks):
        return False
    parts = _num_boxes_of(row_bytes)
    has_boxes = num_rows * parts <= num_boxes(ranks)
    return has_boxes and _rows_of_program(num_rows) * parts <= _MOST_PARTS


def _num_boxes_of(num_bytes: int) -> int:
    return -(-num_bytes // BOX_BYTES)


def _rows_of_program(num_rows: int) -> int:
    """Return the number of rows of a program. There are few possible numbers, because each is a variant."""
    return next(rows for rows in (1, 2, 4) if num_rows <= rows * PROGRAMS)
