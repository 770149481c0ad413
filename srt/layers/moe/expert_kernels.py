"""The operations of a mixture of experts with our kernels; `expert_ops.py` describes them. Importing this module imports Triton."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from srt.kernels.build.pdl import has_pdl, pdl_for
from srt.kernels.moe.expert_gemm import (
    ExpertGemmTiles,
    OwnChoices,
    add_choices,
    add_choices_and_norm,
    multiply_choices,
)
from srt.kernels.moe.few_tokens import (
    MOST_ROUTED_ROWS,
    MOST_TOKENS,
    keeps_warps_busy,
    multiply_few,
    route_rows,
    tiles_of_few,
)
from srt.kernels.moe.rounded_experts import multiply_rounded, rounds_inputs
from srt.kernels.moe.route import choose_experts, router_logits
from srt.layers.moe.expert_ops import Choice, ExpertOps, ExpertWeights, Router

_MOST_SHARED_ROWS: Final = 256
"""With more tokens, the products of the shared expert by themselves fill the device, by kernels that are better at it."""
_MOST_SHARED_TILES: Final = 4
"""Tiles of a step's tokens, each of which reads a shared expert's weights. DeepSeek-V2-Lite was measured with up to 4 (on an H200)."""
_LEAST_TILE: Final = 16  # tokens
_MOST_NORMED_ROWS: Final = 64
"""With more rows, adding up the choices in a kernel of its own costs little."""


class ExpertKernels(ExpertOps):
    """Never waits for the device, so that graphs can capture every step."""

    def __init__(self, device: torch.device) -> None:
        self._has_pdl = has_pdl(device)
        self._arrived = torch.zeros(MOST_ROUTED_ROWS, dtype=torch.int32, device=device)

    def route(self, x: Tensor, router: Router) -> Choice:
        if not len(x):
            none = x.new_empty((0, router.routing.top_k), dtype=torch.int32)
            return Choice(none, none.float())
        if self.can_route_rows(x):
            return self.route_rows(x, router)[1]
        pdl = self._pdl(x)
        logits = router_logits(x.contiguous(), router.weight, router.bias, pdl)
        return Choice(*choose_experts(logits, router.routing, router.correction, pdl))

    def can_route_rows(self, x: Tensor) -> bool:
        """Return whether one kernel norms the rows and chooses their experts."""
        return 0 < len(x) <= MOST_ROUTED_ROWS

    def route_rows(
        self, x: Tensor, router: Router, norm_weight: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Choice]:
        """Return (the rows, normed if there is a norm; their experts)."""
        normed, ids, weights = route_rows(x.contiguous(), router, self._arrived, norm_weight, eps, self._pdl(x))
        return normed, Choice(ids, weights)

    def computes_shared(self, num_tokens: int, top_k: int, weights: ExpertWeights) -> bool:
        """Return True in small steps, if all matrices are plain, without biases or a limit, and parts of the shared one are like experts.

        Tiles have as many rows as suit the chosen experts. If these have few tokens each even in the largest step, a shared expert, which
        has all tokens, would be read too often.
        """
        shared = weights.shared
        if shared is None or not weights.can_be_beside_shared or not 0 < num_tokens <= _MOST_SHARED_ROWS:
            return False
        if num_tokens <= MOST_TOKENS:
            return keeps_warps_busy(top_k, weights.num_shared_parts)
        largest = ExpertGemmTiles.choose(_MOST_SHARED_ROWS * top_k, weights.num_routed, shared.down.itemsize)
        has_few_tiles = largest.block_m * _MOST_SHARED_TILES >= _MOST_SHARED_ROWS
        return has_few_tiles or num_tokens <= _LEAST_TILE * _MOST_SHARED_TILES

    def multiply(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        if not len(x):
            return x.new_empty(x.shape)
        tiles = tiles_of_few(choice.ids, weights, x.itemsize)
        if tiles is not None:
            return multiply_few(x.contiguous(), choice.ids, choice.weights, weights, tiles, self._pdl(x))
        own = OwnChoices.of(choice.ids, weights)
        results = self._results(x, choice, weights)
        return add_choices(results, len(x), self._pdl_of_tiles(x), own, weights.num_shared_parts)

    def multiply_and_norm(
        self, hidden: Tensor, x: Tensor, choice: Choice, weights: ExpertWeights, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return (the norm of hidden + what `multiply` returns, that sum); None if other kernels are faster."""
        if not 0 < len(x) <= _MOST_NORMED_ROWS or tiles_of_few(choice.ids, weights, x.itemsize) is not None:
            return None
        results = self._results(x, choice, weights)
        own = OwnChoices.of(choice.ids, weights)
        return add_choices_and_norm(
            results, hidden.contiguous(), norm_weight, eps, self._pdl_of_tiles(x), own, weights.num_shared_parts
        )

    def _results(self, x: Tensor, choice: Choice, weights: ExpertWeights) -> Tensor:
        """Return the weighted result of each choice of each token."""
        multiply = multiply_rounded if rounds_inputs(x, weights) else multiply_choices
        return multiply(x.contiguous(), choice.ids, choice.weights, weights, pdl=self._pdl_of_tiles(x))

    def _pdl(self, rows: Tensor) -> int:
        return pdl_for(len(rows)) if self._has_pdl else 0

    def _pdl_of_tiles(self, rows: Tensor) -> int:
        """For a single row, the programs of tiles are placed badly if they start early: that costs more than it gains (on an H200)."""
        return 0 if len(rows) == 1 else self._pdl(rows)
