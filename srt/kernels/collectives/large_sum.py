"""Add up large tensors over the ranks of a host in one launch: a CUDA C++ kernel that writes the other ranks' memory.

NCCL gathers the parts, so another kernel must add them, and a third one adds the residual stream and norms it. Here one kernel does all of
it while the parts arrive. Compute capability 9.0 only, like all CUDA C++ kernels here. `peer_sum.py` adds up small tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from srt.kernels.build.arrival import ARRIVAL
from srt.kernels.build.hopper import launch, source_of
from srt.kernels.collectives import peer_sum
from srt.kernels.collectives.peer_sum import KINDS, SUMMANDS, WORDS

_SOURCE: Final = Path(__file__).with_suffix(".cu")
THREADS: Final = 256
PROGRAMS_AT_ONCE: Final = 3
"""Programs that a multiprocessor runs at once."""
PROGRAMS: Final = peer_sum.PROGRAMS * PROGRAMS_AT_ONCE
"""Programs of every launch. All must run at once: one that waits for another rank must not delay one for which another rank waits."""
_SENDERS: Final = 128
"""Programs of these that send; the others receive."""
WORD_BYTES: Final = 16
UNIT_BYTES: Final = 32 << 10
"""Most bytes that are sent together; whole rows if they are normed."""
SLOTS: Final = 8192
"""Limit of the units that a rank sends to another one in a launch."""
MOST_BYTES: Final = 96 << 20
"""Largest size of a part in one launch; larger ones take several."""
MOST_RANKS: Final = 4
_MOST_PARTS: Final = 4
_BLOCK_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class LargeKernel:
    """A variant of the kernel. All variants have the same programs, which count the launches."""

    ranks: int
    dtype: torch.dtype
    is_normed: bool = False  # whether to add the sum to the residual stream and norm its rows
    parts: int = _MOST_PARTS  # words of a row per thread
    is_divided: bool = False
    """If true, each rank computes the sums of some units and sends them to the other ranks. If false, each rank computes all sums."""
    senders: int = _SENDERS

    name = "large_sum"
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
            "PARTS": self.parts,
            "THREADS": THREADS,
            "PROGRAMS": PROGRAMS,
            "PROGRAMS_AT_ONCE": PROGRAMS_AT_ONCE,
            "SLOTS": SLOTS,
            "NORMS": int(self.is_normed),
            "DIVIDED": int(self.is_divided),
            "KIND": KINDS[self.dtype],
            "FLOAT16": KINDS[torch.float16],
            "FLOAT32": KINDS[torch.float32],
        }


class LargeMail(ctypes.Structure):
    """Addresses for sending and receiving; mirror of the kernel's argument `Boxes`."""

    _fields_ = (
        ("memories", ctypes.c_ulonglong * MOST_RANKS),
        ("runs", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
        ("patience_ns", ctypes.c_ulonglong),
        ("box_bytes", ctypes.c_ulonglong),
        ("rank", ctypes.c_int),
    )


class _Sum(ctypes.Structure):
    """Mirror of the kernel's argument `Sum`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part", "out", "hidden", "weight", "normed")),
        *((name, ctypes.c_int) for name in ("num_words", "row_words", "unit_words", "num_units", "senders")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class LargeSums:
    """How a rank sums: its addresses, and the choices that all ranks must make alike."""

    mail: LargeMail
    ranks: int
    most_bytes: int  # of a part in one launch
    is_divided: bool
    senders: int = _SENDERS
    unit_bytes: int = UNIT_BYTES

    @classmethod
    def of(cls, mail: LargeMail, ranks: int, most_bytes: int) -> LargeSums:
        return cls(mail, ranks, most_bytes, is_divided=ranks > 2)  # for two, both ways move the same bytes

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' `x`, added in rank order in float32 and rounded once."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel = LargeKernel(self.ranks, x.dtype, is_divided=self.is_divided)
        row_words = kernel.parts * THREADS
        self._launch(kernel, x, row_words, _Sum(out=out.data_ptr()))
        return out

    def add_and_norm(
        self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the norm of hidden + sum, hidden + sum) for [rows, columns], with the sum of `add`. The norm is of the rounded sum."""
        assert hidden.shape == x.shape and hidden.is_contiguous() and weight.shape == x.shape[1:], x.shape
        assert not hidden.data_ptr() % WORD_BYTES and not weight.data_ptr() % WORD_BYTES
        total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        row_words = x.shape[1] * x.itemsize // WORD_BYTES
        parts, divided = -(-row_words // THREADS), self.is_divided
        kernel = LargeKernel(self.ranks, x.dtype, is_normed=True, parts=parts, is_divided=divided)
        pointers = [one.data_ptr() for one in (total, hidden, weight, normed)]
        self._launch(kernel, x, row_words, _Sum(0, *pointers, eps=eps))
        return normed, total

    def _launch(self, kernel: LargeKernel, x: torch.Tensor, row_words: int, whole: _Sum) -> None:
        """Launch the kernel for each piece of the tensor that fits the boxes. `whole` has the addresses of all but the part."""
        assert self.is_divided or self.ranks == 2, f"the boxes of {self.ranks} ranks have no room for whole parts"
        part = x.contiguous()
        if part.data_ptr() % WORD_BYTES:
            part = part.clone()
        num_words = part.nbytes // WORD_BYTES
        unit_words = max(1, self.unit_bytes // WORD_BYTES // row_words) * row_words
        most = min(self.most_bytes // (unit_words * WORD_BYTES), SLOTS)
        for first, count in pieces(-(-num_words // unit_words), most):
            assert count >= self.ranks or not self.is_divided, (
                f"{count} units: a rank has none, and none would wait for it"
            )
            slots = 2 * -(-count // self.ranks) if self.is_divided else count
            assert slots * unit_words * WORD_BYTES <= self.mail.box_bytes, f"no room for {slots} units in a box"
            begin = first * unit_words
            words = min(count * unit_words, num_words - begin)
            sum_ = _Sum(
                *(_moved(address, begin) for address in (part.data_ptr(), whole.out, whole.hidden)),
                whole.weight,
                _moved(whole.normed, begin),
                *(words, row_words, unit_words, count, self.senders),
                whole.eps,
            )
            with torch.cuda.device(x.device):
                launch(kernel, (PROGRAMS, 1, 1), (), (self.mail, sum_))


def boxed_bytes(ranks: int, most_sum_bytes: int) -> int:
    """Return the bytes of a part in one launch for sums of up to `most_sum_bytes`; 0 if none is large, or there are too many ranks."""
    if ranks > MOST_RANKS or most_sum_bytes <= peer_sum.MOST_BYTES:
        return 0
    return min(MOST_BYTES, -(-most_sum_bytes // UNIT_BYTES) * UNIT_BYTES + UNIT_BYTES)


def memory_bytes(ranks: int, most_bytes: int) -> int:
    """Return the size of a rank's memory for parts of up to `most_bytes`: two sides, with a box and numbers for every other rank."""
    if not most_bytes:
        return 0
    one = box_bytes(ranks, most_bytes) + SLOTS * 8
    return -(-2 * (ranks - 1) * one // _BLOCK_BYTES) * _BLOCK_BYTES


def box_bytes(ranks: int, most_bytes: int) -> int:
    """Return the bytes that a rank sends another one in a launch: a share of the parts, and as many sums; for two ranks that is all.

    The last units of the shares may not be complete.
    """
    return -(-2 * most_bytes // ranks // UNIT_BYTES) * UNIT_BYTES + 2 * UNIT_BYTES


def is_summable(dtype: torch.dtype, num_bytes: int) -> bool:
    return dtype in KINDS and num_bytes % WORD_BYTES == 0


def is_normable(row_bytes: int) -> bool:
    """Return whether one launch can add and norm: a program holds a whole row."""
    return row_bytes % WORD_BYTES == 0 and 0 < row_bytes <= _MOST_PARTS * THREADS * WORD_BYTES


def pieces(num_units: int, most: int) -> list[tuple[int, int]]:
    """Divide the units evenly between launches of at most `most` units: the first unit of each, and their number."""
    assert most > 0, "the boxes have no room for a unit"
    launches = -(-num_units // most)
    cuts = [num_units * number // launches for number in range(launches + 1)]
    return [(first, end - first) for first, end in pairwise(cuts)]


def _moved(address: int | None, words: int) -> int:
    return address + words * WORD_BYTES if address else 0
