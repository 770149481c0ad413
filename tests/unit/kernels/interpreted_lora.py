"""The products of LoRA adapters in Triton's interpreter, against PyTorch's, one token after the other."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.elementwise.silu_and_mul import silu_and_mul
from srt.kernels.lora import products
from srt.kernels.lora.products import AdapterTokens, StackedAdapters, adapted_gemv, expand, expand_gated, shrink
from tests.support.lora_reference import adapted_reference

NUM_ADAPTERS = 3


def stacked_of(num_inputs: int, part_sizes: tuple[int, ...], rank: int) -> StackedAdapters:
    down = torch.randn(NUM_ADAPTERS, len(part_sizes) * rank, num_inputs) / num_inputs**0.5
    return StackedAdapters(down, torch.randn(NUM_ADAPTERS, sum(part_sizes), rank), part_sizes)


@pytest.mark.parametrize(
    ("num_tokens", "rank", "part_sizes"),
    [(1, 16, (72,)), (5, 32, (70, 33, 17)), (37, 16, (40, 40)), (40, 128, (33,)), (270, 128, (300, 33, 17))],
)
def test_each_token_gets_the_product_of_its_own_adapter(
    num_tokens: int, rank: int, part_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(num_tokens)
    monkeypatch.setattr(products, "_MOST_SINGLE_PARTS", 1)
    stacked = stacked_of(200, part_sizes, rank)
    x, y = torch.randn(num_tokens, 210)[:, :200], torch.randn(num_tokens, sum(part_sizes) + 5)[:, : sum(part_sizes)]
    numbers = torch.randint(NUM_ADAPTERS + 1, (num_tokens,)).int()
    numbers[0] = 1
    expected, before = adapted_reference(x, stacked, numbers, y), y.clone()
    tokens = AdapterTokens.sort(numbers, NUM_ADAPTERS)
    expand(shrink(x, stacked, tokens), stacked, tokens, y)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[numbers == NUM_ADAPTERS], before[numbers == NUM_ADAPTERS])


@pytest.mark.parametrize(("num_tokens", "rank"), [(37, 16), (270, 128)])
def test_gates_and_ups_get_their_products_before_the_activation(num_tokens: int, rank: int) -> None:
    torch.manual_seed(rank)
    stacked = stacked_of(200, (300, 300), rank)
    x, y = torch.randn(num_tokens, 200), torch.randn(num_tokens, 600)
    numbers = torch.randint(NUM_ADAPTERS + 1, (num_tokens,)).int()
    gate, up = adapted_reference(x, stacked, numbers, y).chunk(2, dim=-1)
    tokens, before = AdapterTokens.sort(numbers, NUM_ADAPTERS), y.clone()
    got = expand_gated(shrink(x, stacked, tokens), stacked, tokens, y)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(y, before)
    alone = silu_and_mul(y)
    assert torch.equal(got[numbers == NUM_ADAPTERS], alone[numbers == NUM_ADAPTERS])


@pytest.mark.parametrize("part_sizes", [(72,), (64, 32, 32)])
@pytest.mark.parametrize("number", [1, NUM_ADAPTERS])
def test_one_token_gets_both_products_at_once(number: int, part_sizes: tuple[int, ...]) -> None:
    torch.manual_seed(number)
    stacked = stacked_of(200, part_sizes, 16)
    x, weight, bias = torch.randn(1, 200), torch.randn(sum(part_sizes), 200), torch.randn(sum(part_sizes))
    numbers = torch.tensor([number]).int()
    got = adapted_gemv(x, weight, bias, stacked, AdapterTokens.sort(numbers, NUM_ADAPTERS))
    assert got is not None
    expected = adapted_reference(x, stacked, numbers, x.double() @ weight.double().t() + bias)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
