"""The fixed device memory of steps in which every row decodes: where their graphs read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool

Ints = NDArray[np.int64]
NO_PAGE = -1


class GraphInputBuffers:
    """A step is told its slots and what pages they begin; everything else is gathered from the tables on the device.

    `told` [2, max_rows] int64: slots, padded with the dummy slot, and the page that a row's next position begins, or -1.
    Behind a step's rows the arrays hold padding: tokens of the dummy slot, which never grows and writes into the dummy page.
    """

    def __init__(self, tables: ReqToTokenPool, max_rows: int, device: torch.device, window: int) -> None:
        self.max_rows = max_rows
        self._tables = tables
        self._told = torch.full((2, max_rows), NO_PAGE, dtype=torch.int64, device=device)
        self._told[0] = tables.dummy_slot
        self.row_slots, self._new_pages = self._told[0], self._told[1]
        self.input_ids, self.positions, self.out_cache_loc, self.seq_lens = (
            torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.draws = DrawTables(*(torch.empty(max_rows, dtype=table.dtype, device=device) for table in tables.draws))
        self.draws.clear()
        self._staging = [_Staging(max_rows, device) for _ in range(1 if device.type == "cpu" else window + 1)]
        self._next = 0
        self._slots_told: Ints | None = None  # what `_told` holds, unless it has pages
        self._gather = _gather_operation(device)

    def tell(self, slots: Ints, new_pages: Ints | None) -> bool:
        """The next step's slots, and the pages that they begin (-1: none). Copies, and returns True, only if something is new.

        `slots` must not be written to from then on: the same array says the same.
        """
        told = self._slots_told
        if new_pages is None and (slots is told or (told is not None and slots.tobytes() == told.tobytes())):
            return False
        self._slots_told = slots if new_pages is None else None
        staging = self._staging[self._next]
        self._next = (self._next + 1) % len(self._staging)
        staging.fill(slots, new_pages, self._tables.dummy_slot)
        staging.copy_to(self._told)
        return True

    def tell_padding(self) -> None:
        """Nothing but padding: a run that leaves the tables as they are."""
        self.tell(np.zeros(0, np.int64), None)

    def enter_pages(self) -> None:
        """Enter the told pages at once, for whoever reads the page table before `gather`; it enters the same again."""
        tables, slots = self._tables, self.row_slots
        columns = tables.seq_lens[slots] // tables.page_size
        pages = torch.where(self._new_pages >= 0, self._new_pages, tables.page_table[slots, columns])
        tables.write_pages(slots, columns, pages)

    def gather(self, num_rows: int) -> None:
        """Enter new pages, look up the first `num_rows` rows, and let their slots grow by one."""
        rows = slice(0, num_rows)
        out = (self.input_ids[rows], self.positions[rows], self.out_cache_loc[rows], self.seq_lens[rows])
        tables = self._tables
        self._gather(
            self.row_slots[rows],
            self._new_pages[rows],
            tables.page_table,
            tables.token_table,
            tables.seq_lens,
            tables.draws,
            tables.dummy_slot,
            tables.page_size,
            out,
            self.draws.first(num_rows),
        )


class _Staging:
    """One host copy of what a step is told, and the event behind its latest use."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._memory = torch.empty((2, max_rows), dtype=torch.int64, pin_memory=is_cuda)
        self._host: NDArray[Any] = self._memory.numpy()
        self._slots: Ints | None = None  # that it holds
        self._row_pages = self._host[1, :0]  # of their rows
        self._copied = torch.cuda.Event() if is_cuda else None
        self._stream = torch.cuda.current_stream(device) if is_cuda else None  # of all steps

    def fill(self, slots: Ints, new_pages: Ints | None, dummy_slot: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if slots is not self._slots:
            count = len(slots)
            self._host[0, :count] = slots
            self._host[0, count:] = dummy_slot
            self._host[1, count:] = NO_PAGE
            self._slots, self._row_pages = slots, self._host[1, :count]
        self._row_pages[:] = NO_PAGE if new_pages is None else new_pages

    def copy_to(self, target: torch.Tensor) -> None:
        target.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)


def _gather_operation(device: torch.device) -> Callable[..., None]:
    if device.type != "cuda":
        return gather_decode_reference
    # Triton is not there on every host: it is imported where there is a GPU.
    from srt.kernels.gather_decode import gather_decode

    return gather_decode


def gather_decode_reference(
    row_slots: torch.Tensor,
    new_pages: torch.Tensor,
    page_table: torch.Tensor,
    token_table: torch.Tensor,
    seq_lens: torch.Tensor,
    draws: DrawTables,
    dummy_slot: int,
    page_size: int,
    out: tuple[torch.Tensor, ...],
    row_draws: DrawTables,
) -> None:
    """What the kernel `gather_decode` does, in plain PyTorch."""
    is_real = row_slots != dummy_slot
    positions = seq_lens[row_slots].masked_fill(~is_real, 0)
    columns = positions // page_size
    pages = page_table[row_slots, columns].long()
    pages = torch.where(is_real & (new_pages >= 0), new_pages, pages)
    page_table[row_slots, columns] = pages.to(torch.int32)
    seq_lens[row_slots] = (positions + 1).masked_fill(~is_real, 0)
    gathered = (
        token_table[row_slots, positions].long(),
        positions,
        pages * page_size + positions % page_size,
        positions + 1,
        *(table[row_slots] for table in draws),
    )
    for target, values in zip((*out, *row_draws), gathered, strict=True):
        target.copy_(values)
