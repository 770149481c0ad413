"""The kernels of experts in Triton's interpreter, against their operations in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from srt.kernels.moe import expert_gemm, expert_tiles
from srt.kernels.moe.expert_gemm import ExpertGemmTiles, ProductTiles, multiply_experts
from srt.kernels.moe.expert_tiles import ExpertTiles
from srt.layers.moe.expert_kernels import ExpertKernels
from srt.layers.moe.expert_ops import TORCH_EXPERT_OPS, Choice, ExpertWeights, Router, choose
from srt.utils.layer_spec import Routing
from tests.support.packed_experts import PACKED_FORMS, meant_by, packed_experts

SMALL = ExpertGemmTiles(16, ProductTiles(16, 32, 4, 1), ProductTiles(32, 16, 4, 1))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


ROUTINGS = [
    (1, Routing(16, 3)),
    (5, Routing(6, 3, is_renormalised=False, has_bias=True)),
    (9, Routing(12, 3, is_renormalised=False, num_groups=4, num_chosen_groups=2, num_group_scores=1, scale=16.0)),
    (9, Routing(12, 3, "sigmoid", num_groups=4, num_chosen_groups=2, scale=2.5, has_correction=True)),
]


@pytest.mark.parametrize(("num_rows", "routing"), ROUTINGS)
def test_tokens_get_their_best_experts(num_rows: int, routing: Routing) -> None:
    x, weight = torch.randn(num_rows, 40), torch.randn(routing.num_experts, 40)
    bias, correction = torch.randn(2, routing.num_experts)
    router = Router(routing, weight, bias if routing.has_bias else None, correction if routing.has_correction else None)
    got, expected = (ops.route(x, router) for ops in (ExpertKernels(), TORCH_EXPERT_OPS))
    assert torch.equal(got.ids.long(), expected.ids)
    torch.testing.assert_close(got.weights, expected.weights)


@pytest.mark.parametrize(
    ("num_tokens", "most_counted"),
    [(1, expert_tiles.MOST_COUNTED_PAIRS), (40, expert_tiles.MOST_COUNTED_PAIRS), (40, 0)],
)
def test_tiles_hold_every_pair_once_beside_those_of_its_expert(
    num_tokens: int, most_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0 and 4 have no tokens, and expert 2 has most."""
    monkeypatch.setattr(expert_tiles, "MOST_COUNTED_PAIRS", most_counted)
    ids = torch.tensor([1, 2, 2, 3, 2, 5, 6])[torch.randint(7, (num_tokens, 2))].int()
    load = torch.tensor([5] * 7 + [1, 1])
    tiles = ExpertTiles.sort(ids, 7, 16, load)
    counts = torch.bincount(ids.flatten(), minlength=7)
    assert load.tolist() == [*(5 + counts).tolist(), 1 + int((counts > 0).sum()), 2]
    assert tiles.pairs.tolist() == ids.flatten().argsort(stable=True).tolist()
    covered: list[int] = []
    for expert, first, end in zip(*(part.tolist() for part in (tiles.experts, tiles.firsts, tiles.ends)), strict=True):
        assert end - first <= 16
        rows = list(range(first, end))
        assert all(ids.flatten()[tiles.pairs[row]] == expert for row in rows)
        covered += rows
    assert covered == list(range(2 * num_tokens))


@pytest.mark.parametrize(("dtype", "tolerance", "limit"), [(torch.float32, 1e-5, 2.0), (torch.bfloat16, 1.5e-2, None)])
def test_products_are_those_of_each_tokens_experts(dtype: torch.dtype, tolerance: float, limit: float | None) -> None:
    """Neither the features of an expert nor the hidden size fill the last tile. With a limit there are biases."""
    x = torch.randn(14, 40).to(dtype)
    gate_up, down = torch.randn(5, 2 * 20, 40).to(dtype), torch.randn(5, 40, 20).to(dtype)
    gate_up_bias = None if limit is None else torch.randn(5, 2 * 20).to(dtype)
    down_bias = None if limit is None else torch.randn(5, 40).to(dtype)
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, limit)
    choice = choose(torch.randn(14, 5), Routing(5, 2))
    wide = ExpertWeights(
        gate_up.float(),
        down.float(),
        None if gate_up_bias is None else gate_up_bias.float(),
        None if down_bias is None else down_bias.float(),
        limit,
    )
    expected = TORCH_EXPERT_OPS.multiply(x.float(), choice, wide)

    def product(ids: Tensor, factors: Tensor) -> Tensor:
        return multiply_experts(x, ids.int(), factors, weights, SMALL)

    assert error_of(product(choice.ids, choice.weights), expected) < tolerance
    assert torch.equal(product(choice.ids, choice.weights), product(choice.ids, choice.weights))
    assert error_of(product((choice.ids + 1) % 5, choice.weights), expected) > 0.1, "an expert's rows shifted by one"
    lost = choice.weights.clone()
    lost[-1, -1] = 0.0
    assert error_of(product(choice.ids, lost), expected) > 2 * tolerance, "a weight of the choice lost"
    assert ExpertKernels().multiply(x[:0], Choice(choice.ids[:0], choice.weights[:0]), weights).shape == (0, 40)


@pytest.mark.parametrize("kind", PACKED_FORMS)
def test_quantised_weights_are_multiplied_as_what_they_stand_for(kind: str) -> None:
    """The last tile of inputs is not full. Those of both products differ in what they hold of a group."""
    hidden, size = 160, 96
    gate_up, down = packed_experts(kind, 3, 2 * size, hidden), packed_experts(kind, 3, hidden, size)
    x, choice = torch.randn(5, hidden), choose(torch.randn(5, 3), Routing(3, 2))
    expected = TORCH_EXPERT_OPS.multiply(x, choice, ExpertWeights(meant_by(gate_up), meant_by(down)))
    tiles = ExpertGemmTiles(16, ProductTiles(64, 128, 4, 1), ProductTiles(64, 32, 4, 1))
    weights = ExpertWeights(gate_up, down)
    assert error_of(multiply_experts(x, choice.ids.int(), choice.weights, weights, tiles), expected) < 1e-5


def test_tiles_are_chosen_for_every_number_of_rows() -> None:
    chosen = [expert_gemm.ExpertGemmTiles.choose(8 * rows, 128, 2).block_m for rows in (1, 64, 256, 600, 8192)]
    assert chosen == [16, 16, 32, 64, 128]
