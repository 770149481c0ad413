"""The operations of a mixture of experts in plain PyTorch: used on a CPU, and the reference for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from srt.utils.layer_spec import Routing


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token, by falling score, and the weights of their results."""

    ids: Tensor  # [tokens, top_k] int64
    weights: Tensor  # [tokens, top_k] f32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts on one rank, in the order in which the router counts them."""

    gate_up: Tensor  # [experts, 2 * size, hidden_size]: the gates of an expert, then its ups
    down: Tensor  # [experts, hidden_size, size]


class ExpertOps:
    """The operations, without state. `ExpertKernels` has the same on a GPU."""

    def route(self, x: Tensor, weight: Tensor, routing: Routing) -> Choice:
        """Choose the experts of each token. Logits, scores and weights are float32."""
        return choose(F.linear(x.float(), weight.float()), routing)

    def multiply(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        """Return the weighted sum of the results of each token's experts [tokens, hidden_size].

        The tokens of each expert are multiplied together. The results of a token are added by falling score, so the sum does not depend on
        the other tokens' experts.
        """
        top_k = choice.ids.shape[1]
        flat = choice.ids.flatten()
        sorted_pairs = flat.argsort(stable=True)
        results = x.new_empty(len(flat), weights.down.shape[1])
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=len(weights.down)).tolist()):
            if not count:
                continue
            pairs = sorted_pairs[first : first + count]
            gate, up = F.linear(x[pairs // top_k], weights.gate_up[expert]).chunk(2, dim=-1)
            results[pairs] = F.linear(F.silu(gate).mul_(up), weights.down[expert])
            first += count
        weighted: Tensor = results.view(-1, top_k, results.shape[1]) * choice.weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(x.dtype)


TORCH_EXPERT_OPS: Final = ExpertOps()


def choose(logits: Tensor, routing: Routing) -> Choice:
    """Choose experts by the router's logits [tokens, experts] f32."""
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    weights, ids = scores.topk(routing.top_k, dim=-1)
    if routing.is_renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Choice(ids, weights)
