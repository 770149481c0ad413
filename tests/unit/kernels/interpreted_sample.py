"""The draw in Triton's interpreter: the ids and the winning values of the sampler, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from srt.kernels.sampling.draw_rows import DrawRows
from srt.kernels.sampling.sample import BLOCK, draw
from srt.layers.philox import gumbel_noise

NUM_ROWS = 6
MINUS_INF = float("-inf")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def some_rows(has_thresholds: bool = False) -> DrawRows:
    temperatures = torch.rand(NUM_ROWS) * 1.5
    temperatures[::3] = 0
    thresholds = torch.randn(NUM_ROWS).masked_fill(temperatures == 0, MINUS_INF)
    return DrawRows(
        temperatures,
        seeds=torch.randint(-(1 << 62), 1 << 62, (NUM_ROWS,)),
        positions=torch.randint(0, 100_000, (NUM_ROWS,)),
        thresholds=thresholds if has_thresholds else None,
    )


def expected(logits: Tensor, rows: DrawRows, shard_start: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    values = logits.float().clone()
    values[:, max(0, vocab_size - shard_start) :] = MINUS_INF
    noisy = rows.temperatures > 0
    scaled = values[noisy] / rows.temperatures[noisy].unsqueeze(1)
    if rows.thresholds is not None:
        scaled = scaled.masked_fill(scaled < rows.thresholds[noisy].unsqueeze(1), MINUS_INF)
    values[noisy] = scaled + gumbel_noise(rows.seeds[noisy], rows.positions[noisy], shard_start, values.shape[1])
    ids = values.argmax(-1)
    return ids + shard_start, values.gather(1, ids.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_thresholds", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "shard_start", "columns"),
    [(2 * BLOCK + 8, 0, 2 * BLOCK + 9), (7, 0, 7), (9001, 4501, 4501), (9000, 6750, 2251)],
)
def test_each_row_draws_as_the_sampler_says(
    vocab_size: int, shard_start: int, columns: int, has_thresholds: bool, dtype: torch.dtype
) -> None:
    logits = (torch.randn(NUM_ROWS, columns) * 2).to(dtype)
    rows = some_rows(has_thresholds)
    ids, values = draw(logits, rows, shard_start, vocab_size)
    expected_ids, expected_values = expected(logits, rows, shard_start, vocab_size)
    drawable = torch.isfinite(expected_values)
    assert drawable.sum() > NUM_ROWS // 2
    assert torch.equal(values, expected_values)
    assert torch.equal(ids[drawable], expected_ids[drawable])


def test_the_lowest_id_wins_a_tie_even_blocks_apart() -> None:
    logits = torch.zeros(2, 3 * BLOCK)
    logits[:, [BLOCK - 1, BLOCK, 2 * BLOCK + 5]] = 3.0
    ids, _ = draw(logits, DrawRows(torch.zeros(2), torch.zeros(2).long(), torch.zeros(2).long()), 0, 3 * BLOCK)
    assert ids.tolist() == [BLOCK - 1] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_best_draws_nothing_but_an_id_that_exists(temperature: float) -> None:
    logits = torch.randn(4, 3000)
    logits[0, 2999] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = MINUS_INF
    rows = DrawRows(torch.full((4,), temperature), torch.arange(4), torch.arange(4))
    ids, values = draw(logits, rows, 0, 3000)
    assert torch.isfinite(values).tolist() == [False, False, False, True]
    assert ((ids >= 0) & (ids < 3000)).all()


def test_a_shard_of_which_a_filter_leaves_no_token_loses_to_any_other() -> None:
    """As most shards do behind a small top_k; a value that is no number would win, and end the request."""
    temperatures = torch.linspace(0.1, 1.5, NUM_ROWS)
    rows = DrawRows(temperatures, torch.arange(NUM_ROWS), torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), 1000.0))
    logits = torch.randn(NUM_ROWS, BLOCK + 7)
    _, values = draw(logits, rows, shard_start=300, vocab_size=BLOCK + 307)
    assert values.tolist() == [MINUS_INF] * NUM_ROWS


def test_a_shard_of_padding_never_wins() -> None:
    ids, values = draw(torch.zeros(NUM_ROWS, 100), some_rows(), shard_start=300, vocab_size=290)
    assert not torch.isfinite(values).any()
    assert (ids < 290).all()
