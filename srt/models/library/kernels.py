"""Run products and RMSNorms of a library's layers by our operations, where these compute the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from srt.layers.ops import TORCH_OPS, LayerOps, Norm

NEAR = 1e-4  # relative difference of norms in float32


class KernelLinear(nn.Linear):
    """A product without a bias. A library's linear layer becomes one by its class."""

    ops: LayerOps

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features).contiguous()
        return self.ops.project(rows, self.weight).view(*input.shape[:-1], -1)


class _KernelNorm:
    """An RMSNorm; before a class of the library, it takes the place of that class' own computation."""

    ops: LayerOps
    norm_eps: float
    is_plus_one: bool
    weight: Tensor

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        if others or named or x.dtype != self.weight.dtype:
            return super().forward(x, *others, **named)  # type: ignore[misc]  # of the library's class
        return self.ops.norm(x, Norm(self.weight, self.norm_eps, self.is_plus_one))


def use_ops(model: nn.Module, ops: LayerOps) -> None:
    """Let the modules of the model compute by `ops` what those compute as well."""
    for module in model.modules():
        if type(module) is nn.Linear and module._parameters.get("bias") is None:
            _turn_into(KernelLinear, module, ops=ops)
        elif (norm := _norm_of(module)) is not None:
            kind = type(module.__class__.__name__, (_KernelNorm, module.__class__), {})
            _turn_into(kind, module, ops=ops, norm_eps=norm.eps, is_plus_one=norm.is_plus_one)


def _turn_into(kind: type, module: nn.Module, **attributes: Any) -> None:
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def _norm_of(module: Any) -> Norm | None:
    """Return the RMSNorm that the module computes, found by trying it with random numbers; None if it computes something else."""
    if set(module._parameters) != {"weight"} or module._modules or module._buffers or module.weight is None:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    size, random = len(module.weight), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=random, dtype=torch.float32) for shape in ((3, size), (size,)))
    x = x * eps**0.5  # so that eps counts
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        got = probe(x)
    except Exception:  # it takes other arguments
        return None
    for is_plus_one in (False, True):
        norm = Norm(weight, eps, is_plus_one)
        expected = TORCH_OPS.norm(x, norm)
        if isinstance(got, Tensor) and got.shape == x.shape and (got - expected).norm() <= NEAR * expected.norm():
            return norm
    return None
