"""The operations of a mixture of experts with our kernels; `expert_ops.py` describes them. Importing this module imports Triton."""

from __future__ import annotations

from torch import Tensor

from srt.kernels.moe.expert_gemm import multiply_experts
from srt.kernels.moe.route import choose_experts, router_logits
from srt.layers.moe.expert_ops import Choice, ExpertOps, ExpertWeights, Router


class ExpertKernels(ExpertOps):
    """Never waits for the device, so that graphs can capture every step."""

    def route(self, x: Tensor, router: Router) -> Choice:
        if not len(x):
            return super().route(x, router)
        logits = router_logits(x.contiguous(), router.weight, router.bias)
        return Choice(*choose_experts(logits, router.routing, router.correction))

    def multiply(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        if not len(x):
            return x.new_empty(x.shape)
        return multiply_experts(x.contiguous(), choice.ids, choice.weights, weights)
