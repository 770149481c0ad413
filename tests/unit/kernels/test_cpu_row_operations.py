"""What compiled code does for the rows of a step on a CPU is what PyTorch's operations do, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.kernels.build import cpu_library
from srt.kernels.cpu.row_operations import RowOperations, operations_of
from srt.kernels.sampling.draw_rows import DrawRows
from srt.layers.sampler import draw_from_shard
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.model_executor.step.draw_store import store_draws_reference
from srt.model_executor.step.input_buffers import gather_decode_reference

pytestmark = pytest.mark.skipif(
    not cpu_library.is_supported(), reason="this processor has no AVX2, so PyTorch runs the steps"
)

CPU = torch.device("cpu")
INF = float("inf")


@pytest.fixture(scope="module")
def operations(cpu_kernels: Path) -> RowOperations:
    return operations_of(cpu_library.open_library(cpu_kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first_token", [0, 30, 510])
def test_draws_are_the_same_ids_and_values(operations: RowOperations, dtype: torch.dtype, first_token: int) -> None:
    generator = torch.Generator().manual_seed(first_token)
    count = 160
    logits = (torch.randn((count, 509), generator=generator) * 4).to(dtype)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
    positions = torch.randint(0, 1 << 31, (count,), generator=generator)
    temperatures = torch.tensor([0.0, 1e-6, 0.1, 0.6, 1.0, 2.0, 50.0, 1.0]).repeat(count // 8)
    thresholds = torch.tensor([-INF] * 7 + [1.0]).repeat(count // 8)
    for rows in (DrawRows(temperatures, seeds, positions), DrawRows(temperatures, seeds, positions, thresholds)):
        expected = draw_from_shard(logits, rows, first_token, 900)
        drawn = operations.draw(logits, rows, first_token, 900)
        assert torch.equal(drawn[0], expected[0])
        assert torch.equal(drawn[1], expected[1])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_values_that_are_not_finite_win_as_they_do_in_pytorch(operations: RowOperations, temperature: float) -> None:
    nan = float("nan")
    logits = torch.tensor([[-INF] * 8, [0.0, nan, 3.0, nan] * 2, [INF, 1.0, INF, -INF] * 2, [-INF] * 7 + [2.0]])
    rows = DrawRows(torch.full((4,), temperature), torch.arange(4), torch.arange(4))
    (ids, values), (expected_ids, expected) = operations.draw(logits, rows, 0, 8), draw_from_shard(logits, rows, 0, 8)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


def test_rows_are_looked_up_alike_with_new_pages_and_padding(operations: RowOperations) -> None:
    results = []
    for gather in (gather_decode_reference, operations.gather):
        generator = torch.Generator().manual_seed(1)
        tables = ReqToTokenPool(6, 40, 20, 4, CPU)
        tables.page_table.copy_(torch.randint(0, 20, tables.page_table.shape, generator=generator))
        tables.token_table.copy_(torch.randint(0, 500, tables.token_table.shape, generator=generator))
        tables.seq_lens[:6] = torch.tensor([4, 7, 8, 0, 39, 12])
        for table in tables.draws:
            table.copy_(torch.randint(0, 50, table.shape, generator=generator))
        slots = torch.tensor([5, 0, 2, tables.dummy_slot, tables.dummy_slot])
        words = torch.zeros((8, 7), dtype=torch.int64)
        last = torch.tensor([(1 << 16) + 10])  # the next store has the number 11 of 2^16
        words[3, :5] = torch.tensor([11 << 40 | 17, 10 << 40 | 3, 11 << 40 | 9, 11 << 40 | 1, 0])
        out = tuple(torch.full((5,), -7) for _ in range(4))
        row_draws = type(tables.draws)(*(torch.empty(5, dtype=table.dtype) for table in tables.draws))
        gather(
            slots, words, last, tables.page_table, tables.token_table, tables.seq_lens, tables.draws,
            tables.dummy_slot, 4, (40, 16), out, row_draws,
        )  # fmt: skip
        results.append([*out, *row_draws, tables.page_table, tables.seq_lens])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_draws_are_stored_alike(operations: RowOperations) -> None:
    results = []
    for store in (store_draws_reference, operations.store):
        tokens, words, last = (
            torch.zeros((4, 9), dtype=torch.int32),
            torch.zeros((8, 5), dtype=torch.int64),
            torch.tensor([6]),
        )
        for number in range(3):
            ids, values = torch.tensor([number, 500, 7]), torch.tensor([1.0, float("nan"), -INF if number else 2.0])
            assert store(ids, values, torch.tensor([3, 0, 1]), torch.tensor([number, 8, 2]), tokens, words, last)
        results.append((tokens, words, last))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
