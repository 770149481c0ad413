"""Device memory of a worker: each slot's pages and tokens, and the keys and values of every layer.

Flat location of a position: ``page_table[slot, position // page_size] * page_size + position % page_size``.
Pages 0 … num_pages - 1 belong to requests; page `num_pages` is the dummy page, where padding rows read and write.
"""

from __future__ import annotations

import math

import numpy as np
import torch


class ReqToTokenPool:
    """The tables that a batch is gathered from, one row per slot; slot `num_slots` is the dummy of padding rows.

    `page_table` [slots + 1, max_pages] int32: the slot's pages in order; entries past its last page mean nothing.
    `token_table` [slots + 1, max_request_tokens + 1] int32: the slot's tokens by position, prompt and sampled alike.
    `seq_lens` [slots + 1] int64: positions whose keys and values were computed, or are by the steps enqueued so far.

    All writes are enqueued on the compute stream, so that steps in flight never see a row change under them.
    """

    def __init__(
        self, num_slots: int, max_request_tokens: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_pages = -(-(max_request_tokens + 1) // page_size)
        rows = num_slots + 1
        self.page_table = torch.full((rows, self.max_pages), num_pages, dtype=torch.int32, device=device)
        self.token_table = torch.zeros((rows, max_request_tokens + 1), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def dummy_slot(self) -> int:
        return self.num_slots

    def locations(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat KV locations (int64) of these positions of these slots; the two broadcast against each other."""
        pages = self.page_table[slots, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def tokens(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The token ids (int64) at these positions of these slots."""
        return self.token_table[slots, positions].long()

    def write_pages(self, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
        """Entry i: page `pages[i]` is number `columns[i]` of slot `slots[i]`. All int64."""
        self.page_table[slots, columns] = pages.to(torch.int32)

    def write_tokens(self, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        self.token_table[slots, positions] = ids.to(torch.int32)

    def clear(self) -> None:
        """As new."""
        self.page_table.fill_(self.num_pages)
        self.token_table.zero_()
        self.seq_lens.zero_()


class MHATokenToKVPool:
    """Keys and values of all layers by flat location: `num_pages` pages and the dummy page behind them."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = ((num_pages + 1) * page_size, num_kv_heads, head_dim)
        # Zeros, not whatever was there: a masked score still multiplies the value behind it.
        self.k_buffer = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v_buffer = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def set_kv(self, layer_id: int, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store row i of k and v ([tokens, kv_heads, head_dim]) at `locations[i]`, in the memory's dtype."""
        k_buffer, v_buffer = self.k_buffer[layer_id], self.v_buffer[layer_id]
        k_buffer.index_copy_(0, locations, k.to(k_buffer.dtype))
        v_buffer.index_copy_(0, locations, v.to(v_buffer.dtype))

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's whole memory: two tensors [locations, kv_heads, head_dim]."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU pages of zeros that the kernel makes at their first use: to write gigabytes of them at the start takes seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
