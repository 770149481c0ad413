"""The kernels of experts at the sizes of Qwen3-30B-A3B and Mixtral, against float32 in PyTorch; wrong ones would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from srt.kernels.moe.expert_gemm import add_choices_and_norm, multiply_experts
from srt.kernels.moe.expert_tiles import ExpertTiles
from srt.layers.moe.expert_kernels import ExpertKernels
from srt.layers.moe.expert_ops import TORCH_EXPERT_OPS, Choice, ExpertWeights, Router, SharedMatrices, activate
from srt.layers.quantization.fp8_weight import rounded_groups
from srt.utils.layer_spec import Routing
from tests.support.packed_experts import PACKED_FORMS, meant_by, packed_experts

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 3584)}
MOST = 6e-3


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def exactly(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
    """The result in float32, expert by expert, as all at once would need too much memory."""
    results = torch.zeros(x.shape, device=CUDA, dtype=torch.float32)
    for expert in choice.ids.unique().tolist():
        tokens, choices = (choice.ids == expert).nonzero(as_tuple=True)
        one = ExpertWeights(gate_up[expert, None].float(), down[expert, None].float())
        alone = Choice(torch.zeros_like(tokens)[:, None], choice.weights[tokens, choices][:, None])
        results.index_add_(0, tokens, TORCH_EXPERT_OPS.multiply(x[tokens].float(), alone, one))
    return results


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 33, 64, 256, 700, 4096])
def test_products_are_right_and_the_same_every_time(num_tokens: int, shape: str) -> None:
    num_experts, top_k, hidden, size = SHAPES[shape]
    kernels, routing = ExpertKernels(CUDA), Routing(num_experts, top_k)
    matrices = (
        randn(num_experts, 2 * size, hidden) * hidden**-0.5,
        randn(num_experts, hidden, size) * size**-0.5,
    )
    weights = ExpertWeights(*matrices)
    x, router = randn(num_tokens, hidden), Router(routing, randn(num_experts, hidden) * hidden**-0.5)
    choice = kernels.route(x, router)
    expected_choice = TORCH_EXPERT_OPS.route(x, router)
    assert (choice.ids == expected_choice.ids).float().mean() > 0.99, "all but ties"
    torch.testing.assert_close(choice.weights, expected_choice.weights, rtol=1e-3, atol=1e-5)
    expected, got = exactly(x, choice, *matrices), kernels.multiply(x, choice, weights)
    assert error_of(got, expected) < MOST
    assert all(torch.equal(kernels.multiply(x, choice, weights), got) for _ in range(10))

    shifted = Choice((choice.ids + 1) % num_experts, choice.weights)
    assert error_of(kernels.multiply(x, shifted, weights), expected) > 0.5, "an expert's rows shifted by one"
    lost = choice.weights.clone()
    lost[:, -1] = 0.0
    assert error_of(kernels.multiply(x, replace(choice, weights=lost), weights), expected) > 2 * MOST, "a weight lost"


@pytest.mark.parametrize(("top_k", "parts"), [(6, 2), (8, 1)], ids=["DeepSeek-V2-Lite", "one part"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 33, 64, 250, 256])
def test_a_shared_expert_is_added_to_the_chosen_ones(num_tokens: int, top_k: int, parts: int) -> None:
    num_experts, hidden, size = 64, 2048, 1408
    matrices = randn(num_experts, 2 * size, hidden) * hidden**-0.5, randn(num_experts, hidden, size) * size**-0.5
    both, down = randn(2 * parts * size, hidden) * hidden**-0.5, randn(hidden, parts * size) * (parts * size) ** -0.5
    weights = ExpertWeights(*matrices, shared=SharedMatrices(both, down))
    x, kernels, norm = randn(num_tokens, hidden), ExpertKernels(CUDA), randn(hidden)
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    gate, up = (x.float() @ both.float().T).chunk(2, dim=-1)
    shared = (torch.nn.functional.silu(gate) * up) @ down.float().T
    expected = exactly(x, choice, *matrices) + shared
    assert kernels.computes_shared(num_tokens, top_k, weights) == (num_tokens > 1 or top_k == 6)
    got = kernels.multiply(x, choice, weights)
    assert error_of(got, expected) < MOST
    assert all(torch.equal(kernels.multiply(x, choice, weights), got) for _ in range(5))
    assert error_of(got, expected - shared) > 0.1
    stream = randn(num_tokens, hidden)
    formed = kernels.multiply_and_norm(stream, x, choice, weights, norm, 1e-6)
    if formed is not None:
        assert error_of(formed[1], stream.float() + expected) < MOST
        normed = torch.nn.functional.rms_norm(formed[1].float(), (hidden,), norm.float(), 1e-6)
        assert error_of(formed[0], normed) < MOST


def leave_no_numbers() -> None:
    """Fill memory that is free with what is not a number: what kernels leave undefined is that then."""
    torch.full((256 << 20,), torch.nan, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 64, 256, 4096])
def test_ranks_with_a_part_of_the_experts_add_up_to_all(num_tokens: int, shape: str) -> None:
    """The last tokens have no expert of the first rank; the last rank has a quarter of the experts."""
    num_experts, top_k, hidden, size = SHAPES[shape]
    kernels = ExpertKernels(CUDA)
    matrices = (
        randn(num_experts, 2 * size, hidden) * hidden**-0.5,
        randn(num_experts, hidden, size) * size**-0.5,
    )
    x, half, three = randn(num_tokens, hidden), num_experts // 2, num_experts * 3 // 4
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    away = -(-num_tokens // 8)
    choice.ids[-away:] = half + torch.arange(top_k, device=CUDA, dtype=choice.ids.dtype) * (half // top_k)
    expected, total = exactly(x, choice, *matrices), torch.zeros(num_tokens, hidden, device=CUDA)
    load = torch.zeros(num_experts + 2, device=CUDA, dtype=torch.int64)
    for own in (range(half), range(half, three), range(three, num_experts)):
        gate_up, down = (matrix[own.start : own.stop].clone() for matrix in matrices)
        weights = ExpertWeights(gate_up, down, load=load, first=own.start, num_all=num_experts)
        leave_no_numbers()
        part = kernels.multiply(x, choice, weights)
        for _ in range(3):
            leave_no_numbers()
            assert torch.equal(kernels.multiply(x, choice, weights), part)
        if own.start == 0:
            assert not part[-away:].any()
        total += part
    assert error_of(total, expected) < MOST
    assert torch.equal(load[:-2], 12 * torch.bincount(choice.ids.flatten(), minlength=num_experts))


@pytest.mark.parametrize("own", [None, range(32, 96)], ids=["all", "some"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64, 129, 512, 513, 4096])
def test_the_table_has_every_pair_once_beside_those_of_its_expert(num_tokens: int, own: range | None) -> None:
    """Expert 3 has no pairs, and expert 40 those of every token. 512 tokens have the most pairs that one kernel counts."""
    num_experts, top_k, block_m = 128, 8, 16
    ids = torch.rand(num_tokens, num_experts, device=CUDA).argsort(dim=-1)[:, :top_k]
    ids = torch.where(ids == 3, 4, ids).int()
    ids[:, 0] = 40
    load = torch.full((num_experts + 2,), 5, device=CUDA, dtype=torch.int64)
    tiles = ExpertTiles.sort(ids, num_experts, block_m, load, own=own)
    assert torch.equal(tiles.pairs.long(), ids.flatten().argsort(stable=True))
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    assert torch.equal(load[:-2], 5 + counts)
    assert load[-2:].tolist() == [5 + int((counts > 0).sum()), 6]
    first_own, sorted_ids = (own or range(num_experts)).start, ids.flatten().sort().values.tolist()
    covered: list[int] = []
    for expert, first, end in zip(*(part.tolist() for part in (tiles.experts, tiles.firsts, tiles.ends)), strict=True):
        assert end - first <= block_m
        assert all(sorted_ids[row] == first_own + expert for row in range(first, end))
        covered += range(first, end)
    assert covered == [row for row, expert in enumerate(sorted_ids) if expert in (own or range(num_experts))]


@pytest.mark.parametrize("own", [None, range(8, 32)], ids=["all", "some"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64, 1000])
def test_biases_and_limits_of_experts_are_those_of_each_choice(num_tokens: int, own: range | None) -> None:
    """With gpt-oss's activation, at its number of experts."""
    num_experts, top_k, hidden, size = 32, 4, 1440, 720
    gate_up, down = randn(num_experts, 2 * size, hidden) * hidden**-0.5, randn(num_experts, hidden, size) * size**-0.5
    biases = randn(num_experts, 2 * size), randn(num_experts, hidden)
    x, kernels = randn(num_tokens, hidden), ExpertKernels(CUDA)
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    first, last = (0, num_experts) if own is None else (own.start, own.stop)

    def weights(convert: Callable[[Tensor], Tensor], gate_up_bias: Tensor) -> ExpertWeights:
        first_bias, second_bias = (convert(one[first:last].clone()) for one in (gate_up_bias, biases[1]))
        matrices = convert(gate_up[first:last].clone()), convert(down[first:last].clone())
        return ExpertWeights(*matrices, first_bias, second_bias, 7.0, first=first, num_all=num_experts)

    as_choice = Choice(choice.ids.long(), choice.weights)
    expected = TORCH_EXPERT_OPS.multiply(x.float(), as_choice, weights(Tensor.float, biases[0]))
    got = kernels.multiply(x, choice, weights(Tensor.bfloat16, biases[0]))
    assert error_of(got, expected) < MOST
    assert error_of(kernels.multiply(x, choice, weights(Tensor.bfloat16, biases[0].roll(1, 0))), expected) > 0.05


