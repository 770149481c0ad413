"""Split a library's model over ranks, as its own plan for tensor parallelism says.

The library's names for the parts of a plan: "colwise" cuts the outputs of a product, "rowwise" its inputs, and adds the ranks' results.
Parameters that the plan does not cut are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.embedding import VocabShard
from srt.utils.model_error import ModelError

WHOLE = frozenset(("replicated_with_grad_allreduce", "embedding_rowwise", "replicate"))
"""Parts of a plan that are whole on every rank here."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is divided: `dim` counts from the end, and each of `num_parts` parts along it is divided by itself."""

    dim: int
    num_parts: int = 1


class SplitLinear(nn.Linear):
    """A product of which this rank has some outputs or some inputs. A library's linear layer becomes one by its class."""

    tp: TensorParallel
    style: str

    def forward(self, input: Tensor) -> Tensor:
        match self.style:
            case "colwise":
                return super().forward(input)
            case "colwise_gather_output":
                return self.tp.all_gather(super().forward(input))
            case "rowwise_split_input":
                input = input.chunk(self.tp.size, dim=-1)[self.tp.rank]
        total = self.tp.all_reduce(F.linear(input, self.weight))
        bias: Tensor | None = self.bias  # torch says that there always is one
        return total if bias is None else total + bias


class SplitHead(nn.Linear):
    """An output layer whose weight is whole, perhaps as it is the embedding too, and of whose outputs this rank computes its share."""

    shard: VocabShard

    def forward(self, input: Tensor) -> Tensor:
        shard = self.shard
        rows = slice(shard.start, shard.start + shard.size_valid)
        bias: Tensor | None = self.bias  # torch says that there always is one
        logits = F.linear(input, self.weight[rows], None if bias is None else bias[rows])
        return F.pad(logits, (0, shard.size - shard.size_valid))


def split(base: Any, tp: TensorParallel) -> dict[int, Cut]:
    """Cut the layers of `base`, which is on the meta device, and return the cuts of its parameters by their ids.

    ModelError, which ends a sentence that names the model, if there is no plan or one that is not known here.
    """
    plan: Mapping[str, str] = getattr(base.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelError(f"the library has no plan for splitting it over ranks (use --tp 1 instead of {tp.size})")
    cuts: dict[int, Cut] = {}
    for path, module in list(base.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            style = _style_of(plan, f"{path}.{name}")
            if style is not None and style not in WHOLE:
                _cut_parameter(module, name, parameter, _CUTS_OF_EXPERTS.get(style), f"{path}.{name}", tp, cuts)
        style = _style_of(plan, path)
        if style == "moe_tp_experts":
            module.register_forward_hook(_adding(tp))
        elif style is not None and style not in WHOLE:
            _split_linear(module, style, path, tp, cuts)
    return cuts


def split_head(output: nn.Module, shard: VocabShard) -> None:
    """Let the output layer compute the logits of this shard alone."""
    if type(output) is not nn.Linear:
        raise ModelError("its output layer cannot be split over ranks (use --tp 1)")
    output.__class__ = SplitHead
    output.shard = shard  # type: ignore[assignment]  # of SplitHead


_CUTS: dict[str, tuple[Cut, Cut | None]] = {
    "colwise": (Cut(2), Cut(1)),
    "colwise_gather_output": (Cut(2), Cut(1)),
    "rowwise": (Cut(1), None),
    "rowwise_split_input": (Cut(1), None),
}
"""For each style the cuts of a weight and of a bias."""
_CUTS_OF_EXPERTS = {"packed_colwise": Cut(2, 2), "colwise": Cut(2), "rowwise": Cut(1)}
"""For each style the cut of a stack of matrices, one for each expert."""


def _style_of(plan: Mapping[str, str], path: str) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _split_linear(module: nn.Module, style: str, path: str, tp: TensorParallel, cuts: dict[int, Cut]) -> None:
    if style not in _CUTS or type(module) is not nn.Linear:
        raise ModelError(f"its plan for several ranks has {style} of {path}, which is not supported (use --tp 1)")
    weight, bias = _CUTS[style]
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = weight if name == "weight" else bias
        if cut is not None:
            _cut_parameter(module, name, parameter, cut, path, tp, cuts)
    module.__class__ = SplitLinear
    module.tp, module.style = tp, style  # type: ignore[assignment]  # of SplitLinear


def _cut_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    cut: Cut | None,
    path: str,
    tp: TensorParallel,
    cuts: dict[int, Cut],
) -> None:
    """Replace the parameter by this rank's part of it, which is not filled yet."""
    shape = list(parameter.shape)
    if cut is None or len(shape) < cut.dim:
        raise ModelError(f"its plan for several ranks cuts {path} in a way that is not supported (use --tp 1)")
    if shape[-cut.dim] % (cut.num_parts * tp.size):
        raise ModelError(f"{shape[-cut.dim]} outputs or inputs of {path} cannot be divided evenly by --tp {tp.size}")
    shape[-cut.dim] //= tp.size
    part = nn.Parameter(torch.empty(shape, device="meta", dtype=parameter.dtype), requires_grad=False)
    setattr(module, name, part)
    cuts[id(part)] = cut


def _adding(tp: TensorParallel) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return tp.all_reduce(output)

    return add
