"""The kernels of experts in Triton's interpreter, against their operations in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.kernels.moe import expert_gemm, expert_tiles
from srt.kernels.moe.expert_gemm import (
    ExpertGemmTiles,
    OwnChoices,
    ProductTiles,
    add_choices,
    add_choices_and_norm,
    multiply_choices,
    multiply_experts,
)
from srt.kernels.moe.expert_tiles import ExpertTiles
from srt.kernels.moe.few_tokens import FewTiles, multiply_few, tiles_of_few
from srt.kernels.moe.rounded_experts import RoundedTiles, multiply_rounded
from srt.kernels.moe.route import choose_experts, router_logits
from srt.layers.moe.expert_kernels import ExpertKernels
from srt.layers.moe.expert_ops import TORCH_EXPERT_OPS, Choice, ExpertWeights, Router, SharedMatrices, choose
from srt.utils.layer_spec import Routing
from tests.support.packed_experts import PACKED_FORMS, meant_by, packed_experts

CPU = torch.device("cpu")
SMALL = ExpertGemmTiles(16, ProductTiles(16, 32, 4, 1), ProductTiles(32, 16, 4, 1))
SWAPPED = ExpertGemmTiles(16, ProductTiles(16, 32, 4, 1, True), ProductTiles(32, 16, 4, 1, True))


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
    (40, Routing(20, 3, is_renormalised=False, has_bias=True)),
    (40, Routing(24, 3, "sigmoid", num_groups=4, num_chosen_groups=2, scale=2.5, has_correction=True)),
]


@pytest.mark.parametrize(("num_rows", "routing"), ROUTINGS)
def test_tokens_get_their_best_experts(num_rows: int, routing: Routing) -> None:
    x, weight = torch.randn(num_rows, 40), torch.randn(routing.num_experts, 40)
    bias, correction = torch.randn(2, routing.num_experts)
    router = Router(routing, weight, bias if routing.has_bias else None, correction if routing.has_correction else None)
    expected = TORCH_EXPERT_OPS.route(x, router)
    logits = router_logits(x, weight, router.bias)
    for got in (ExpertKernels(CPU).route(x, router), Choice(*choose_experts(logits, routing, router.correction))):
        assert torch.equal(got.ids.long(), expected.ids)
        torch.testing.assert_close(got.weights, expected.weights)


def test_the_first_of_equal_experts_is_chosen_whatever_their_sign() -> None:
    """Corrections make ranks negative; two experts are the same."""
    routing = Routing(6, 3, "sigmoid", has_correction=True)
    logits = torch.tensor([[0.0, 1.0, 1.0, -2.0, 0.5, 1.0]])
    ids, weights = choose_experts(logits, routing, torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0, -1.0]))
    assert ids.tolist() == [[3, 1, 2]]
    scores = logits.sigmoid()[0, [3, 1, 2]]
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_rows_are_normed_before_they_are_routed() -> None:
    x, norm_weight, routing = torch.randn(3, 40), torch.randn(40), Routing(6, 2)
    router, kernels = Router(routing, torch.randn(6, 40)), ExpertKernels(CPU)
    expected = torch.nn.functional.rms_norm(x, (40,), norm_weight, 1e-3)
    for _ in range(2):  # the second time shows that the first has left the counters as they were
        normed, choice = kernels.route_rows(x, router, norm_weight, 1e-3)
        torch.testing.assert_close(normed, expected)
        assert torch.equal(choice.ids.long(), TORCH_EXPERT_OPS.route(expected, router).ids)


@pytest.mark.parametrize(
    ("num_tokens", "most_counted"),
    [
        (1, expert_tiles.MOST_COUNTED_PAIRS),
        *((num, most) for num in (40, 300) for most in (expert_tiles.MOST_COUNTED_PAIRS, 0)),
    ],
)
def test_tiles_hold_every_pair_once_beside_those_of_its_expert(
    num_tokens: int, most_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0 and 4 have no tokens, and expert 2 has most."""
    monkeypatch.setattr(expert_tiles, "MOST_COUNTED_PAIRS", most_counted)
    monkeypatch.setattr(expert_tiles, "_BLOCK_PAIRS", 16)
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


