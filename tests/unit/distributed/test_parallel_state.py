"""Tensor parallelism: what the collectives promise, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.rendezvous import init_tensor_parallel
from tests.support.ranks import CPU, run_ranks, single_rank

RANK_PROGRAM = """
import sys
import torch
from srt.distributed.rendezvous import init_tensor_parallel

rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tp = init_tensor_parallel(rank, size, rendezvous, "gloo", torch.device("cpu"), timeout_s=60)
with torch.inference_mode():
    total = tp.all_reduce(torch.tensor([1.5, -2.0]) * (rank + 1))
    row = tp.all_gather(torch.tensor([[rank, 10 + rank]]))
print(total.tolist(), row.tolist(), tp.min_int(100 - rank))
tp.close()
"""


def test_two_processes_compute_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK_PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (output, errors) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, errors
        assert output.strip() == "[4.5, -6.0] [[0, 10, 1, 11]] 99"


def test_one_rank_gives_back_what_it_got() -> None:
    tp = init_tensor_parallel(0, 1, "/no/such/place", "gloo", CPU)
    x = torch.randn(3)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x) is x
    assert tp.min_int(7) == 7
    tp.close()
    tp.close()


def test_a_rank_alone_waits_for_nobody_and_hears_itself(tmp_path: Path) -> None:
    def work(tp: TensorParallel) -> list[list[float]]:
        said = []
        if tp.rank == 1:
            with tp.alone():
                said = [
                    tp.all_reduce(torch.tensor([1.0, 2.5])).tolist(),
                    tp.all_gather(torch.tensor([7.0, 8.0])).tolist(),
                ]
        return [*said, tp.all_gather(torch.tensor([float(tp.rank)])).tolist()]

    assert run_ranks(2, tmp_path, work) == [[[0.0, 1.0]], [[2.0, 5.0], [7.0, 8.0, 7.0, 8.0], [0.0, 1.0]]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_added_in_rank_order_and_equal_to_the_bit(size: int, tmp_path: Path) -> None:
    parts = torch.randn(size, 5, 33, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(33)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for result in run_ranks(size, tmp_path, lambda tp: tp.all_reduce(parts[tp.rank])):
        assert torch.equal(result, expected)


def test_low_precision_sums_are_rounded_once(tmp_path: Path) -> None:
    # In bfloat16 256 + 1 is 256: added there, the three ones would vanish.
    parts = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    for result in run_ranks(4, tmp_path, lambda tp: tp.all_reduce(parts[tp.rank].reshape(1))):
        assert result.dtype == torch.bfloat16
        assert result.item() == torch.tensor(259.0, dtype=torch.bfloat16).item()


def test_what_was_given_is_left_as_it_was(tmp_path: Path) -> None:
    def work(tp: TensorParallel) -> torch.Tensor:
        x = torch.full((4,), float(tp.rank + 1))
        tp.all_reduce(x)
        tp.all_gather(x)
        return x

    assert [x[0].item() for x in run_ranks(2, tmp_path, work)] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool])
def test_gathering_keeps_rank_order_along_any_dimension(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    # Slices of columns: not contiguous.
    for result in run_ranks(2, tmp_path, lambda tp: tp.all_gather(whole[:, 3 * tp.rank : 3 * tp.rank + 3])):
        assert torch.equal(result, whole)
    for result in run_ranks(2, tmp_path, lambda tp: tp.all_gather(whole[2 * tp.rank : 2 * tp.rank + 2], dim=0)):
        assert torch.equal(result, whole)


def test_empty_tensors_need_no_peer(tmp_path: Path) -> None:
    def work(tp: TensorParallel) -> tuple[torch.Size, torch.Size]:
        empty = torch.empty(0, 4)
        return tp.all_reduce(empty).shape, tp.all_gather(empty).shape

    assert run_ranks(2, tmp_path, work) == [((0, 4), (0, 8))] * 2


def test_the_least_of_all_ranks_is_agreed_on(tmp_path: Path) -> None:
    values = (2**40, 2**40 - 5, 2**40 + 1)
    assert run_ranks(3, tmp_path, lambda tp: tp.min_int(values[tp.rank])) == [2**40 - 5] * 3


def test_a_rank_alone_gives_up_after_its_timeout(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        init_tensor_parallel(0, 2, str(tmp_path / "rendezvous"), "gloo", CPU, timeout_s=0.2)


def test_a_peer_that_leaves_ends_the_wait(tmp_path: Path) -> None:
    def work(tp: TensorParallel) -> str:
        if tp.rank == 1:
            tp.close()
            return "left"
        with pytest.raises(CollectiveError, match=r"^rank 0 lost the others: "):
            tp.min_int(1)
        return "noticed"

    assert run_ranks(2, tmp_path, work) == ["noticed", "left"]


def test_a_single_rank_has_no_group() -> None:
    with pytest.raises(AssertionError):
        TensorParallel(0, 2, None, CPU)
    assert single_rank().size == 1
