"""Attention over latents, row after row and head after head, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def latent_reference(
    q: Tensor, latents: Tensor, rank: int, table: Tensor, page_size: int, rows: list[tuple[int, int, int]], scale: float
) -> Tensor:
    """Return weighted sums [tokens, heads, rank] for absorbed queries [tokens, heads, latent_dim].

    Each row is (slot, positions before it, its tokens); its tokens follow those of the row before.
    """
    results: list[Tensor] = []
    for slot, prefix, count in rows:
        for token in range(count):
            query = q[len(results)].double()
            positions = torch.arange(prefix + token + 1, device=q.device)
            locations = table[slot, positions // page_size].long() * page_size + positions % page_size
            seen = latents[locations, 0].double()
            weights = (query @ seen.T * scale).softmax(-1)
            results.append(weights @ seen[:, :rank])
    return torch.stack(results)
