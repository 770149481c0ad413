"""What a worker's attention has to do, as far as it is known before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Of one rank: heads are those after tensor-parallel sharding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV memory
    page_size: int
    max_context: int  # positions that a request may have
    windows: tuple[int | None, ...]  # that layers have, each once; None: they see everything

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)
