"""The obvious attention, for tests of models: one request, all of its tokens in one step, no memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from srt.layers.attention.latent_layer import LatentLayer

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch


class DenseAttention:
    """Stands in for an AttentionBackend: q [tokens, heads * head_dim], k and v [tokens, kv_heads * head_dim], or latents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        tokens = q.shape[0]
        queries = q.view(tokens, layer.num_heads, layer.head_dim).transpose(0, 1)
        keys, values = layer.expand(k) if isinstance(layer, LatentLayer) else map(layer.split_kv_heads, (k, v))
        group = layer.num_heads // keys.shape[1]
        keys, values = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if layer.window is not None:
            hidden |= torch.ones_like(hidden).tril(-layer.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.view(-1, 1, 1).expand(-1, tokens, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :tokens]
        return (weights @ values).transpose(0, 1).flatten(1)


def dense_batch() -> ForwardBatch:
    """A batch of which models use nothing but the attention."""
    return cast(
        "ForwardBatch",
        SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(features=None), attn_backend=DenseAttention(), output_tokens=None
        ),
    )
