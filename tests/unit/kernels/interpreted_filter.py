"""The filters in Triton's interpreter: what the sampler's sorting says, without sorting."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.sampling import filter as filter_kernels
from srt.layers import sampler
from srt.sampling.no_filter import NO_TOP_K, NO_TOP_P

SPECS = [
    (20, NO_TOP_P, 0.0),
    (1, NO_TOP_P, 0.0),
    (NO_TOP_K, 0.95, 0.0),
    (NO_TOP_K, 0.001, 0.0),
    (NO_TOP_K, NO_TOP_P, 0.1),
    (NO_TOP_K, NO_TOP_P, 1.0),
    (50, 0.9, 0.01),
    (NO_TOP_K, 0.9, 0.05),
    (NO_TOP_K, 0.3, 0.0001),
    (NO_TOP_K, 1 - 1e-10, 0.0),
    (2000, 0.7, 0.0),
]


@pytest.mark.parametrize(
    ("vocab_size", "spread", "room"),
    [(2500, 2.0, 1024), (2500, 0.3, 512), (2500, 6.0, 256), (300, 2.0, 512)],
    ids=["near the best", "too many near the best", "far from the best", "a small vocabulary"],
)
def test_the_same_tokens_pass_as_by_sorting(
    vocab_size: int, spread: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_kernels, "ROOM", room)
    torch.manual_seed(0)
    num_rows = len(SPECS) + 2
    logits = (torch.randn(num_rows, vocab_size) * spread).bfloat16().float()  # with ties
    logits[4] = 1.0
    logits[7, ::2] = float("-inf")
    rows = torch.randperm(num_rows)[: len(SPECS)]
    temperatures = torch.rand(len(SPECS)) + 0.3
    top_ks, *others = zip(*SPECS, strict=True)
    top_ps, min_ps = (torch.tensor(values, dtype=torch.float64) for values in others)
    arguments = (logits, rows, temperatures, torch.tensor(top_ks), top_ps, min_ps)

    expected = sampler.filter_thresholds(*arguments)
    got = filter_kernels.filter_thresholds(*arguments)
    assert torch.isneginf(got[[row for row in range(num_rows) if row not in rows.tolist()]]).all()
    scaled = logits[rows] / temperatures.unsqueeze(1)
    assert torch.equal(scaled >= got[rows].unsqueeze(1), scaled >= expected[rows].unsqueeze(1))


def test_without_a_list_all_rows_count_and_greedy_ones_are_left_alone() -> None:
    logits = torch.randn(3, 300).bfloat16()
    top_ks, top_ps = torch.tensor([5, 5, NO_TOP_K]), torch.full((3,), NO_TOP_P, dtype=torch.float64)
    arguments = (logits, None, torch.tensor([0.7, 0.0, 0.7]), top_ks, top_ps, torch.zeros(3, dtype=torch.float64))
    thresholds = filter_kernels.filter_thresholds(*arguments)
    assert thresholds[1:].tolist() == [float("-inf")] * 2
    assert thresholds[0] == sampler.filter_thresholds(*arguments)[0]


def test_a_row_without_a_finite_best_has_no_threshold() -> None:
    logits = torch.full((2, 100), float("-inf"))
    logits[1, 3] = float("inf")
    one = torch.ones(2)
    thresholds = filter_kernels.filter_thresholds(
        logits, torch.arange(2), one, torch.tensor([5, 5]), 0.9 * one.double(), 0 * one.double()
    )
    assert torch.isneginf(thresholds).all()
