"""What each layer of a model computes, as numbers and names: read from config.json, without torch.

Everything that depends on a model's layers asks their specs: memory, attention, loading, graphs. Layers of one model may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from srt.utils.rope_config import RopeConfig

FastPath = Literal["resident", "compiled"]
"""Paths that run a decode step of a layer otherwise than its modules do: "resident" is the kernel that runs all layers, "compiled" the
code of --enable-torch-compile."""


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """The attention of one layer. Head counts are those of the whole model, before it is split over ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    rope: RopeConfig
    window: int | None = None
    """Positions that a token sees, its own included. None: all."""
    head_norm: bool = False
    """RMSNorm of each query and key head before the rotation."""
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads in one rank's memory; heads are replicated if there are more ranks than heads."""
        return max(1, self.num_kv_heads // tp_size)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The gated MLP of one layer: down(silu(gate(x)) * up(x))."""

    size: int
    """Outputs of `gate` and of `up`."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a decoder."""

    attention: SelfAttention
    feed_forward: FeedForward
    fast_paths: tuple[FastPath, ...] = ()
    """The paths that can run this layer. Every layer can be run by its modules."""
