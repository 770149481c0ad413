"""The products of LoRA adapters in PyTorch, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from srt.kernels.lora.products import AdapterTokens, StackedAdapters


def adapted_reference(x: Tensor, stacked: StackedAdapters, numbers: Tensor, y: Tensor) -> Tensor:
    """Return y with what the adapters of the tokens x add to it, in float64."""
    out, rank = y.double(), stacked.rank
    for token, number in enumerate(numbers.tolist()):
        if number == stacked.num_adapters:
            continue
        low, first = stacked.down[number].double() @ x[token].double(), 0
        for part, size in enumerate(stacked.part_sizes):
            up = stacked.up[number, first : first + size].double()
            out[token, first : first + size] += up @ low[part * rank : (part + 1) * rank]
            first += size
    return out


def shrink_reference(x: Tensor, stacked: StackedAdapters, tokens: AdapterTokens) -> Tensor:
    del stacked, tokens
    return x


def expand_reference(x: Tensor, stacked: StackedAdapters, tokens: AdapterTokens, y: Tensor) -> None:
    """Do all of the work, given what `shrink_reference` returns."""
    y.copy_(adapted_reference(x, stacked, tokens.numbers, y))


def adapted_gemv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stacked: StackedAdapters, tokens: AdapterTokens
) -> Tensor:
    product = torch.nn.functional.linear(x, weight, bias)
    return adapted_reference(x, stacked, tokens.numbers, product).to(x.dtype)
