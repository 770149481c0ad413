"""Run steps of a CPU that look up all they need in the tables and draw at once: several drafts, or the tokens that verify them.

For rows without filters, penalties, biases and logprobs. The code is in `sequences.h`; draws and logits have the bits of other steps.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int64, c_void_p
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from srt.kernels.cpu.decode_step import MOST_ROWS

if TYPE_CHECKING:
    from srt.kernels.cpu.decode_step import CpuDecodeStep
    from srt.mem_cache.memory_pool import ReqToTokenPool

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
MOST_TOKENS: Final = MOST_ROWS
"""The most tokens of a step. When rows draft, those of the first step count."""


class PageGroup(Structure):
    _fields_ = (("pages", c_void_p), ("stride", c_int64))


class Sequences(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("max_tokens", c_int64),
        ("groups", POINTER(PageGroup)),
        *((name, c_int64) for name in ("num_groups", "page_size")),
        *((name, c_void_p) for name in ("temperatures", "seeds")),
        ("vocab_size", c_int64),
        ("logits", c_void_p),
        ("taps", c_void_p),
    )


class DraftRows(Structure):
    _fields_ = (("num_rows", c_int64), *((name, c_void_p) for name in ("slots", "starts", "lengths", "counts")))


class VerifyRows(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        *((name, c_void_p) for name in ("slots", "lengths", "counts", "seq_lens", "ids", "told")),
    )


class SequenceSteps:
    """Steps of a model over the tokens in its tables, which must not move while this object lives."""

    def __init__(self, step: CpuDecodeStep, tables: ReqToTokenPool, vocab_size: int) -> None:
        self.step = step
        self._logits = step.new_logits(MOST_TOKENS)
        self._tables = tables  # kept, for their addresses
        groups = [PageGroup(table.data_ptr(), table.stride(0)) for table in tables.page_tables]
        self._groups = (PageGroup * len(groups))(*groups)
        self._sequences = Sequences(
            tables.token_table.data_ptr(),
            tables.token_table.stride(0),
            self._groups,
            len(groups),
            tables.page_size,
            tables.draws.temperatures.data_ptr(),
            tables.draws.seeds.data_ptr(),
            vocab_size,
            self._logits.data_ptr(),
            step.taps,
        )

    def verify(self, slots: Ints, lengths: Ints, counts: Ints) -> tuple[Int32s, Int32s]:
        """Compute `counts[i]` tokens of each slot from position `lengths[i]` on, all but the first of which are drafts.

        Draw behind each, and keep the draws that count, as `srt.speculative.acceptance` does, in the token table and the lengths. Return
        their ids end to end, and their numbers, which are -1 where the first draw of a row was not finite.
        """
        num_tokens = int(counts.sum())
        assert num_tokens <= MOST_TOKENS, f"{num_tokens} tokens in a step for {MOST_TOKENS}"
        ids, told = np.empty(num_tokens, np.int32), np.empty(len(slots), np.int32)
        arrays = [address(array) for array in (slots, lengths, counts)]
        rows = VerifyRows(len(slots), *arrays, self._tables.seq_lens.data_ptr(), address(ids), address(told))
        self.step.library.srt_verify(self.step.runner, ctypes.byref(self._sequences), ctypes.byref(rows))
        return ids[: int(told.clip(0).sum())], told

    def draft(self, slots: Ints, starts: Ints, lengths: Ints, counts: Ints) -> None:
        """Draw `counts[i]` ids behind position `lengths[i]` of each slot, and write them into the token table.

        Positions `starts[i]` to `lengths[i]` are computed first.
        """
        num_tokens = int((lengths - starts).sum()) + len(slots)
        assert num_tokens <= MOST_TOKENS, f"{num_tokens} tokens in a step for {MOST_TOKENS}"
        rows = DraftRows(len(slots), *(address(array) for array in (slots, starts, lengths, counts)))
        self.step.library.srt_draft(self.step.runner, ctypes.byref(self._sequences), ctypes.byref(rows))


def address(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous, "the compiled code reads whole arrays"
    return array.ctypes.data
