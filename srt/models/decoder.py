"""The decoder of families with fused kernels, such as Llama and Qwen: pre-norm, rotary grouped-query attention, gated MLP.

Modules are named as in the checkpoints, so that a parameter's path is its tensor's name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, cast

from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.embedding import VocabParallelEmbedding
from srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, sum_onto
from srt.layers.moe.mixture import Mixture
from srt.layers.norm import RMSNorm
from srt.layers.ops import LayerOps, Norm, Rotation, Routed, Stream
from srt.layers.rope import RotaryEmbedding
from srt.models.stage_layers import copy_received, note_input, stage_layers
from srt.utils.layer_spec import Experts, FeedForward
from srt.utils.model_config import ModelConfig
from srt.utils.pipeline_stage import Stage

if TYPE_CHECKING:
    from srt.distributed.row_division import RowDivision
    from srt.model_executor.forward_batch_info import ForwardBatch


DIVIDED_PRODUCTS: Final = 5e11
"""Multiplications of a layer on a rank from which on two ranks divide the rows of a step: 4,585 rows of Llama-3.1-8B. With fewer the
device may end a divided layer, which takes 1.6 ms to launch (measured on a host of H200s), before the next one is launched."""


class Attention(nn.Module):
    """Self-attention of this rank's heads."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, layer_id: int) -> None:
        super().__init__()
        spec, eps = config.layers[layer_id].self_attention, config.norm.eps
        self._ops = ops
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qkv_bias, tp, ops
        )
        self.q_norm = RMSNorm(spec.head_dim, eps) if spec.norms == "head" else None
        self.k_norm = RMSNorm(spec.head_dim, eps) if spec.norms == "head" else None
        self.attn = RadixAttention(
            num_heads=self.qkv_proj.num_heads,
            head_dim=spec.head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            layer_id=layer_id,
            scale=spec.scale,
            window=spec.window,
        )
        self.o_proj = RowParallelLinear(spec.query_width, config.hidden_size, spec.o_bias, tp, ops)

    def forward(self, stream: Stream, norm: RMSNorm, rotation: Rotation, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (the heads' output for the normed stream, the stream's sum); the caller applies `o_proj`."""
        return self._ops.attend_stream(
            stream, norm.norm, self.qkv_proj.affine, self.head_norms, rotation, self.attn, batch
        )

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """The norms of query heads and of key heads, if the architecture has them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.norm, self.k_norm.norm


class GatedMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: FeedForward, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        outputs = (("gate_proj", spec.size), ("up_proj", spec.size))
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, outputs, spec.bias, tp, ops)
        self.down_proj = RowParallelLinear(spec.size, hidden_size, spec.bias, tp, ops)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        activated, hidden = self.gate_up_proj.gated_of_norm(stream, norm)
        return self.down_proj.onto(hidden, activated, next_norm, stream.division)


class ExpertMLP(Mixture):
    """A mixture of experts in the place of the MLP."""

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        routed = cast("Routed", self.router(stream, norm.norm))
        if self._exchange is not None:
            return Stream(routed.hidden, self.sum(routed))
        weights = self.complete_weights(routed)
        if self._tp.size > 1 or weights is None:
            return sum_onto(self._tp, self._ops, routed.hidden, self.summand(routed), next_norm)
        return self._ops.experts_onto(routed, weights, None if next_norm is None else next_norm.norm)


