"""Latent attention (MLA) as a layer of the plain decoder: what is projected, normed and rotated before heads attend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention.latent_layer import LatentExpansion, LatentLayer
from srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from srt.layers.norm import RMSNorm
from srt.layers.ops import LayerOps, Rotation
from srt.layers.rope import rotate_part
from srt.layers.weights import ColumnPart
from srt.utils.layer_spec import LatentAttention
from srt.utils.model_config import ModelConfig

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

EPS: Final = 1e-6
"""Of the norms of latents and of the vectors that queries are made of, whatever config.json says of the layers' norms."""


class LatentSelfAttention(nn.Module):
    """Self-attention of this rank's heads over latents, up to the output projection. Latents are computed by every rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, layer_id: int) -> None:
        super().__init__()
        spec = config.layers[layer_id].attention
        assert isinstance(spec, LatentAttention) and spec.num_heads % tp.size == 0, (spec, tp.size)
        self._spec = spec
        self._ops = ops
        num_heads = spec.num_heads // tp.size
        size = num_heads * spec.head_dim
        queries = ColumnPart("q_proj", spec.num_heads * spec.head_dim, tp.rank * size, size)
        if spec.query_rank is not None:
            self.q_a_layernorm = RMSNorm(spec.query_rank, EPS, ops)
            part = ColumnPart("q_b_proj", queries.total, queries.start, queries.size)
            self.q_b_proj = ColumnParallelLinear(spec.query_rank, [part], False, ops)
            queries = ColumnPart("q_a_proj", spec.query_rank, 0, spec.query_rank)
        latents = ColumnPart("kv_a_proj_with_mqa", spec.latent_dim, 0, spec.latent_dim)
        self.in_proj = ColumnParallelLinear(config.hidden_size, [queries, latents], False, ops)
        self.kv_a_layernorm = RMSNorm(spec.latent_rank, EPS, ops)
        self.kv_b_proj = LatentExpansion(spec, num_heads, tp.rank, ops)
        self.attn = LatentLayer(num_heads, spec, layer_id, self.kv_b_proj)
        self.o_proj = RowParallelLinear(spec.num_heads * spec.value_dim, config.hidden_size, False, tp, ops)

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Return the heads' output for the normed stream; the caller applies `o_proj`."""
        spec = self._spec
        assert rotation is not None, "latents have a rotated part"
        q, latents = self.in_proj(x).split(self.in_proj.sizes, dim=-1)
        if spec.query_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        norm, is_interleaved = self.kv_a_layernorm.norm, spec.rope.is_interleaved
        if self._ops.store_latents(q, latents, norm, rotation, is_interleaved, self.attn, batch):
            return self.attn.attend(q, latents, latents[:, : spec.latent_rank], batch)
        plain, rotated = q.unflatten(-1, (-1, spec.head_dim)).split((spec.nope_dim, spec.rope_dim), dim=-1)
        q = torch.cat((plain, rotate_part(rotated, rotation, is_interleaved)), dim=-1)
        compressed, shared = latents.split((spec.latent_rank, spec.rope_dim), dim=-1)
        shared = rotate_part(shared.unsqueeze(1), rotation, is_interleaved).squeeze(1)
        latents = torch.cat((self.kv_a_layernorm(compressed), shared), dim=-1)
        return self.attn(q.flatten(1), latents, latents[:, : spec.latent_rank], batch)  # type: ignore[no-any-return]
