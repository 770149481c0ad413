"""The paged KV memory of one layer, in the form that all attention kernels and their references take."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one layer, and the table that locates a request's tokens in them.

    Position p of the request in slot s lies at the flat location
    ``page_table[s, p // page_size] * page_size + p % page_size``.
    """

    k_buffer: torch.Tensor  # [locations, kv_heads, head_dim], the last dimension contiguous
    v_buffer: torch.Tensor  # as k_buffer
    page_table: torch.Tensor  # [slots, max_pages], int32
    page_size: int
    k_scale: float = 1.0  # factor to apply to stored keys; 1 unless they are stored in fp8
    v_scale: float = 1.0

    @property
    def num_kv_heads(self) -> int:
        return self.k_buffer.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k_buffer.shape[2]


def check_queries(q: torch.Tensor, out: torch.Tensor, kv: PagedKV) -> int:
    """Check queries and results [tokens, heads, head_dim] against the memory, and return how many query heads share a KV head."""
    _, num_heads, head_dim = q.shape
    group = num_heads // kv.num_kv_heads
    assert group * kv.num_kv_heads == num_heads, (num_heads, kv.num_kv_heads)
    assert kv.page_table.stride(1) == 1, kv.page_table.stride()
    check_heads(q, num_heads, head_dim)
    check_heads(out, num_heads, head_dim)
    check_heads(kv.k_buffer, kv.num_kv_heads, head_dim)
    check_heads(kv.v_buffer, kv.num_kv_heads, head_dim)
    return group


def check_heads(tensor: torch.Tensor, num_heads: int, head_dim: int) -> None:
    """Assert the kernels' layout: [tokens, heads, head_dim], each token's elements contiguous, tokens any stride apart."""
    assert tensor.shape[1:] == (num_heads, head_dim), (tuple(tensor.shape), num_heads, head_dim)
    assert tensor.stride(2) == 1, tensor.stride()
    assert num_heads == 1 or tensor.stride(1) == head_dim, tensor.stride()