@pytest.mark.parametrize("most_counted", [0, expert_tiles.MOST_COUNTED_PAIRS])
@pytest.mark.parametrize("num_experts", [7, 8])
def test_pairs_of_no_expert_come_last(num_experts: int, most_counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_tiles, "MOST_COUNTED_PAIRS", most_counted)
    monkeypatch.setattr(expert_tiles, "_BLOCK_PAIRS", 16)
    ids = torch.randint(num_experts + 1, (50, 1)).int()
    tiles = ExpertTiles.sort(ids, num_experts, 16)
    assert tiles.pairs.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert int((tiles.ends - tiles.firsts).clamp(min=0).sum()) == int((ids < num_experts).sum())


@pytest.mark.parametrize(
    ("num_tokens", "tiles"), [(14, SMALL), (14, SWAPPED), (3, None)], ids=["tiles", "swapped", "few"]
)
@pytest.mark.parametrize(("dtype", "tolerance", "limit"), [(torch.float32, 1e-5, 2.0), (torch.bfloat16, 1.5e-2, None)])
def test_products_are_those_of_each_tokens_experts(
    dtype: torch.dtype, tolerance: float, limit: float | None, num_tokens: int, tiles: ExpertGemmTiles | None
) -> None:
    """Neither the features of an expert nor the hidden size fill the last tile. With a limit there are biases."""
    x = torch.randn(num_tokens, 40).to(dtype)
    gate_up, down = torch.randn(5, 2 * 20, 40).to(dtype), torch.randn(5, 40, 20).to(dtype)
    gate_up_bias = None if limit is None else torch.randn(5, 2 * 20).to(dtype)
    down_bias = None if limit is None else torch.randn(5, 40).to(dtype)
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, limit)
    choice = choose(torch.randn(num_tokens, 5), Routing(5, 2))
    wide = ExpertWeights(
        gate_up.float(),
        down.float(),
        None if gate_up_bias is None else gate_up_bias.float(),
        None if down_bias is None else down_bias.float(),
        limit,
    )
    expected = TORCH_EXPERT_OPS.multiply(x.float(), choice, wide)

    def product(ids: Tensor, factors: Tensor) -> Tensor:
        if tiles is None:
            return multiply_few(x, ids.int(), factors, weights, (FewTiles(4, 32), FewTiles(8, 16)))
        return multiply_experts(x, ids.int(), factors, weights, tiles)

    assert error_of(product(choice.ids, choice.weights), expected) < tolerance
    assert torch.equal(product(choice.ids, choice.weights), product(choice.ids, choice.weights))
    assert error_of(product((choice.ids + 1) % 5, choice.weights), expected) > 0.1, "an expert's rows shifted by one"
    lost = choice.weights.clone()
    lost[-1, -1] = 0.0
    assert error_of(product(choice.ids, lost), expected) > 2 * tolerance, "a weight of the choice lost"
    assert ExpertKernels(CPU).multiply(x[:0], Choice(choice.ids[:0], choice.weights[:0]), weights).shape == (0, 40)


@pytest.mark.parametrize("own", [None, range(1, 3)], ids=["all", "some"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("num_tokens", "tiles"), [(3, None), (35, SMALL), (35, SWAPPED)], ids=["few", "tiles", "swapped"]
)
def test_a_shared_expert_is_added_to_the_chosen_ones(
    num_tokens: int, tiles: ExpertGemmTiles | None, parts: int, own: range | None
) -> None:
    """Also to the chosen ones of a rank that has two of five."""
    gate_up, down = torch.randn(5, 2 * 20, 40), torch.randn(5, 40, 20)
    shared = SharedMatrices(torch.randn(2 * parts * 20, 40), torch.randn(40, parts * 20))
    held, load = slice(None) if own is None else slice(own.start, own.stop), torch.zeros(7, dtype=torch.int64)
    weights = ExpertWeights(
        gate_up[held], down[held], load=load, first=0 if own is None else 1, num_all=5, shared=shared
    )
    x, choice = torch.randn(num_tokens, 40), choose(torch.randn(num_tokens, 5), Routing(5, 3))
    expected = TORCH_EXPERT_OPS.multiply(x, choice, weights)
    counts = load.clone()
    if tiles is None:
        got = multiply_few(x, choice.ids.int(), choice.weights, weights, (FewTiles(4, 32), FewTiles(8, 16)))
    else:
        got = multiply_experts(x, choice.ids.int(), choice.weights, weights, tiles)
    assert error_of(got, expected) < 1e-5
    assert torch.equal(load, 2 * counts), "a shared expert is no choice"
    others = TORCH_EXPERT_OPS.multiply(x, choice, replace(weights, shared=None))
    assert error_of(got, others) > 0.1


def test_a_shared_expert_is_normed_with_the_stream() -> None:
    x, hidden, norm_weight = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40)
    shared = SharedMatrices(torch.randn(2 * 32, 40), torch.randn(40, 32))
    weights = ExpertWeights(torch.randn(5, 32, 40), torch.randn(5, 40, 16), shared=shared)
    choice = choose(torch.randn(6, 5), Routing(5, 2))
    choice = Choice(choice.ids.int(), choice.weights)
    formed = ExpertKernels(CPU).multiply_and_norm(hidden, x, choice, weights, norm_weight, 1e-3)
    assert formed is not None
    total = hidden + TORCH_EXPERT_OPS.multiply(x, choice, weights)
    torch.testing.assert_close(formed[1], total, rtol=1e-4, atol=1e-4)
    normed = torch.nn.functional.rms_norm(total, (40,), norm_weight, 1e-3)
    torch.testing.assert_close(formed[0], normed, rtol=1e-4, atol=1e-4)


