"""The operations of a mixture of experts with our kernels; `expert_ops.py` describes them. Importing this module imports Triton."""

from __future__ import annotations

from torch import Tensor

from srt.kernels.moe.expert_gemm import multiply_experts
from srt.kernels.moe.route import choose_experts, router_logits
from srt.layers.moe.expert_ops import Choice, ExpertOps, ExpertWeights
from srt.utils.layer_spec import Routing


class ExpertKernels(ExpertOps):
    """Never waits for the device, so that graphs can capture every step."""

    def route(self, x: Tensor, weight: Tensor, routing: Routing) -> Choice:
        if not len(x):
            return super().route(x, weight, routing)
        logits = router_logits(x.contiguous(), weight)
        return Choice(*choose_experts(logits, routing.top_k, routing.is_renormalised, routing.scoring == "sigmoid"))

    def multiply(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        if not len(x):
            return x.new_empty(x.shape)
        return multiply_experts(x.contiguous(), choice.ids, choice.weights, weights.gate_up, weights.down)
