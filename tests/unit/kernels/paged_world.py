"""A small paged KV memory for the tests of kernels and backends: shuffled pages, and NaN wherever nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from srt.kernels.attention.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class PagedWorld:
    """Requests of the given lengths, in shuffled slots, with shuffled pages; the rest of the memory is NaN."""

    kv: PagedKV
    req_pool_indices: torch.Tensor  # [requests]
    seq_lens: torch.Tensor  # [requests]


def make_paged_world(
    lengths: list[int], num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, seed: int = 0
) -> PagedWorld:
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_of) + 3
    free_pages = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    page_table = torch.full((len(lengths) + 2, max(pages_of, default=0) + 1), 2**30, dtype=torch.int32)
    k_buffer = torch.full((num_pages * page_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    v_buffer = k_buffer.clone()
    taken = 0
    for slot, length, num in zip(slots.tolist(), lengths, pages_of, strict=True):
        page_table[slot, :num] = free_pages[taken : taken + num]
        taken += num
        positions = torch.arange(length)
        locations = page_table[slot, positions // page_size].long() * page_size + positions % page_size
        for buffer in (k_buffer, v_buffer):
            buffer[locations] = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
    kv = PagedKV(k_buffer=k_buffer, v_buffer=v_buffer, page_table=page_table, page_size=page_size)
    return PagedWorld(kv=kv, req_pool_indices=slots, seq_lens=torch.tensor(lengths))
