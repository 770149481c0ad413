"""The fixed device memory that steps in which every row decodes read and write, so that graphs can hold them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from srt.kernels.cpu.row_operations import row_operations
from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool
from srt.model_executor.step.draw_store import DrawStore
from srt.model_executor.step.page_mailbox import NUMBER_BITS, PAGE_BITS, PageMailbox
from srt.model_executor.step.slot_mirror import Ints, NewPages


class GraphInputBuffers:
    """The inputs of a decode step. The host sends slots, and new pages through a PageMailbox; the device gathers the rest from the tables.

    `row_slots` [max_rows] int64 is padded with the dummy slot. After a step's rows the other arrays hold padding, tokens of the dummy slot:
    its length never changes, and it writes to the dummy page.
    """

    def __init__(
        self,
        tables: ReqToTokenPool,
        max_rows: int,
        device: torch.device,
        window: int,
        draw_store: DrawStore,
        pp_proxy_tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """`pp_proxy_tensors` [max_rows, ...] are what the stage before sends; None if there is none."""
        assert tables.num_pages < 1 << PAGE_BITS, f"{tables.num_pages} pages do not fit in {PAGE_BITS} bits"
        self.max_rows = max_rows
        self.pp_proxy_tensors = pp_proxy_tensors or {}
        self._tables = tables
        self._mailbox = PageMailbox(draw_store, max_rows, device)
        self._window_mailboxes = [PageMailbox(draw_store, max_rows, device) for _ in tables.windows]
        self._last_store = draw_store.last
        self.row_slots = torch.full((max_rows,), tables.dummy_slot, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.out_cache_loc, self.seq_lens = (
            torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.window_locations = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in tables.windows]
        self.draws = DrawTables(*(torch.empty(max_rows, dtype=table.dtype, device=device) for table in tables.draws))
        self.draws.clear()
        self._staging = [_Staging(max_rows, device) for _ in range(1 if device.type == "cpu" else window + 1)]
        self._next = 0
        self._staged_slots: Ints | None = None  # the contents of `row_slots`
        self._gather, self._gather_window = _gather_operations(device)

    def stage(self, slots: Ints, new_pages: NewPages | None) -> bool:
        """Send the next step's slots and new pages. Returns whether the slots were copied, which they are only if they have changed.

        The caller must not write to `slots` afterwards, because the same array is taken to have the same contents.
        """
        if new_pages is not None:
            self._mailbox.write(new_pages.rows, new_pages.pages)
            for mailbox, pages in zip(self._window_mailboxes, new_pages.window_pages, strict=True):
                mailbox.write(new_pages.rows, pages)
        told, self._staged_slots = self._staged_slots, slots
        if slots is told or (told is not None and slots.tobytes() == told.tobytes()):
            return False
        staging = self._staging[self._next]
        self._next = (self._next + 1) % len(self._staging)
        staging.copy(slots, self._tables.dummy_slot, self.row_slots)
        return True

    def stage_padding(self) -> None:
        """Send no slots, so that the next step is all padding and leaves the tables unchanged."""
        self.stage(np.zeros(0, np.int64), None)

    def enter_pages(self, slots: Ints, seq_lens: Ints, new_pages: NewPages) -> None:
        """Write the new pages to the page table now, for backends that read it before `gather`, which writes them again."""
        rows, device = np.array(new_pages.rows), self.row_slots.device
        pages, num_groups = [new_pages.pages, *new_pages.window_pages], 1 + len(new_pages.window_pages)
        columns, groups = (seq_lens[rows] - 1) // self._tables.page_size, np.repeat(np.arange(num_groups), len(rows))
        entries = np.tile(slots[rows], num_groups), np.tile(columns, num_groups), np.concatenate(pages), groups
        entered = torch.from_numpy(np.stack(entries))
        if device.type == "cuda":
            entered = entered.pin_memory()  # an unpinned copy might wait for the device
        self._tables.write_pages(*entered.to(device, non_blocking=True))

    def gather(self, num_rows: int) -> None:
        """Write new pages to the page table, look up the first `num_rows` rows, and make their slots one position longer."""
        rows = slice(0, num_rows)
        out = (self.input_ids[rows], self.positions[rows], self.out_cache_loc[rows], self.seq_lens[rows])
        tables = self._tables
        self._gather(
            self.row_slots[rows],
            self._mailbox.words,
            self._last_store,
            tables.page_table,
            tables.token_table,
            tables.seq_lens,
            tables.draws,
            tables.dummy_slot,
            tables.page_size,
            (PAGE_BITS, NUMBER_BITS),
            out,
            self.draws.first(num_rows),
        )
        for mailbox, locations, table in zip(
            self._window_mailboxes, self.window_locations, tables.page_tables[1:], strict=True
        ):
            self._gather_window(
                self.row_slots[rows],
                mailbox.words,
                self._last_store,
                table,
                self.positions[rows],
                tables.dummy_slot,
                tables.page_size,
                (PAGE_BITS, NUMBER_BITS),
                locations[rows],
            )


class _Staging:
    """A pinned copy of a step's slots, and the event recorded after its latest use."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._memory = torch.empty(max_rows, dtype=torch.int64, pin_memory=is_cuda)
        self._host: Ints = self._memory.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None
        self._stream = torch.cuda.current_stream(device) if is_cuda else None  # the stream of all steps

    def copy(self, slots: Ints, dummy_slot: int, target: torch.Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._host[: len(slots)] = slots
        self._host[len(slots) :] = dummy_slot
        target.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)


def _gather_operations(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    if device.type != "cuda":
        compiled = row_operations()
        return gather_decode_reference if compiled is None else compiled.gather, gather_window_reference
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.kernels.elementwise.gather_decode import gather_decode
    from srt.kernels.elementwise.gather_window import gather_window

    return gather_decode, gather_window


def gather_window_reference(
    row_slots: torch.Tensor,
    page_words: torch.Tensor,
    last_store: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    dummy_slot: int,
    page_size: int,
    word_bits: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Do what the kernel `gather_window` does, in plain PyTorch."""
    columns, (page_bits, number_bits) = positions // page_size, word_bits
    number = int(last_store) + 1
    words = page_words[number % len(page_words), : len(row_slots)]
    begins = (row_slots != dummy_slot) & (words >> page_bits == number % (1 << number_bits))
    pages = page_table[row_slots, columns].long()
    pages = torch.where(begins, words & ((1 << page_bits) - 1), pages)
    page_table[row_slots, columns] = pages.to(torch.int32)
    out.copy_(pages * page_size + positions % page_size)


def gather_decode_reference(
    row_slots: torch.Tensor,
    page_words: torch.Tensor,
    last_store: torch.Tensor,
    page_table: torch.Tensor,
    token_table: torch.Tensor,
    seq_lens: torch.Tensor,
    draws: DrawTables,
    dummy_slot: int,
    page_size: int,
    word_bits: tuple[int, int],
    out: tuple[torch.Tensor, ...],
    row_draws: DrawTables,
) -> None:
    """Do what the kernel `gather_decode` does, in plain PyTorch."""
    is_real = row_slots != dummy_slot
    positions = seq_lens[row_slots].masked_fill(~is_real, 0)
    columns = positions // page_size
    page_bits, number_bits = word_bits
    number = int(last_store) + 1
    words = page_words[number % len(page_words), : len(row_slots)]
    begins = is_real & (words >> page_bits == number % (1 << number_bits))
    pages = page_table[row_slots, columns].long()
    pages = torch.where(begins, words & ((1 << page_bits) - 1), pages)
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