ROUTINGS = (
    Routing(64, 6, is_renormalised=False),
    Routing(32, 4, has_bias=True),
    Routing(128, 8, "sigmoid", has_correction=True),
    Routing(256, 8, "sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5, has_correction=True),
    Routing(160, 6, is_renormalised=False, num_groups=8, num_chosen_groups=3, num_group_scores=1, scale=16.0),
    Routing(512, 10),
)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: f"{routing.top_k} of {routing.num_experts}")
@pytest.mark.parametrize("num_rows", [1, 8, 32, 33, 500, 700])
def test_experts_are_chosen_by_every_kind_of_routing(num_rows: int, routing: Routing) -> None:
    """Up to 32 rows in one kernel, in which each warp chooses by itself."""
    x, weight = randn(num_rows, 2048), randn(routing.num_experts, 2048) * 2048**-0.5
    bias, correction = torch.randn(2, routing.num_experts, device=CUDA)
    router = Router(
        routing, weight, bias.bfloat16() if routing.has_bias else None, correction if routing.has_correction else None
    )
    got, expected = ExpertKernels(CUDA).route(x, router), TORCH_EXPERT_OPS.route(x, router)
    assert (got.ids == expected.ids).float().mean() > 0.99, "all but ties"
    same = (got.ids == expected.ids).all(-1)
    torch.testing.assert_close(got.weights[same], expected.weights[same], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", PACKED_FORMS)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 4096])
def test_quantised_weights_are_multiplied_as_what_they_stand_for(num_tokens: int, kind: str) -> None:
    num_experts, top_k, hidden, size = 32, 4, 2048, 768
    gate_up = packed_experts(kind, num_experts, 2 * size, hidden, device="cuda")
    down = packed_experts(kind, num_experts, hidden, size, device="cuda")
    x, kernels = randn(num_tokens, hidden), ExpertKernels(CUDA)
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    expected = exactly(x, choice, meant_by(gate_up), meant_by(down))
    got = kernels.multiply(x, choice, ExpertWeights(gate_up, down))
    assert error_of(got, expected) < MOST
    assert torch.equal(kernels.multiply(x, choice, ExpertWeights(gate_up, down)), got)
    other = packed_experts(kind, num_experts, hidden, size, seed=1, device="cuda")
    assert error_of(kernels.multiply(x, choice, ExpertWeights(gate_up, other)), expected) > 0.1


@pytest.mark.parametrize("kind", ["e4m3 by output", "e4m3 by block"])
@pytest.mark.parametrize("num_tokens", [2, 8, 33, 64, 256, 1000, 4096])
def test_inputs_and_activations_are_rounded_by_128_if_the_format_rounds(num_tokens: int, kind: str) -> None:
    num_experts, top_k, hidden, size = 32, 4, 2048, 768
    gate_up = packed_experts(kind, num_experts, 2 * size, hidden, device="cuda", rounds_inputs=True)
    down = packed_experts(kind, num_experts, hidden, size, device="cuda", rounds_inputs=True)
    x, kernels, weights = randn(num_tokens, hidden), ExpertKernels(CUDA), ExpertWeights(gate_up, down)
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    gates, downs, expected = meant_by(gate_up), meant_by(down), torch.zeros(num_tokens, hidden, device=CUDA)
    inputs = rounded_groups(x.float())
    for expert in range(num_experts):
        tokens, choices = (choice.ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        activated = rounded_groups(activate(inputs[tokens] @ gates[expert].T, None))
        expected.index_add_(0, tokens, activated @ downs[expert].T * choice.weights[tokens, choices][:, None])
    got = kernels.multiply(x, choice, weights)
    assert error_of(got, expected) < MOST
    assert all(torch.equal(kernels.multiply(x, choice, weights), got) for _ in range(5))
    exact = exactly(x, choice, gates, downs)
    assert MOST < error_of(got, exact) < 0.06, "rounded, and not far from what is not"
    shifted = Choice((choice.ids + 1) % num_experts, choice.weights)
    assert error_of(kernels.multiply(x, shifted, weights), expected) > 0.5


@pytest.mark.parametrize("kind", ["e4m3 by block", "mxfp4"])
def test_every_number_is_converted_exactly(kind: str) -> None:
    """Rows of an identity show each weight of the last product by itself, behind gates and ups that return them."""
    weights = packed_experts(kind, 1, 128, 128, device="cuda")
    bits = torch.arange(256, device=CUDA, dtype=torch.uint8)
    stacked = weights.stacked
    if kind == "mxfp4":
        stacked.numbers.view(-1)[:256] = bits
    else:
        bits[[127, 255]] = 0  # not numbers
        stacked.numbers.view(torch.uint8).view(-1)[:256] = bits
        stacked.scales.fill_(1.0)
    ones = torch.eye(128, device=CUDA, dtype=torch.bfloat16)
    plain = torch.cat((100 * ones, ones / 100))[None]  # silu(100) is 100
    ids, factors = torch.zeros(128, 1, device=CUDA, dtype=torch.int32), torch.ones(128, 1, device=CUDA)
    got = multiply_experts(ones, ids, factors, ExpertWeights(plain, weights))
    expected = multiply_experts(ones, ids, factors, ExpertWeights(plain, meant_by(weights).bfloat16()))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("kind", ["e4m3 by block", "int4 by 32 with zeros"])
@pytest.mark.parametrize("num_tokens", [1, 33, 300])
def test_quantised_weights_of_some_experts_are_those_of_all(num_tokens: int, kind: str, rounds_inputs: bool) -> None:
    """A token whose other choices have weight 0 gets from all experts what it gets from those of this rank."""
    num_experts, num_own, top_k, hidden, size = 16, 8, 4, 2048, 768
    gate_up, down = (
        packed_experts(kind, num_own, *shape, device="cuda", rounds_inputs=rounds_inputs)
        for shape in ((2 * size, hidden), (hidden, size))
    )
    x, kernels = randn(num_tokens, hidden), ExpertKernels(CUDA)
    choice = kernels.route(x, Router(Routing(num_experts, top_k), randn(num_experts, hidden) * hidden**-0.5))
    own = (choice.ids >= 4) & (choice.ids < 4 + num_own)
    alone = Choice(torch.where(own, choice.ids - 4, 0), torch.where(own, choice.weights, 0.0))
    whole = kernels.multiply(x, alone, ExpertWeights(gate_up, down))
    leave_no_numbers()
    part = kernels.multiply(x, choice, ExpertWeights(gate_up, down, first=4, num_all=num_experts))
    assert error_of(part, whole) < MOST


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("num_tokens", [1, 4, 64, 1000])
def test_a_graph_of_some_experts_serves_any_choice(num_tokens: int, first: int) -> None:
    num_experts, num_own, top_k, hidden, size = 32, 16, 4, 512, 256
    matrices = randn(num_own, 2 * size, hidden) * hidden**-0.5, randn(num_own, hidden, size) * size**-0.5
    kernels, weights = ExpertKernels(CUDA), ExpertWeights(*matrices, first=first, num_all=num_experts)
    x, factors = randn(num_tokens, hidden), torch.rand(num_tokens, top_k, device=CUDA)
    ids = torch.zeros(num_tokens, top_k, device=CUDA, dtype=torch.int32)
    choice = Choice(ids, factors)
    kernels.multiply(x, choice, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.multiply(x, choice, weights)
    for least in (0, 12, 28):  # the last: no expert of this rank
        ids.copy_(least + torch.rand(num_tokens, num_experts - least, device=CUDA).argsort(dim=-1)[:, :top_k])
        graph.replay()
        assert torch.equal(captured, kernels.multiply(x, choice, weights))
        if least == 28:
            assert not captured.any()


@pytest.mark.parametrize("num_tokens", [4, 64, 1000])
def test_a_graph_serves_any_choice(num_tokens: int) -> None:
    num_experts, top_k, hidden, size = 32, 4, 512, 256
    matrices = (
        randn(num_experts, 2 * size, hidden) * hidden**-0.5,
        randn(num_experts, hidden, size) * size**-0.5,
    )
    experts = ExpertWeights(*matrices)
    x, weights = randn(num_tokens, hidden), torch.rand(num_tokens, top_k, device=CUDA)
    ids = torch.zeros(num_tokens, top_k, device=CUDA, dtype=torch.int32)
    multiply_experts(x, ids, weights, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = multiply_experts(x, ids, weights, experts)
    for most in (1, 5, num_experts):
        ids.copy_(torch.rand(num_tokens, max(most, top_k), device=CUDA).argsort(dim=-1)[:, :top_k] % most)
        graph.replay()
        assert torch.equal(captured, multiply_experts(x, ids, weights, experts))
        assert error_of(captured, exactly(x, Choice(ids, weights), *matrices)) < MOST


@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_layers_that_start_early_give_the_same_bits(num_tokens: int) -> None:
    """Layers one after the other in a graph, each of which starts before the last has ended, and the same ones launched plainly."""
    num_experts, top_k, hidden, size = SHAPES["qwen3"]
    kernels, routing, norm = ExpertKernels(CUDA), Routing(num_experts, top_k), randn(hidden)
    layers = [
        (
            ExpertWeights(
                randn(num_experts, 2 * size, hidden) * hidden**-0.5, randn(num_experts, hidden, size) * size**-0.5
            ),
            Router(routing, randn(num_experts, hidden) * hidden**-0.5),
        )
        for _ in range(3)
    ]

    def run(x: Tensor) -> Tensor:
        for weights, router in layers:
            normed, choice = kernels.route_rows(x, router, norm, 1e-6)
            x = kernels.multiply(normed, choice, weights)
        return x

    inputs = randn(num_tokens, hidden)
    run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    for _ in range(5):
        inputs.copy_(randn(num_tokens, hidden))
        graph.replay()
        with patch("srt.layers.moe.expert_kernels.pdl_for", return_value=0):
            assert torch.equal(captured, run(inputs))


@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_rows_are_normed_and_routed_in_one_kernel(num_tokens: int) -> None:
    x, norm, kernels = randn(num_tokens, 2048), randn(2048), ExpertKernels(CUDA)
    router = Router(Routing(128, 8), randn(128, 2048) * 2048**-0.5)
    normed, choice = kernels.route_rows(x, router, norm, 1e-6)
    assert error_of(normed, torch.nn.functional.rms_norm(x.float(), (2048,), norm.float(), 1e-6)) < MOST
    expected = TORCH_EXPERT_OPS.route(normed, router)
    assert (choice.ids == expected.ids).float().mean() > 0.99, "all but ties"
    torch.testing.assert_close(choice.weights, expected.weights, rtol=1e-3, atol=1e-5)
    assert error_of(kernels.route_rows(x, router, norm.flip(0), 1e-6)[0], normed) > 0.5, "the norm of other elements"


def test_choices_are_added_to_the_stream_and_normed() -> None:
    num_tokens, top_k, hidden = 48, 8, 2048
    results, stream, norm = randn(num_tokens * top_k, hidden), randn(num_tokens, hidden), randn(hidden)
    normed, total = add_choices_and_norm(results, stream, norm, 1e-6)
    expected = stream.float() + results.view(num_tokens, top_k, hidden).float().sum(1)
    assert error_of(total, expected) < MOST
    assert error_of(normed, torch.nn.functional.rms_norm(expected, (hidden,), norm.float(), 1e-6)) < MOST
    results.view(num_tokens, top_k, hidden)[:, -1] = 0.0
    assert error_of(add_choices_and_norm(results, stream, norm, 1e-6)[1], normed) > 10 * MOST, "a choice lost"