def test_a_shared_expert_is_left_to_the_kernels_where_its_parts_are_like_experts() -> None:
    def is_left(num_tokens: int, top_k: int = 6, size: int = 32, num_all: int = 64, **more: Any) -> bool:
        shared = SharedMatrices(torch.empty(2 * size, 8), torch.empty(8, size))
        matrices = ExpertWeights(torch.empty(4, 2 * 16, 8), torch.empty(4, 8, 16), num_all=num_all, shared=shared)
        return ExpertKernels(CPU).computes_shared(num_tokens, top_k, replace(matrices, **more))

    assert [is_left(rows) for rows in (0, 1, 64, 256, 257)] == [False, True, True, True, False]
    assert not is_left(64, size=40), "no whole number of parts"
    assert not is_left(64, limit=7.0)
    assert not is_left(64, shared=None)
    assert not is_left(64, gate_up=packed_experts("e4m3 by output", 4, 32, 8))
    assert [is_left(rows, top_k=8, size=16) for rows in (1, 2)] == [False, True], "no warp has as many of nine"
    assert [is_left(rows, top_k=8, num_all=256) for rows in (64, 65)] == [True, False], "more tiles than were measured"


def test_a_shared_expert_that_kernels_cannot_compute_is_refused() -> None:
    x, choice = torch.randn(3, 40), choose(torch.randn(3, 5), Routing(5, 2))
    shared = SharedMatrices(torch.randn(2 * 32, 40), torch.randn(40, 32))
    weights = ExpertWeights(torch.randn(5, 32, 40), torch.randn(5, 40, 16), torch.randn(5, 32), shared=shared)
    with pytest.raises(AssertionError, match="products of its own"):
        multiply_experts(x, choice.ids.int(), choice.weights, weights, SMALL)
    with pytest.raises(AssertionError, match="products of its own"):
        multiply_few(x, choice.ids.int(), choice.weights, weights, (FewTiles(4, 32), FewTiles(8, 16)))


def test_few_tokens_are_counted_in_the_load() -> None:
    load = torch.tensor([5] * 7 + [1, 1])
    weights = ExpertWeights(torch.randn(7, 32, 16), torch.randn(7, 16, 16), load=load)
    ids = torch.tensor([[1, 2], [2, 3], [2, 5]]).int()
    multiply_few(torch.randn(3, 16), ids, torch.rand(3, 2), weights, (FewTiles(16, 16), FewTiles(16, 16)))
    assert load.tolist() == [5, 6, 8, 6, 5, 6, 5, 1 + 4, 2]


def test_choices_are_added_to_the_stream_and_normed() -> None:
    x, hidden, norm_weight = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40)
    weights, choice = (
        ExpertWeights(torch.randn(5, 32, 40), torch.randn(5, 40, 16)),
        choose(torch.randn(6, 5), Routing(5, 2)),
    )
    results = multiply_choices(x, choice.ids.int(), choice.weights, weights, SMALL)
    normed, total = add_choices_and_norm(results, hidden, norm_weight, 1e-3)
    expected = hidden + TORCH_EXPERT_OPS.multiply(x, choice, weights)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (40,), norm_weight, 1e-3))


