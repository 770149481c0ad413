"""A mixture of experts: every token takes the experts that the router chooses, and the shared one if there is one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from srt.layers.moe.expert_ops import Choice, ExpertWeights, SharedMatrices
from srt.layers.moe.experts import ExpertLayers, RouterWeight
from srt.layers.ops import LayerOps, Routed, Stream
from srt.layers.weights import ColumnPart
from srt.utils.layer_spec import Experts, SharedExpert


class Mixture(nn.Module):
    """The router, the experts and the shared expert of a layer. Each rank computes a summand of the result."""

    def __init__(self, hidden_size: int, spec: Experts, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self._exchange, tp = tp.exchange, tp.of_experts
        self._tp = tp
        self._ops = ops
        self.router = RouterWeight(hidden_size, spec.routing, spec.router_name, ops)
        self.experts = ExpertLayers(hidden_size, spec, tp, ops.experts)
        self._shared_name, self._gate_name = "", ""
        if spec.shared is not None:
            self._add_shared(hidden_size, spec.shared, tp)

    def _add_shared(self, hidden_size: int, shared: SharedExpert, tp: TensorParallel) -> None:
        self._shared_name = shared.name
        self.add_module(shared.name, SharedExpertLayers(hidden_size, shared, tp, self._ops))
        if shared.gate is not None:
            self._gate_name = shared.gate
            parts = [ColumnPart(shared.gate, 1, 0, 1)]
            self.add_module(shared.gate, ColumnParallelLinear(hidden_size, parts, False, self._ops))

    def complete_weights(self, routed: Routed) -> ExpertWeights | None:
        """Return the weights with which the operations of experts compute all of the mixture; None if the shared expert is left out.

        A shared expert has products of its own if it has a gate, if its weights are quantised, or if `ExpertOps.computes_shared` is False.
        """
        weights = self.experts.matrices
        if not self._shared_name:
            return weights
        matrices = None if self._gate_name else self._shared.matrices
        if matrices is None:
            return None
        weights = replace(weights, shared=matrices)
        num_tokens, top_k = routed.choice.ids.shape
        return weights if self._ops.experts.computes_shared(num_tokens, top_k, weights) else None

    def summand(self, routed: Routed) -> Tensor:
        """Return what this rank adds to the result."""
        x, weights = routed.normed, self.complete_weights(routed)
        chosen: Tensor = self.experts(x, routed.choice, weights)
        if weights is not None:
            return chosen
        shared = self._shared
        if not self._gate_name:
            return shared.onto(chosen, x)
        return torch.addcmul(chosen, shared(x), self._part(self._gate_name)(x).sigmoid())

    def sum(self, routed: Routed) -> Tensor:
        """Return the result of all ranks together, for the tokens of this rank."""
        if self._exchange is None:
            return self._tp.all_reduce(self.summand(routed))
        choice = routed.choice
        normed, ids, weights = self._exchange.gather(routed.normed, choice.ids, choice.weights)
        return self._exchange.sum_own(self.summand(Routed(normed, normed, Choice(ids, weights))))

    def join(self) -> None:
        """Compute this rank's summand of the tokens of other attention groups, in a step in which its own group has none."""
        none = self.router.weight.new_empty(0, self.router.weight.shape[1])
        self.sum(self.router(Stream(none)))

    @property
    def _shared(self) -> SharedExpertLayers:
        return cast("SharedExpertLayers", self._part(self._shared_name))

    def _part(self, name: str) -> nn.Module:
        return cast("nn.Module", self._modules[name])


def find_stacked_experts(model: nn.Module, stored: Collection[str]) -> None:
    """Let experts that a checkpoint with these tensors stacks be read so. It names a layer's mixture `mlp`, whatever the family does."""
    for path, mixture in model.named_modules():
        if not isinstance(mixture, Mixture) or not mixture.experts.can_be_stacked:
            continue
        stored_path = f"{path.rpartition('.')[0]}.mlp"
        if f"{stored_path}.experts.gate_up_proj" in stored:
            mixture.router.mixture_path, mixture.experts.stacked_path = stored_path, f"{stored_path}.experts"


class SharedExpertLayers(nn.Module):
    """The gated MLP of the shared expert, of which each rank computes a summand."""

    def __init__(self, hidden_size: int, spec: SharedExpert, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        outputs = (("gate_proj", spec.size), ("up_proj", spec.size))
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, outputs, False, tp, ops)
        self.down_proj = RowParallelLinear(spec.size, hidden_size, False, tp, ops)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.summand(self.gate_up_proj.gated(x))

    @property
    def matrices(self) -> SharedMatrices | None:
        """The matrices, if they are plain."""
        gate_up, down = self.gate_up_proj.affine.matrix, self.down_proj.affine.matrix
        return None if gate_up is None or down is None else SharedMatrices(gate_up, down)

    def onto(self, total: Tensor, x: Tensor) -> Tensor:
        """Return `total` plus the result. May overwrite `total`."""
        return self.down_proj.summand_onto(total, self.gate_up_proj.gated(x))
