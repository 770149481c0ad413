"""Compiled operations on the rows of a CPU's decode step, around the layers: look them up, draw ids, and store the draws.

Each function does what the operations of PyTorch that it replaces do, to the bit; `rows.h` has the code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from srt.kernels.build.cpu_library import load_library

if TYPE_CHECKING:
    from srt.kernels.sampling.draw_rows import DrawRows
    from srt.mem_cache.memory_pool import DrawTables


class _Draws(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("num_rows", "num_columns", "stride", "first_token")),
        *((name, c_void_p) for name in ("temperatures", "seeds", "positions", "thresholds", "ids", "values")),
        ("is_bfloat16", c_int32),
    )


class _Tables(Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("max_pages", c_int64),
        ("tokens", c_void_p),
        ("max_tokens", c_int64),
        *((name, c_void_p) for name in ("seq_lens", "temperatures", "seeds", "top_ks", "top_ps", "min_ps")),
        ("dummy_slot", c_int64),
        ("page_size", c_int64),
    )


class _Mail(Structure):
    _fields_ = (
        ("words", c_void_p),
        ("ring", c_int64),
        ("stride", c_int64),
        ("last_store", c_void_p),
        ("page_bits", c_int64),
        ("number_bits", c_int64),
    )


class _Gathered(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            "ids", "positions", "locations", "seq_lens", "temperatures", "seeds", "top_ks", "top_ps", "min_ps",
        )
    )  # fmt: skip


class _Store(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "values", "slots", "positions")),
        ("num_rows", c_int64),
        ("tokens", c_void_p),
        ("max_tokens", c_int64),
        ("words", c_void_p),
        ("ring", c_int64),
        ("stride", c_int64),
        ("last", c_void_p),
    )


class RowOperations(NamedTuple):
    """The compiled operations. Their arguments are those of `draw_from_shard`, `gather_decode_reference` and `store_draws_reference`."""

    draw: Callable[[Tensor, DrawRows, int, int], tuple[Tensor, Tensor]]
    gather: Callable[..., None]
    store: Callable[..., bool]


def row_operations() -> RowOperations | None:
    """Return the compiled operations; None if they were not built, or if this processor cannot run them."""
    library = load_library()
    return None if library is None else operations_of(library)


def operations_of(library: ctypes.CDLL) -> RowOperations:
    """Return the operations of a loaded library."""
    num_threads = torch.get_num_threads()

    def draw(logits: Tensor, rows: DrawRows, shard_start: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.bfloat16:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        num_rows, num_columns = logits.shape
        ids, values = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
        thresholds = None if rows.thresholds is None else rows.thresholds.contiguous()
        draws = _Draws(
            logits.data_ptr(), num_rows, num_columns, logits.stride(0), shard_start,
            rows.temperatures.data_ptr(), rows.seeds.data_ptr(), rows.positions.data_ptr(),
            None if thresholds is None else thresholds.data_ptr(), ids.data_ptr(), values.data_ptr(),
            logits.dtype == torch.bfloat16,
        )  # fmt: skip
        library.srt_draw(ctypes.byref(draws), num_threads)
        return ids.clamp_(max=vocab_size - 1), values

    def gather(
        row_slots: Tensor, page_words: Tensor, last_store: Tensor, page_table: Tensor, token_table: Tensor,
        seq_lens: Tensor, draws: DrawTables, dummy_slot: int, page_size: int, word_bits: tuple[int, int],
        out: tuple[Tensor, ...], row_draws: DrawTables,
    ) -> None:  # fmt: skip
        tables = _Tables(
            page_table.data_ptr(), page_table.stride(0), token_table.data_ptr(), token_table.stride(0),
            seq_lens.data_ptr(), *(table.data_ptr() for table in draws), dummy_slot, page_size,
        )  # fmt: skip
        mail = _Mail(page_words.data_ptr(), len(page_words), page_words.stride(0), last_store.data_ptr(), *word_bits)
        gathered = _Gathered(*(target.data_ptr() for target in (*out, *row_draws)))
        library.srt_gather(
            row_slots.data_ptr(), len(row_slots), ctypes.byref(mail), ctypes.byref(tables), ctypes.byref(gathered)
        )

    def store(
        ids: Tensor,
        values: Tensor,
        row_slots: Tensor,
        positions: Tensor,
        token_table: Tensor,
        words: Tensor,
        last: Tensor,
    ) -> bool:
        stored = _Store(
            ids.data_ptr(), values.data_ptr(), row_slots.data_ptr(), positions.data_ptr(), len(ids),
            token_table.data_ptr(), token_table.stride(0), words.data_ptr(), len(words), words.stride(0), last.data_ptr(),
        )  # fmt: skip
        library.srt_store_draws(ctypes.byref(stored))
        return True

    return RowOperations(draw, gather, store)
