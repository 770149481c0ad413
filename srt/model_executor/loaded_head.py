"""A head that drafts from a model's hidden states, as it is loaded beside the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from srt.layers.attention.base import AttentionBackend
from srt.mem_cache.memory_pool import (
    FeaturePool,
    FuseWeights,
    KVHeads,
    MHATokenToKVPool,
    MLATokenToKVPool,
    taps_within,
)
from srt.models.eagle3 import Eagle3Head
from srt.models.mtp import MtpHead
from srt.utils.eagle3_config import Eagle3Config
from srt.utils.layer_spec import LatentAttention
from srt.utils.mtp_config import MtpConfig


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, and everything else of it that does not depend on the size of the KV memory."""

    config: Eagle3Config | MtpConfig
    taps: tuple[int, ...]  # layers of the model whose inputs it reads, or OUTPUT
    head: Eagle3Head | MtpHead
    attn_backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values, and of its fused hidden states."""
        fused = self.config.layer.hidden_size * self.dtype.itemsize
        kind = MHATokenToKVPool if self._latents is None else MLATokenToKVPool
        return kind.bytes_per_token(self._kv_heads, self.dtype) + fused

    def of_shortened(self, num_layers: int) -> LoadedHead:
        """Return the head as one of a model of which only this many layers run: it reads the inputs of the last one instead."""
        return replace(self, taps=taps_within(self.taps, num_layers))

    def new_pool(self, num_locations: int) -> MHATokenToKVPool:
        """Allocate the memory of keys and values. Its pages have one entry; the last is the dummy page."""
        latents, num_pages = self._latents, num_locations - 1
        if latents is None:
            return MHATokenToKVPool(num_pages, 1, self._kv_heads, self.dtype, self.device)
        return MLATokenToKVPool(num_pages, 1, [latents.latent_dim], latents.latent_rank, self.dtype, self.device)

    def new_features(self, num_locations: int) -> FeaturePool:
        """Allocate the memory to which the model writes."""
        size, given = self.config.layer.hidden_size, self.head.fuse_weights
        weights = None if given is None else FuseWeights(*given)
        return FeaturePool(self.taps, self.head.fuse, weights, num_locations, size, self.dtype, self.device)

    @property
    def _latents(self) -> LatentAttention | None:
        attention = self.config.layer.layers[0].attention
        return attention if isinstance(attention, LatentAttention) else None

    @property
    def _kv_heads(self) -> list[KVHeads]:
        if self._latents is not None:
            return [KVHeads(1, self._latents.latent_dim)]
        spec = self.config.layer.layers[0].self_attention
        return [KVHeads(spec.num_kv_heads, spec.head_dim)]
