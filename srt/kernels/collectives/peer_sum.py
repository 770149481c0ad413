"""Add or gather small tensors over the ranks of a host in one launch: a CUDA C++ kernel that writes the other ranks' memory.

A decode step sends a few bytes many times, and NCCL's own work before and after them takes longer than sending them. Compute capability
9.0 only, like all CUDA C++ kernels here.
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

_SOURCE: Final = Path(__file__).with_suffix(".cu")
SUMMANDS: Final = Path(__file__).with_name("summands.cuh")
WORDS: Final = Path(__file__).with_name("words.cuh")
LETTERS: Final = 512
"""Number of letters in a box, and of threads in the program that fills it."""
LETTER_BYTES: Final = 8
"""Bytes of data in a letter; 8 more contain the number of the run."""
PROGRAMS: Final = 128
"""Limit of programs. All must run at once: one that waits for another rank must not delay one for which another rank waits."""
_MOST_PARTS: Final = 4
BOXES: Final = PROGRAMS * _MOST_PARTS
MOST_BYTES: Final = BOXES * LETTERS * LETTER_BYTES
"""Largest size of a rank's part."""
MOST_RANKS: Final = 8
_MANY_RANKS: Final = 5
"""With this many ranks or more, each sends so many copies that NCCL may be faster above a quarter of MOST_BYTES."""
KINDS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class PeerKernel:
    """A variant of the kernel. Gathering does not depend on the dtype."""

    ranks: int
    dtype: torch.dtype | None  # type of the summands; None: gather instead of adding
    is_normed: bool = False  # whether to add the sum to the residual stream and norm its rows
    parts: int = 1  # boxes per program

    name = "peer_sum"
    shared_bytes = 0
    num_threads = LETTERS
    cluster = 1

    @property
    def source(self) -> str:
        return source_of(_SOURCE, 0, ARRIVAL, SUMMANDS)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "RANKS": self.ranks,
            "PARTS": self.parts,
            "BOXES": BOXES,
            "LETTERS": LETTERS,
            "GATHERS": int(self.dtype is None),
            "NORMS": int(self.is_normed),
            "KIND": 0 if self.dtype is None else KINDS[self.dtype],
            "FLOAT16": KINDS[torch.float16],
            "FLOAT32": KINDS[torch.float32],
        }


class Mail(ctypes.Structure):
    """Addresses for sending and receiving; mirror of the kernel's argument."""

    _fields_ = (
        ("memories", ctypes.c_ulonglong * MOST_RANKS),
        ("runs", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
        ("patience_ns", ctypes.c_ulonglong),
        ("rank", ctypes.c_int),
    )


class _Ending(ctypes.Structure):
    """Mirror of the kernel's argument in peer_sum.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "normed")),
        ("eps", ctypes.c_float),
    )


def memory_bytes(ranks: int) -> int:
    """Return the size of a rank's boxes: two sides, with room for a part of every rank."""
    return 2 * BOXES * ranks * LETTERS * 2 * LETTER_BYTES


def own_place(rank: int) -> int:
    """Return the offset at which a rank's own letters would arrive: no rank ever writes there."""
    return rank * LETTERS * 2 * LETTER_BYTES


def is_summable(dtype: torch.dtype, num_bytes: int, ranks: int) -> bool:
    return dtype in KINDS and is_gatherable(num_bytes, ranks)


def is_gatherable(num_bytes: int, ranks: int) -> bool:
    most = MOST_BYTES if ranks < _MANY_RANKS else MOST_BYTES // 4
    return 0 < num_bytes <= most and num_bytes % LETTER_BYTES == 0


def is_normable(dtype: torch.dtype, num_rows: int, row_bytes: int, ranks: int) -> bool:
    """Return whether one launch can add and norm: a program holds a whole row. A single row is normed by the product that reads it."""
    fits = 1 < num_rows <= PROGRAMS and _parts(row_bytes) <= _MOST_PARTS
    return fits and row_bytes % LETTER_BYTES == 0 and is_summable(dtype, num_rows * row_bytes, ranks)


def add_parts(x: torch.Tensor, mail: Mail, ranks: int) -> torch.Tensor:
    """Return the sum of the ranks' `x`, added in rank order in float32 and rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _exchange(PeerKernel(ranks, x.dtype, parts=_parts_of_all(x.nbytes)), x, out, mail)
    return out


def gather_parts(x: torch.Tensor, mail: Mail, ranks: int) -> torch.Tensor:
    """Return the ranks' `x` as [ranks, *x.shape]."""
    out = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
    _exchange(PeerKernel(ranks, None, parts=_parts_of_all(x.nbytes)), x, out, mail)
    return out


def add_parts_and_norm(
    x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, mail: Mail, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of hidden + sum, hidden + sum) for [rows, columns], with the sum of `add_parts`. The norm is of the rounded sum."""
    assert hidden.shape == x.shape and hidden.is_contiguous() and weight.shape == x.shape[1:], x.shape
    assert not hidden.data_ptr() % LETTER_BYTES and not weight.data_ptr() % LETTER_BYTES
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    row_bytes = x.shape[1] * x.itemsize
    kernel = PeerKernel(ranks, x.dtype, is_normed=True, parts=_parts(row_bytes))
    ending = _Ending(hidden.data_ptr(), weight.data_ptr(), normed.data_ptr(), eps)
    _exchange(kernel, x, total, mail, ending, row_bytes // LETTER_BYTES)
    return normed, total


def _parts(row_bytes: int) -> int:
    """Return the number of boxes that a row needs."""
    return -(-row_bytes // (LETTERS * LETTER_BYTES))


def _parts_of_all(num_bytes: int) -> int:
    """Return the number of boxes per program if parts are not rows. There are few possible numbers, because each is a variant."""
    return next(parts for parts in (1, 2, 4) if num_bytes <= parts * PROGRAMS * LETTERS * LETTER_BYTES)


def _exchange(
    kernel: PeerKernel,
    x: torch.Tensor,
    out: torch.Tensor,
    mail: Mail,
    ending: _Ending = _Ending(),  # noqa: B008  never changed
    row_letters: int = 0,
) -> None:
    part = x.contiguous()
    if part.data_ptr() % LETTER_BYTES:
        part = part.clone()
    num_letters, row_letters = part.nbytes // LETTER_BYTES, row_letters or kernel.parts * LETTERS
    grid = -(-num_letters // row_letters), 1, 1
    with torch.cuda.device(x.device):
        launch(kernel, grid, (), (mail, ending, part, out, num_letters, row_letters), is_dependent=True)