def test_few_tokens_read_whole_rows_of_weights_that_fit_into_registers() -> None:
    """Of Qwen3-30B-A3B and gpt-oss-20b; those of Mixtral are too long for a program of the second product."""
    bf16 = 2
    assert FewTiles.of_gates(2048, bf16) == FewTiles(2, 2048)
    assert FewTiles.of_downs(768, 8, bf16) == FewTiles(4, 256)
    assert FewTiles.of_gates(2880, bf16) == FewTiles(1, 1024)
    assert FewTiles.of_downs(14336, 2, bf16) is None


def test_one_token_has_kernels_of_its_own() -> None:
    weights = ExpertWeights(torch.randn(7, 32, 16), torch.randn(7, 16, 16))
    x, choice = torch.randn(2, 16), choose(torch.randn(2, 7), Routing(7, 2))
    choice = Choice(choice.ids.int(), choice.weights)
    assert tiles_of_few(choice.ids, weights, 4) is None
    both = ExpertKernels(CPU).multiply(x, choice, weights)
    first = Choice(choice.ids[:1], choice.weights[:1])
    assert tiles_of_few(first.ids, weights, 4) is not None
    torch.testing.assert_close(ExpertKernels(CPU).multiply(x[:1], first, weights), both[:1], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("kind", ["e4m3 by output", "e4m3 by block"])
def test_one_token_reads_e4m3_numbers(kind: str) -> None:
    hidden, size = 288, 160
    gate_up, down = packed_experts(kind, 3, 2 * size, hidden), packed_experts(kind, 3, hidden, size)
    x, choice = torch.randn(1, hidden), choose(torch.randn(1, 3), Routing(3, 2))
    expected = TORCH_EXPERT_OPS.multiply(x, choice, ExpertWeights(meant_by(gate_up), meant_by(down)))
    weights, choice = ExpertWeights(gate_up, down), Choice(choice.ids.int(), choice.weights)
    tiles = tiles_of_few(choice.ids, weights, 4)
    assert tiles is not None
    assert error_of(ExpertKernels(CPU).multiply(x, choice, weights), expected) < 1e-5
    narrow = FewTiles(4, 128), FewTiles(8, 128)
    assert error_of(multiply_few(x, choice.ids, choice.weights, weights, narrow), expected) < 1e-5


@pytest.mark.parametrize("kind", ["e4m3 by output", "e4m3 by block"])
def test_products_round_inputs_and_activations_by_128(kind: str) -> None:
    hidden, size = 256, 128
    gate_up, down = packed_experts(kind, 3, 2 * size, hidden), packed_experts(kind, 3, hidden, size)
    x, choice = torch.randn(5, hidden), choose(torch.randn(5, 3), Routing(3, 2))
    weights = ExpertWeights(meant_by(gate_up), meant_by(down))
    results = multiply_rounded(x, choice.ids.int(), choice.weights, ExpertWeights(gate_up, down), RoundedTiles(16))
    got = add_choices(results, 5)
    # The interpreter cuts off what a GPU rounds, so rounding is further off than on a GPU.
    assert error_of(got, TORCH_EXPERT_OPS.multiply(x, choice, weights)) < 0.1
    shifted = multiply_rounded(
        x, (choice.ids.int() + 1) % 3, choice.weights, ExpertWeights(gate_up, down), RoundedTiles(16)
    )
    assert error_of(add_choices(shifted, 5), got) > 0.5


def test_tiles_are_chosen_for_every_number_of_rows() -> None:
    chosen = [expert_gemm.ExpertGemmTiles.choose(8 * rows, 128, 2).block_m for rows in (1, 64, 256, 600, 8192)]
    assert chosen == [16, 16, 32, 64, 128]
    hopper = [
        expert_gemm.ExpertGemmTiles.choose(8 * rows, 128, 2, has_room=True) for rows in (4, 5, 64, 256, 1024, 1025)
    ]
    assert [tiles.block_m for tiles in hopper] == [16, 16, 16, 32, 64, 128]
    assert [tiles.gates.is_swapped for tiles in hopper] == [False, True, True, True, False, False]


_empty = torch.empty


def filled_with_nan(*shape: Any, **kinds: Any) -> Tensor:
    tensor = _empty(*shape, **kinds)
    return tensor.fill_(torch.nan) if tensor.dtype in (torch.float32, torch.bfloat16) else tensor


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "most_counted"),
    [(14, SMALL, expert_tiles.MOST_COUNTED_PAIRS), (14, SWAPPED, 0), (3, None, 0)],
    ids=["tiles", "swapped", "few"],
)
def test_ranks_with_some_of_the_experts_add_up_to_all(
    num_tokens: int, tiles: ExpertGemmTiles | None, most_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has one expert, the second two that no token takes, the third the rest; results of others are not numbers."""
    monkeypatch.setattr(expert_tiles, "MOST_COUNTED_PAIRS", most_counted)
    monkeypatch.setattr(expert_tiles, "_BLOCK_PAIRS", 16)
    monkeypatch.setattr(torch, "empty", filled_with_nan)
    x = torch.randn(num_tokens, 40)
    matrices = torch.randn(6, 2 * 20, 40), torch.randn(6, 40, 20), torch.randn(6, 2 * 20), torch.randn(6, 40)
    choice = Choice(
        torch.tensor([0, 3, 4, 5])[torch.rand(num_tokens, 4).argsort(dim=1)[:, :3]], torch.rand(num_tokens, 3)
    )
    choice.ids[-1] = torch.tensor([5, 3, 4])  # a token without the first rank's expert
    expected = TORCH_EXPERT_OPS.multiply(x, choice, ExpertWeights(*matrices, 2.0))
    total = torch.zeros_like(x)
    for own in (range(1), range(1, 3), range(3, 6)):
        gates, downs, gate_biases, down_biases = (matrix[own.start : own.stop] for matrix in matrices)
        load = torch.zeros(8, dtype=torch.int64)
        weights = ExpertWeights(gates, downs, gate_biases, down_biases, 2.0, load, own.start, 6)
        if tiles is None:
            part = multiply_few(x, choice.ids.int(), choice.weights, weights, (FewTiles(4, 32), FewTiles(8, 16)))
        else:
            part = multiply_experts(x, choice.ids.int(), choice.weights, weights, tiles)
        torch.testing.assert_close(part, TORCH_EXPERT_OPS.multiply(x, choice, weights), rtol=1e-4, atol=1e-4)
        counts = torch.bincount(choice.ids.flatten(), minlength=6).tolist()
        assert load.tolist() == [2 * count for count in counts] + [2 * sum(map(bool, counts)), 2]
        total += part
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", PACKED_FORMS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_quantised_weights_of_some_experts_are_multiplied_as_what_they_stand_for(num_tokens: int, kind: str) -> None:
    hidden, size = 160, 96
    gate_up, down = packed_experts(kind, 2, 2 * size, hidden), packed_experts(kind, 2, hidden, size)
    x, choice = torch.randn(num_tokens, hidden), choose(torch.randn(num_tokens, 5), Routing(5, 3))
    choice.ids[0] = torch.tensor([3, 1, 2])
    plain = ExpertWeights(meant_by(gate_up), meant_by(down), first=2, num_all=5)
    expected = TORCH_EXPERT_OPS.multiply(x, choice, plain)
    weights = ExpertWeights(gate_up, down, first=2, num_all=5)
    got = ExpertKernels(CPU).multiply(x, Choice(choice.ids.int(), choice.weights), weights)
    assert error_of(got, expected) < 1e-5


@pytest.mark.parametrize("kind", ["e4m3 by output", "e4m3 by block"])
def test_products_of_some_experts_round_inputs_too(kind: str) -> None:
    hidden, size = 256, 128
    gate_up, down = packed_experts(kind, 3, 2 * size, hidden), packed_experts(kind, 3, hidden, size)
    x, choice, tiles = torch.randn(5, hidden), choose(torch.randn(5, 3), Routing(3, 2)), RoundedTiles(16)
    whole = multiply_rounded(x, choice.ids.int(), choice.weights, ExpertWeights(gate_up, down), tiles)
    weights = ExpertWeights(gate_up, down, first=4, num_all=9)
    ids = choice.ids.int() + 4
    ids[choice.ids == 0] = 8  # beyond this rank's experts
    part = multiply_rounded(x, ids, choice.weights, weights, tiles)
    is_own = (choice.ids > 0).flatten()
    assert torch.equal(part[is_own], whole[is_own])
    whole[~is_own], part[~is_own] = 0.0, torch.nan
    assert torch.equal(add_choices(part, 5, own=OwnChoices.of(ids, weights)), add_choices(whole, 5))
