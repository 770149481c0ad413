"""The choice of experts and their products, against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.layers.moe.expert_ops import TORCH_EXPERT_OPS, Choice, ExpertWeights, activate, choose
from srt.utils.layer_spec import Routing

EXPERTS, TOP_K, HIDDEN, SIZE = 7, 3, 24, 10


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def token_by_token(x: Tensor, choice: Choice, gate_up_of: Tensor, down_of: Tensor) -> Tensor:
    rows = []
    for token, ids, factors in zip(x.double(), choice.ids, choice.weights.double(), strict=True):
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, factor in zip(ids, factors, strict=True):
            gate, up = (gate_up_of[expert].double() @ token).split(SIZE)
            row += factor * (down_of[expert].double() @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("num_tokens", [1, 5, 60])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_results_are_the_weighted_sums_of_the_chosen_experts(
    num_tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    x = randn(num_tokens, HIDDEN).to(dtype)
    choice = choose(randn(num_tokens, EXPERTS), Routing(EXPERTS, TOP_K))
    matrices = randn(EXPERTS, 2 * SIZE, HIDDEN).to(dtype), randn(EXPERTS, HIDDEN, SIZE).to(dtype)
    results = TORCH_EXPERT_OPS.multiply(x, choice, ExpertWeights(*matrices))
    assert results.dtype == dtype
    expected = token_by_token(x, choice, *matrices)
    assert (results.double() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("num_tokens", [1, 60])
def test_groups_of_experts_add_up_to_all_of_them(num_tokens: int) -> None:
    x, choice = randn(num_tokens, HIDDEN), choose(randn(num_tokens, EXPERTS), Routing(EXPERTS, TOP_K))
    matrices = randn(EXPERTS, 2 * SIZE, HIDDEN), randn(EXPERTS, HIDDEN, SIZE)
    loads = [torch.zeros(EXPERTS + 2, dtype=torch.int64) for _ in range(3)]
    whole = TORCH_EXPERT_OPS.multiply(x, choice, ExpertWeights(*matrices, load=loads[2]))
    parts = [
        ExpertWeights(matrices[0][first:end], matrices[1][first:end], load=load, first=first, num_all=EXPERTS)
        for first, end, load in ((0, 4, loads[0]), (4, EXPERTS, loads[1]))
    ]
    results = [TORCH_EXPERT_OPS.multiply(x, choice, part) for part in parts]
    torch.testing.assert_close(results[0] + results[1], whole)
    assert loads[0].tolist() == loads[1].tolist() == loads[2].tolist(), "each rank counts the choices of all experts"


def test_no_tokens_have_no_results() -> None:
    x, logits = torch.empty(0, HIDDEN), torch.empty(0, EXPERTS)
    weights = ExpertWeights(randn(EXPERTS, 2 * SIZE, HIDDEN), randn(EXPERTS, HIDDEN, SIZE))
    assert TORCH_EXPERT_OPS.multiply(x, choose(logits, Routing(EXPERTS, TOP_K)), weights).shape == (0, HIDDEN)


def test_a_correction_changes_the_choice_but_not_the_weights() -> None:
    logits, correction = torch.tensor([[1.0, 3.0, 2.0, -1.0]]), torch.tensor([0.0, -1.0, 0.0, 0.5])
    routing = Routing(4, 2, "sigmoid", is_renormalised=False, scale=2.5, has_correction=True)
    chosen = choose(logits, routing, correction)
    assert chosen.ids.tolist() == [[2, 3]]
    torch.testing.assert_close(chosen.weights[0], 2.5 * logits[0, [2, 3]].sigmoid())


def test_experts_are_chosen_from_the_groups_with_the_two_best_experts() -> None:
    """The best expert is alone in its group, which is therefore left out."""
    logits = torch.tensor([[9.0, -9.0, 1.0, 2.0, 3.0, 0.0]])
    routing = Routing(6, 2, "sigmoid", num_groups=3, num_chosen_groups=1)
    assert choose(logits, routing).ids.tolist() == [[3, 2]]


def test_the_limited_activation_is_that_of_gpt_oss() -> None:
    gates, ups = torch.tensor([-8.0, 0.5, 9.0]), torch.tensor([-9.0, 0.25, 8.0])
    limited, between = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0)
    expected = (between + 1) * limited * torch.sigmoid(1.702 * limited)
    torch.testing.assert_close(activate(torch.cat((gates, ups)), 7.0), expected)


def test_softmax_weights_are_those_of_all_experts_unless_they_are_renormalised() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    scores = logits.softmax(-1)[0]
    plain = choose(logits, Routing(4, 2, is_renormalised=False))
    assert plain.ids.tolist() == [[1, 2]]
    torch.testing.assert_close(plain.weights[0], scores[[1, 2]])
    renormalised = choose(logits, Routing(4, 2))
    torch.testing.assert_close(renormalised.weights, logits[:, [1, 2]].softmax(-1))
