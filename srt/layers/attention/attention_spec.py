"""Requirements on a worker's attention, as far as they are known before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention: see `srt.utils.layer_spec.LatentAttention`."""

    rank: int
    dim: int  # of a latent, its rotated part included
    value_dim: int  # of a head's values


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Sizes and types of attention on one rank. Head counts are those after tensor-parallel sharding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the products of queries and keys
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV memory
    page_size: int
    max_context: int  # positions that a request may have
    windows: tuple[int | None, ...]  # the different windows of the layers, each once; None: no window
    softcap: float | None = None  # of all layers
    has_sinks: bool = False  # of all layers
    latents: LatentSizes | None = None  # of all layers, if the KV memory holds latents; then there is one KV head

    @property
    def result_width(self) -> int:
        """Elements of a token's result."""
        return self.num_heads * (self.head_dim if self.latents is None else self.latents.value_dim)

    @property
    def packed_width(self) -> int:
        """Elements of a token's queries, keys and values."""
        kv = 2 * self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim + (kv if self.latents is None else self.latents.dim + self.latents.rank)


class AttentionLayer(Protocol):
    """One layer's attention as backends see it: its sizes, and the splitting of its rows into heads. `RadixAttention` is such a layer."""

    layer_id: int
    num_heads: int  # of this rank
    num_kv_heads: int
    head_dim: int
    value_dim: int  # of a head's results; head_dim, but for latents
    scale: float
    window: int | None
    softcap: float | None

    @property
    def sinks(self) -> torch.Tensor | None:
        """The score of each head's sink, if heads have sinks."""

    def split_packed(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split packed rows into queries, keys and values."""

    def split_kv_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Split rows of keys or values: [tokens, kv_heads * head_dim] to [tokens, kv_heads, head_dim]."""
