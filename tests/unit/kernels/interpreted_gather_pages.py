"""The gathering of pages in Triton's interpreter, against its reference."""

from __future__ import annotations

import torch

from srt.kernels.attention.gather_pages import gather_pages
from tests.support.attention_reference import gather_pages_reference


def test_pages_of_rows_follow_each_other() -> None:
    page_table = torch.randint(0, 1000, (6, 700), dtype=torch.int32)
    slots = torch.tensor([4, 0, 5, 4])
    indptr = torch.tensor([0, 1, 601, 601, 857], dtype=torch.int32)
    out = torch.full((900,), -1, dtype=torch.int32)
    gather_pages(page_table, slots, indptr, 600, out)
    assert torch.equal(out[:857], gather_pages_reference(page_table, slots, indptr))
    assert (out[857:] == -1).all()


def test_the_first_page_of_a_window_stands_in_for_those_before_it() -> None:
    page_table = torch.arange(20, dtype=torch.int32).view(2, 10)
    out, indptr = torch.full((7,), -1, dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
    gather_pages(page_table, torch.tensor([1, 0]), indptr, 4, out, torch.tensor([2, 0], dtype=torch.int32))
    assert out.tolist() == [12, 12, 12, 13, 0, 1, 2]


def test_no_rows_gather_nothing() -> None:
    out = torch.full((3,), -1, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    gather_pages(torch.zeros(2, 2, dtype=torch.int32), none, torch.zeros(1, dtype=torch.int32), 0, out)
    assert (out == -1).all()
