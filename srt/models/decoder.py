"""The decoder that Llama, Mistral, Qwen2 and Qwen3 have in common: pre-norm, rotary grouped-query attention, gated MLP.

Modules are named as in the checkpoints, so that a parameter's path is its tensor's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.activation import silu_and_mul
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from srt.layers.norm import RMSNorm
from srt.layers.rope import RotaryEmbedding, Rotation, rotate
from srt.utils.model_config import ModelConfig

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True)
class Traits:
    """Where the architectures differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotation."""


class Attention(nn.Module):
    """Self-attention of the heads of this rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, traits: Traits, layer_id: int) -> None:
        super().__init__()
        head_dim = config.head_dim
        self._head_dim = head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, head_dim, traits.qkv_bias, tp
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if traits.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if traits.qk_norm else None
        self.attn = RadixAttention(
            num_heads=self.qkv_proj.num_heads,
            head_dim=head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            layer_id=layer_id,
            scale=head_dim**-0.5,
        )
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, config.hidden_size, traits.o_bias, tp)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        q, k = q.unflatten(-1, (-1, self._head_dim)), k.unflatten(-1, (-1, self._head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotation).flatten(1), rotate(k, rotation).flatten(1)
        return self.o_proj(self.attn(q, k, v, batch))  # type: ignore[no-any-return]  # calls of modules are untyped


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, traits: Traits) -> None:
        super().__init__()
        size = config.intermediate_size
        outputs = (("gate_proj", size), ("up_proj", size))
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, outputs, traits.mlp_bias, tp)
        self.down_proj = RowParallelLinear(size, config.hidden_size, traits.mlp_bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normed hidden states and added to them."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, traits: Traits, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, tp, traits, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, tp, traits)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids → hidden states after the final norm."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, traits: Traits) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, tp, traits, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        rotation = self.rotary_emb(positions)
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch)
        return self.norm(hidden)  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    """A decoder and its output layer. The subclass is the architecture: it states the traits."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, traits: Traits) -> None:
        super().__init__()
        self.model = Decoder(config, tp, traits)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """[tokens] ids and positions → [tokens, hidden_size], the same on every rank; logits come from `lm_head`.

        Call under `torch.inference_mode()`, on all ranks together.
        """
        return self.model(input_ids, positions, batch)  # type: ignore[no-any-return]
