"""The operations of a mixture of experts in plain PyTorch: used on a CPU, and the reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from srt.layers.quantization.weight import NumberKind
from srt.utils.layer_spec import Routing

GATE_SLOPE: Final = 1.702  # of gpt-oss's activation
LEAST_SUM: Final = 1e-20  # added to a sum of weights, so that it can divide them


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token, by falling score, and the weights of their results."""

    ids: Tensor  # [tokens, top_k] int64
    weights: Tensor  # [tokens, top_k] f32


@dataclass(frozen=True, slots=True)
class StackedMatrices:
    """One matrix of each expert in the form of a quantised scheme, for kernels."""

    kind: NumberKind
    numbers: Tensor  # [experts, outputs, inputs]; or [experts, outputs, inputs / 2] bytes of two 4-bit numbers (int_weight.py)
    scales: Tensor  # [experts, groups of inputs, outputs]: factors, or the exponents of MXFP4
    zeros: Tensor | None  # [experts, groups of inputs, outputs] int16; None: all are the middle of the range
    group_size: int
    rounds_inputs: bool = False
    """Whether inputs may be rounded to e4m3, by each 128 of a row or coarser."""


class ExpertMatrices(Protocol):
    """One matrix [outputs, inputs] of each expert, which may be stored in another form."""

    @property
    def shape(self) -> Sequence[int]:
        """(experts, outputs, inputs)."""

    @property
    def stacked(self) -> StackedMatrices:
        """What kernels read."""

    def multiply(self, expert: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b for one expert."""


@dataclass(frozen=True, slots=True)
class SharedMatrices:
    """The plain matrices of a shared expert, whose result is added to that of the chosen ones."""

    gate_up: Tensor  # [2 * size, hidden_size]: gates, then ups
    down: Tensor  # [hidden_size, size]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of a rank's experts, in the order in which the router counts them."""

    gate_up: Tensor | ExpertMatrices  # [experts, 2 * size, hidden_size]: the gates of an expert, then its ups
    down: Tensor | ExpertMatrices  # [experts, hidden_size, size]
    gate_up_bias: Tensor | None = None  # [experts, 2 * size]
    down_bias: Tensor | None = None  # [experts, hidden_size]; on one rank only, because the ranks' results are added
    limit: float | None = None  # None: silu(gate) * up; else gpt-oss's activation
    load: Tensor | None = None  # [all experts + 2] i64: what `add_load` adds up
    first: int = 0  # the router's number of the first of these experts
    num_all: int | None = None  # experts that the router chooses from; None: these are all
    shared: SharedMatrices | None = None  # None: it is computed elsewhere, or there is none

    @property
    def num_routed(self) -> int:
        """How many experts the router chooses from."""
        return self.down.shape[0] if self.num_all is None else self.num_all

    @property
    def can_be_beside_shared(self) -> bool:
        """Whether all matrices are plain, without biases and a limit, and a shared expert has a multiple of an expert's size."""
        if self.shared is None or not isinstance(self.gate_up, Tensor) or not isinstance(self.down, Tensor):
            return False
        is_plain = all(one is None for one in (self.gate_up_bias, self.down_bias, self.limit))
        return is_plain and self.shared.down.shape[1] % self.down.shape[2] == 0

    @property
    def num_shared_parts(self) -> int:
        """Into how many parts of the size of an expert kernels divide the shared one, which is a multiple of it; 0 if it is not here."""
        return 0 if self.shared is None else self.shared.down.shape[1] // self.down.shape[2]

    @property
    def own(self) -> range | None:
        """The router's numbers of these experts; None if these are all."""
        num_own = self.down.shape[0]
        return None if num_own == self.num_routed else range(self.first, self.first + num_own)


@dataclass(frozen=True, slots=True)
class Router:
    """Parameters of a router."""

    routing: Routing
    weight: Tensor  # [experts, hidden_size]
    bias: Tensor | None = None  # [experts], of the logits
    correction: Tensor | None = None  # [experts] f32, of the scores as far as they choose


class ExpertOps:
    """The operations, without state. `ExpertKernels` has the same on a GPU."""

    def route(self, x: Tensor, router: Router) -> Choice:
        """Choose the experts of each token. Logits, scores and weights are float32."""
        bias = None if router.bias is None else router.bias.float()
        return choose(F.linear(x.float(), router.weight.float(), bias), router.routing, router.correction)

    def computes_shared(self, num_tokens: int, top_k: int, weights: ExpertWeights) -> bool:
        """Return whether `multiply` computes the shared expert among these weights faster than products of its own do."""
        return False

    def multiply(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        """Return the weighted sum of the results of each token's experts [tokens, hidden_size], with the shared one's if it is here.

        The tokens of each expert are multiplied together. The results of a token are added by falling score, so the sum does not depend on
        the other tokens' experts. Experts of other ranks add nothing.
        """
        top_k = choice.ids.shape[1]
        flat = choice.ids.flatten()
        sorted_pairs = flat.argsort(stable=True)
        num_experts = weights.down.shape[0]
        counts = torch.bincount(flat, minlength=weights.num_routed)
        add_load(weights.load, counts)
        own = counts[weights.first : weights.first + num_experts].tolist()
        has_all = sum(own) == len(flat)
        results = (x.new_empty if has_all else x.new_zeros)(len(flat), weights.down.shape[1])
        first = int(counts[: weights.first].sum())
        for expert, count in enumerate(own):
            if not count:
                continue
            pairs = sorted_pairs[first : first + count]
            gate_up = _product(x[pairs // top_k], weights.gate_up, expert, weights.gate_up_bias)
            activated = activate(gate_up, weights.limit)
            results[pairs] = _product(activated, weights.down, expert, weights.down_bias)
            first += count
        weighted: Tensor = results.view(-1, top_k, results.shape[1]) * choice.weights.unsqueeze(-1)
        total = weighted.sum(dim=1)
        if weights.shared is not None:
            total += F.linear(activate(F.linear(x, weights.shared.gate_up), weights.limit), weights.shared.down)
        return total.to(x.dtype)


TORCH_EXPERT_OPS: Final = ExpertOps()


def add_load(load: Tensor | None, counts: Tensor) -> None:
    """Add a step's choices of each expert to the load, then the number of experts that were chosen, and 1 for the step."""
    if load is None:
        return
    load[:-2] += counts
    load[-2] += counts.count_nonzero()
    load[-1] += 1


def activate(gate_up: Tensor, limit: float | None) -> Tensor:
    """Return the activation of gates and ups, the two halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(GATE_SLOPE * gate)


def choose(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
    """Choose experts by the router's logits [tokens, experts] f32."""
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        ranks = ranks.masked_fill(~_in_best_groups(ranks, routing), float("-inf"))
    ids = ranks.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.is_renormalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return Choice(ids, weights if routing.scale == 1.0 else weights * routing.scale)


def _in_best_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """Return a mask of the experts [tokens, experts] in the groups that each token chooses from."""
    groups = ranks.unflatten(-1, (routing.num_groups, -1))
    best = (
        groups.topk(routing.num_group_scores, dim=-1).values.sum(dim=-1).topk(routing.num_chosen_groups, dim=-1).indices
    )
    chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, True)
    return chosen.unsqueeze(-1).expand_as(groups).flatten(1)


def _product(x: Tensor, matrices: Tensor | ExpertMatrices, expert: int, biases: Tensor | None) -> Tensor:
    bias = None if biases is None else biases[expert]
    return F.linear(x, matrices[expert], bias) if isinstance(matrices, Tensor) else matrices.multiply(expert, x, bias)
