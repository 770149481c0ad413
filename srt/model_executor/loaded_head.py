"""A head that drafts from a model's hidden states, as it is loaded beside the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from srt.layers.attention.base import AttentionBackend
from srt.mem_cache.memory_pool import FeaturePool, FuseWeights, KVHeads, MHATokenToKVPool
from srt.models.eagle3 import Eagle3Head
from srt.utils.eagle3_config import Eagle3Config


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, and everything else of it that does not depend on the size of the KV memory."""

    config: Eagle3Config
    taps: tuple[int, ...]  # layers of the model whose inputs it reads
    head: Eagle3Head
    attn_backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_heads(self) -> list[KVHeads]:
        spec = self.config.layer.layers[0].self_attention
        return [KVHeads(spec.num_kv_heads, spec.head_dim)]

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values, and of its fused hidden states."""
        fused = self.config.layer.hidden_size * self.dtype.itemsize
        return MHATokenToKVPool.bytes_per_token(self.kv_heads, self.dtype) + fused

    def new_features(self, num_locations: int) -> FeaturePool:
        """Allocate the memory to which the model writes."""
        size = self.config.layer.hidden_size
        matrix, norm = self.head.fc.affine.matrix, self.head.input_norm
        assert matrix is not None, "heads have plain weights"
        weights = FuseWeights(matrix, None if norm is None else norm.weight, self.config.layer.norm.eps)
        return FeaturePool(self.taps, self.head.fuse, weights, num_locations, size, self.dtype, self.device)
