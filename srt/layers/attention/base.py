"""What an attention backend promises. One backend serves all layers of a worker, one batch at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from srt.layers.attention.radix_attention import RadixAttention
    from srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
    """Causal attention over the paged memory: q [tokens, heads * head_dim], k and v [tokens, kv_heads * head_dim].

    `init_forward_metadata` comes once per step, before the first layer; `forward` once per layer. A token sees its
    request's positions up to and including its own.
    """

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Work out whatever all layers of this step share: indices, masks, plans."""

    @abstractmethod
    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of the extend rows' tokens, which are all of q. Their k and v are in the memory already."""

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of the decode rows' tokens, one a row, which are all of q. Their k and v are in the memory already."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch) -> None:
        """Store the step's keys and values at `batch.out_cache_loc`."""
        shape = (-1, layer.num_kv_heads, layer.head_dim)
        batch.token_to_kv_pool.set_kv(layer.layer_id, batch.out_cache_loc, k.view(shape), v.view(shape))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k and v, then attend; a mixed batch is its extend rows, then its decode rows."""
        self.write_kv(k, v, layer, batch)
        if batch.forward_mode.is_decode():
            return self.forward_decode(q, k, v, layer, batch)
        if batch.forward_mode.is_extend():
            return self.forward_extend(q, k, v, layer, batch)
        n = batch.num_extend_tokens
        extended = self.forward_extend(q[:n], k[:n], v[:n], layer, batch)
        decoded = self.forward_decode(q[n:], k[n:], v[n:], layer, batch)
        return torch.cat((extended, decoded))
