"""The decoder of every family without fused kernels: each operation on its own, as the layer specs say.

Modules are named as in the checkpoints, so that a parameter's path is its tensor's name. What `decoder.py` fuses, it states plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention.radix_attention import AttentionSinks, RadixAttention
from srt.layers.embedding import VocabParallelEmbedding
from srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from srt.layers.moe.mixture import Mixture
from srt.layers.norm import RMSNorm, ShardedRMSNorm, make_norm
from srt.layers.ops import LayerOps, Rotation, Stream
from srt.layers.rope import RotaryEmbedding, rotate_part
from srt.models.latent_attention import LatentSelfAttention
from srt.models.stage_layers import copy_received, note_input, stage_layers
from srt.utils.layer_spec import Experts, FeedForward, SelfAttention
from srt.utils.model_config import ModelConfig
from srt.utils.pipeline_stage import Stage
from srt.utils.rope_config import RopeConfig

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class PlainAttention(nn.Module):
    """Self-attention of this rank's heads, up to the output projection."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, layer_id: int) -> None:
        super().__init__()
        spec = self._spec = config.layers[layer_id].self_attention
        self._ops = ops
        self._is_interleaved = spec.rope is not None and spec.rope.is_interleaved
        stored_as = "qkv_proj" if spec.is_one_tensor else None
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qkv_bias, tp, ops, stored_as
        )
        if spec.norms == "head":
            self.q_norm = make_norm(config.norm, spec.head_dim, ops)
            self.k_norm = make_norm(config.norm, spec.head_dim, ops)
        elif spec.norms == "width":
            queries, keys, _ = self.qkv_proj.parts
            self.q_norm = ShardedRMSNorm(queries, config.norm.eps, tp, ops)
            self.k_norm = ShardedRMSNorm(keys, config.norm.eps, tp, ops)
        is_rms = spec.norms is None or (spec.norms == "head" and config.norm.kind != "layer")
        is_whole = spec.rope is not None and spec.rope.rotary_dim(spec.head_dim) == spec.head_dim
        self._has_fused_operation = is_rms and is_whole and not self._is_interleaved
        num_heads = self.qkv_proj.num_heads
        self.sinks = AttentionSinks(num_heads, tp.rank * num_heads, spec.num_heads) if spec.has_sinks else None
        self.attn = RadixAttention(
            num_heads,
            spec.head_dim,
            self.qkv_proj.num_kv_heads,
            layer_id,
            spec.scale,
            spec.window,
            spec.softcap,
            self.sinks,
        )
        self.o_proj = RowParallelLinear(spec.query_width, config.hidden_size, spec.o_bias, tp, ops)

    def of_stream(
        self, stream: Stream, norm: RMSNorm, rotation: Rotation | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Return (the heads' output for the normed stream, the stream's sum)."""
        qkv, hidden = self._ops.linear_of_norm(stream, norm.norm, self.qkv_proj.affine)
        return self._attend(qkv, rotation, batch), hidden

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Return the heads' output for the normed stream; the caller applies `o_proj`."""
        return self._attend(self.qkv_proj(x), rotation, batch)

    def _attend(self, qkv: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        if self._has_fused_operation and rotation is not None:
            norms = None
            if spec.norms is not None:
                norms = cast("RMSNorm", self.q_norm).norm, cast("RMSNorm", self.k_norm).norm
            return self._ops.attend(qkv, norms, rotation, self.attn, batch)
        q, k, v = self.attn.split_packed(qkv)
        if spec.norms == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.unflatten(-1, (-1, spec.head_dim)), k.unflatten(-1, (-1, spec.head_dim))
        if spec.norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = (rotate_part(heads, rotation, self._is_interleaved) for heads in (q, k))
        return self.attn(q.flatten(1), k.flatten(1), v, batch)  # type: ignore[no-any-return]  # calls of modules are untyped


class PlainMLP(nn.Module):
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: FeedForward, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        outputs = (("gate_proj", spec.size), ("up_proj", spec.size))
        stored_as = "gate_up_proj" if spec.is_one_tensor else None
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, outputs, spec.bias, tp, ops, stored_as)
        self.down_proj = RowParallelLinear(spec.size, hidden_size, spec.bias, tp, ops)
        self._is_gelu = spec.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self._is_gelu))  # type: ignore[no-any-return]

    def of_stream(self, stream: Stream, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return (the MLP's output for the normed stream, the stream's sum)."""
        activated, hidden = self.gate_up_proj.gated_of_norm(stream, norm, self._is_gelu)
        return self.down_proj(activated), hidden


class PlainExperts(Mixture):
    """A mixture of experts in the place of the MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(self.router(Stream(x)))


def _mlp_of(hidden_size: int, spec: FeedForward | Experts, tp: TensorParallel, ops: LayerOps) -> nn.Module:
    if isinstance(spec, Experts):
        return PlainExperts(hidden_size, spec, tp, ops)
    return PlainMLP(hidden_size, spec, tp, ops)


class PlainLayer(nn.Module):
    """One layer: its norms stand where the spec names them."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, layer_id: int, ropes: Sequence[RopeConfig]
    ) -> None:
        super().__init__()
        spec = self._spec = config.layers[layer_id]
        self._ops = ops
        self._rope = None if spec.attention.rope is None else ropes.index(spec.attention.rope)
        kind = PlainAttention if isinstance(spec.attention, SelfAttention) else LatentSelfAttention
        self.self_attn: PlainAttention | LatentSelfAttention = kind(config, tp, ops, layer_id)
        self.add_module(spec.feed_forward.name, _mlp_of(config.hidden_size, spec.feed_forward, tp, ops))
        for name in spec.norms.names:
            self.add_module(name, make_norm(config.norm, config.hidden_size, ops))

    def forward(
        self, stream: Stream, rotations: Sequence[Rotation], batch: ForwardBatch, wanted: Tensor | None = None
    ) -> Stream:
        """Return the stream after the layer, of the `wanted` tokens if given. Only attention needs the others."""
        spec, norms = self._spec, self._spec.norms
        rotation = None if self._rope is None else rotations[self._rope]
        norm = None if norms.before_attention is None else self._modules[norms.before_attention]
        normed = None
        if isinstance(self.self_attn, PlainAttention) and isinstance(norm, RMSNorm) and not spec.is_parallel:
            attended, hidden = self.self_attn.of_stream(stream, norm, rotation, batch)
        else:
            normed, hidden = self._normed(norms.before_attention, stream)
            attended = self.self_attn(normed, rotation, batch)
        if wanted is not None:
            attended, hidden, normed = attended[wanted], hidden[wanted], None if normed is None else normed[wanted]
            if not len(hidden):
                return Stream(hidden)
        if spec.is_parallel:
            stream = self._added(hidden, norms.after_attention, self.self_attn.o_proj(attended))
            hidden = self._ops.total(stream)
            delta = self._mlp(normed)
        else:
            delta, hidden = self._feed_forward(self._attended_onto(hidden, attended))
        return self._added(hidden, norms.after_feed_forward, delta)

    def _attended_onto(self, hidden: Tensor, attended: Tensor) -> Stream:
        """Return the stream with the projected attention output. May overwrite `hidden`."""
        projection, norm = self.self_attn.o_proj, self._spec.norms.after_attention
        if norm is None and self._spec.residual_scale == 1.0:
            return projection.onto(hidden, attended, None)
        return self._added(hidden, norm, projection(attended))

    def _feed_forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the output of the MLP or the experts for the normed stream, the stream's sum)."""
        name = self._spec.norms.before_feed_forward
        norm = None if name is None else self._modules[name]
        if isinstance(self._mlp, PlainExperts) and isinstance(norm, RMSNorm) and not norm.norm.is_plus_one:
            routed = self._mlp.router(stream, norm.norm)
            return self._mlp.sum(routed), routed.hidden
        if isinstance(self._mlp, PlainMLP) and isinstance(norm, RMSNorm):
            return self._mlp.of_stream(stream, norm)
        normed, hidden = self._normed(name, stream)
        return self._mlp(normed), hidden

    def _added(self, hidden: Tensor, norm_name: str | None, delta: Tensor) -> Stream:
        """Return the stream with the normed delta added."""
        norm, scale = None if norm_name is None else self._modules[norm_name], self._spec.residual_scale
        if scale == 1.0 and isinstance(norm, RMSNorm):
            return Stream(hidden, delta, norm.norm)  # the next operation norms it, which may be one kernel for all
        delta = self._norm(norm_name, delta)
        return Stream(hidden, delta) if scale == 1.0 else Stream(torch.add(hidden, delta, alpha=scale))

    @property
    def _mlp(self) -> nn.Module:
        return cast("nn.Module", self._modules[self._spec.feed_forward.name])

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else cast("nn.Module", self._modules[name])(x)

    def _normed(self, name: str | None, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the normed stream, its sum)."""
        norm = None if name is None else self._modules[name]
        if isinstance(norm, RMSNorm):
            return self._ops.norm_stream(stream, norm.norm)
        hidden = self._ops.total(stream)
        return self._norm(name, hidden), hidden


class PlainDecoder(nn.Module):
    """Maps token ids to hidden states after the final norm, for the tokens whose output the batch needs.

    A stage of a pipeline begins with the hidden states that the batch has received, and all but the last end without the norm.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self._ops = ops
        attentions = [layer.attention for layer in config.layers]
        ropes = list(dict.fromkeys(one.rope for one in attentions if one.rope is not None))
        self._embedding_scale: Final = config.scales.embedding
        if stage.has_embedding(config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.rotary_embs = nn.ModuleList(RotaryEmbedding(rope, attentions[0].rope_dim, ops) for rope in ropes)
        self.layers = stage_layers(stage, lambda layer_id: PlainLayer(config, tp, ops, layer_id, ropes))
        if stage.is_last:
            self.norm = make_norm(config.norm, config.hidden_size, ops)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        rotations = [rope(positions) for rope in self.rotary_embs]
        stream = Stream(self._embed(input_ids) if self._stage.is_first else copy_received(batch))
        *layers, last = self.layers
        for number, layer in enumerate(layers):
            note_input(number, stream, batch)
            stream = layer(stream, rotations, batch)
        if not self._stage.is_last:
            return self._ops.total(last(stream, rotations, batch))
        note_input(len(layers), stream, batch)
        features = batch.token_to_kv_pool.features
        if features is not None and features.reads_output:
            outputs = self._output_of(last(stream, rotations, batch))
            features.note_output(outputs, batch.out_cache_loc)
            return outputs if batch.output_tokens is None else outputs[batch.output_tokens]
        ended: Stream = last(stream, rotations, batch, batch.output_tokens)
        return self._output_of(ended) if len(ended.hidden) else ended.hidden

    def _output_of(self, ended: Stream) -> Tensor:
        return self.norm.of_stream(ended) if isinstance(self.norm, RMSNorm) else self.norm(self._ops.total(ended))

    def _embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        if self._embedding_scale != 1.0:
            hidden = hidden * _rounded(self._embedding_scale, hidden.dtype)
        return hidden


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return the value as a tensor of this type holds it."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
