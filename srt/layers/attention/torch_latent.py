"""Attention over latents in plain PyTorch: the reference for kernels, and what serves on a CPU.

Rows of one token are absorbed into the space of latents. For longer chunks, the keys and values of all heads are made of the latents.
`torch_native.py` plans both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from srt.layers.attention.base import AttentionBackend
from srt.layers.attention.latent_layer import LatentLayer, latent_layer
from srt.layers.attention.torch_native import Chunk, TokenGroup, group_rows, plan_extends

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch


class TorchLatentBackend(AttentionBackend):
    """Runs wherever PyTorch does, with any page size and any sizes of latents."""

    def __init__(self) -> None:
        # The first layer makes the plans, because the step's lengths may not be on the device before.
        self._decodes: list[TokenGroup] | None = None
        self._extends: tuple[list[TokenGroup], list[Chunk]] | None = None

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._extends = None

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decodes = None

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        groups, chunks = self._extends = self._extends or plan_extends(batch, None)
        for group in groups:
            attend_absorbed(group, q, out, latent_layer(layer), batch)
        for chunk in chunks:
            _attend_chunk(chunk, q, out, latent_layer(layer), batch)

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor) -> None:
        if self._decodes is None:
            rows = np.arange(batch.num_extend_rows, batch.batch_size)
            self._decodes = group_rows(batch, rows, rows - batch.num_extend_rows, None)
        for group in self._decodes:
            attend_absorbed(group, q, out, latent_layer(layer), batch)


def attend_absorbed(group: TokenGroup, q: Tensor, out: Tensor, layer: LatentLayer, batch: ForwardBatch) -> None:
    """Attend with rows of one token: all heads of a row see its latents. The softmax is in float32."""
    latents = _gather(group.kv_index, layer, batch).view(group.num_rows, group.length, layer.latent_dim)
    queries = layer.absorb(q if group.tokens is None else q.index_select(0, group.tokens))
    scores = torch.bmm(queries, latents.transpose(1, 2)).float() * layer.scale
    if group.bias is not None:
        scores += group.bias.view(group.num_rows, 1, group.length)
    weights = scores.softmax(-1).to(q.dtype)
    attended = layer.lift(torch.bmm(weights, latents[..., : layer.latent_rank]))
    if group.tokens is None:
        out.copy_(attended)
    else:
        out.index_copy_(0, group.tokens, attended)


def _attend_chunk(chunk: Chunk, q: Tensor, out: Tensor, layer: LatentLayer, batch: ForwardBatch) -> None:
    keys, values = layer.expand(_gather(chunk.kv_index, layer, batch))
    # The quick kernel wants keys and values of one size: the elements that are added to values are dropped from the results.
    most = max(layer.head_dim, layer.value_dim)
    span = slice(chunk.first, chunk.first + chunk.count)
    queries, keys, values = (
        pad(part, (0, most - part.shape[-1])).transpose(0, 1).unsqueeze(0) for part in (q[span], keys, values)
    )
    for piece in chunk.pieces:
        attended = scaled_dot_product_attention(
            queries[:, :, piece.begin : piece.end],
            keys[:, :, : piece.length],
            values[:, :, : piece.length],
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=layer.scale,
        )
        rows = attended[0].transpose(0, 1)[..., : layer.value_dim]
        out[chunk.first + piece.begin : chunk.first + piece.end] = rows


def _gather(index: Tensor, layer: LatentLayer, batch: ForwardBatch) -> Tensor:
    latents, _ = batch.token_to_kv_pool.get_kv(layer.layer_id)
    return latents.view(-1, layer.latent_dim).index_select(0, index)