class DecoderLayer(nn.Module):
    """Attention and MLP; each reads the normed stream, and its result is added to the stream."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm.eps)
        self.self_attn = Attention(config, tp, ops, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm.eps)
        feed_forward = config.layers[layer_id].feed_forward
        self._mlp_name = feed_forward.name
        self.add_module(feed_forward.name, _mlp_of(config.hidden_size, feed_forward, tp, ops))

    def attend(self, stream: Stream, rotation: Rotation, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (the attention output, the stream's sum). The rest of the layer treats every token on its own."""
        return self.self_attn(stream, self.input_layernorm, rotation, batch)  # type: ignore[no-any-return]  # calls of modules are untyped

    def add(self, attended: Tensor, hidden: Tensor, division: RowDivision | None = None) -> Stream:
        """Return the stream with the attention output added."""
        return self.self_attn.o_proj.onto(hidden, attended, self.post_attention_layernorm, division)

    def finish(self, stream: Stream, next_norm: RMSNorm | None) -> Stream:
        """Run the rest of the layer. `next_norm` is the next layer's first norm, if there is a next layer."""
        mlp = cast("nn.Module", self._modules[self._mlp_name])
        return mlp(stream, self.post_attention_layernorm, next_norm)  # type: ignore[no-any-return]

    @property
    def can_divide_rows(self) -> bool:
        """Whether two ranks may divide the rows of the layer's sums."""
        mlp = self._modules[self._mlp_name]
        return isinstance(mlp, GatedMLP) and mlp.down_proj.can_divide_rows and self.self_attn.o_proj.can_divide_rows

    @property
    def gated_mlp(self) -> GatedMLP:
        """The MLP of a layer without experts."""
        return cast("GatedMLP", self.mlp)


class Decoder(nn.Module):
    """Maps token ids to hidden states after the final norm, for the tokens whose output the batch needs.

    A stage of a pipeline begins with the hidden states that the batch has received, and all but the last end without the norm.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self._tp = tp
        self._norms_while_summing = ops.norms_while_summing
        if stage.has_embedding(config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        first = config.layers[0].self_attention  # all layers have the same rotation
        assert first.rope is not None, "layers without a rotation have no fast paths"
        self.rotary_emb = RotaryEmbedding(first.rope, first.head_dim, ops)
        self.layers = stage_layers(stage, lambda layer_id: DecoderLayer(config, tp, ops, layer_id))
        self._layer_weights = sum(weight.numel() for weight in next(self.layers.children()).parameters())
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.norm.eps, ops)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        rotation = self.rotary_emb(positions)
        hidden = self.embed_tokens(input_ids) if self._stage.is_first else copy_received(batch)
        layers = cast("list[DecoderLayer]", list(self.layers))
        division = self._division(hidden, layers, batch)
        stream, last = Stream(hidden, division=division), layers[-1]
        for number, (layer, following) in enumerate(pairwise(layers)):
            note_input(number, stream, batch)
            stream = layer.add(*layer.attend(stream, rotation, batch), division)
            stream = layer.finish(stream, following.input_layernorm)
        if not self._stage.is_last:
            return last.finish(last.add(*last.attend(stream, rotation, batch)), None).total
        note_input(len(layers) - 1, stream, batch)
        taken = _of_tokens(batch.output_tokens, *last.attend(stream, rotation, batch))
        if not len(taken[1]):
            return taken[1]
        if division is not None and batch.output_tokens is not None:
            taken = taken[0], self._tp.all_reduce(division.zero_others(taken[1], batch.output_tokens))
        stream = last.add(*taken)
        del taken  # frees memory for the MLP, which needs the most
        return self.norm.of_stream(last.finish(stream, None))

    def _division(self, hidden: Tensor, layers: list[DecoderLayer], batch: ForwardBatch) -> RowDivision | None:
        """Return how two ranks divide the rows of this step; None if they do not. The last layer's sums are whole."""
        num_rows, columns = hidden.shape
        if self._tp.size == 1 or num_rows * self._layer_weights < DIVIDED_PRODUCTS:
            return None
        is_whole = self._stage.is_first and self._stage.is_last
        reads_all = batch.output_tokens is None or batch.token_to_kv_pool.features is not None
        if not is_whole or batch.is_captured or reads_all or not self._norms_while_summing:
            return None
        if not all(layer.can_divide_rows for layer in layers):
            return None
        return self._tp.divide(num_rows, columns, hidden.dtype)


def _mlp_of(hidden_size: int, spec: FeedForward | Experts, tp: TensorParallel, ops: LayerOps) -> nn.Module:
    if isinstance(spec, Experts):
        return ExpertMLP(hidden_size, spec, tp, ops)
    return GatedMLP(hidden_size, spec, tp, ops)


def _of_tokens(wanted: Tensor | None, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return (attended, hidden) if wanted is None else (attended[wanted], hidden[wanted])
