"""Drafts by repetition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.speculative.drafter import DraftRows
from srt.speculative.ngram import NgramDrafter, find_repetition


@pytest.mark.parametrize(
    ("ids", "least", "longest", "place"),
    [
        ([1, 2, 3, 9, 1, 2], 2, 12, 1),
        ([1, 2, 3, 9, 4, 2], 2, 12, None),  # only one token repeats
        ([1, 2, 3, 9, 4, 2], 1, 12, 1),
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, 12, 2),  # three tokens repeat there, two later on
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, 2, 6),  # two are compared, so the later one is as good
        ([4, 4, 4, 4], 2, 12, 2),
        ([5], 1, 12, None),
    ],
)
def test_the_longest_repetition_is_found(ids: list[int], least: int, longest: int, place: int | None) -> None:
    assert find_repetition(np.array(ids, np.int32), least, longest) == place


def test_what_followed_is_drafted_and_goes_on_with_itself() -> None:
    table = torch.zeros((3, 20), dtype=torch.int32)
    table[1, :6] = torch.tensor([1, 2, 3, 9, 1, 2])
    table[2, :4] = torch.tensor([5, 6, 5, 6])
    drafter = NgramDrafter(table, 2, 12)
    rows = DraftRows(np.array([1, 0, 2]), np.array([5, 3, 3]), np.array([3, 0, 5]))
    assert drafter.draft(rows).tolist() == [3, 0, 5]
    assert table[1, 6:10].tolist() == [3, 9, 1, 0]
    assert table[2, 4:10].tolist() == [5, 6, 5, 6, 5, 0]
