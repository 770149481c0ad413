"""The copying of keys and values out of their pages in Triton's interpreter, against indexing."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.attention.gather_kv import gather_kv
from srt.kernels.attention.paged_kv import PagedKV


@pytest.mark.parametrize(("page_size", "heads", "first", "count"), [(16, 2, 0, 2), (1, 3, 1, 1), (7, 6, 2, 4)])
def test_rows_follow_each_other(page_size: int, heads: int, first: int, count: int) -> None:
    lengths, head_dim = [1, 40, 0, 33], 8
    page_table = torch.randperm(6 * 48, dtype=torch.int32).view(6, 48)
    keys, values = (torch.randn(6 * 48 * page_size, heads, head_dim) for _ in range(2))
    slots = torch.tensor([4, 0, 5, 1])
    indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    k, v = (torch.full((sum(lengths) + 3, count, head_dim), float("nan")) for _ in range(2))
    gather_kv(PagedKV(keys, values, page_table, page_size), first, slots, indptr, max(lengths), k, v)
    for slot, length, begin in zip(slots.tolist(), lengths, indptr.tolist(), strict=False):
        positions = torch.arange(length)
        places = page_table[slot].long()[positions // page_size] * page_size + positions % page_size
        for got, stored in ((k, keys), (v, values)):
            assert torch.equal(got[begin : begin + length], stored[places, first : first + count])
    assert k[sum(lengths) :].isnan().all()
    assert v[sum(lengths) :].isnan().all()


def test_numbers_of_another_type_are_multiplied_by_their_scales() -> None:
    keys, values = (torch.randn(32, 2, 16).half() for _ in range(2))
    kv = PagedKV(keys, values, torch.tensor([[1, 0]], dtype=torch.int32), 16, 0.5, 3.0)
    k, v = (torch.empty(20, 2, 16) for _ in range(2))
    gather_kv(kv, 0, torch.tensor([0]), torch.tensor([0, 20], dtype=torch.int32), 20, k, v)
    places = torch.tensor([*range(16, 32), *range(4)])
    assert torch.equal(k, keys[places].float() * 0.5)
    assert torch.equal(v, values[places].float() * 3.0)
