"""A head that drafts from a model's hidden states (EAGLE-3): one layer between the model's embedding and an output layer of its own.

Its entry for a token is computed from the token's embedding and a vector for what precedes it: the fused hidden states of the model where
it has run, else the head's own hidden states. Modules are named as in the checkpoints. Every rank has the whole head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from srt.layers.norm import RMSNorm
from srt.layers.ops import LayerOps, Rotation
from srt.layers.rope import RotaryEmbedding
from srt.layers.weights import ColumnPart, WeightedModule, WeightPiece, model_weight_pieces
from srt.models.decoder import GatedMLP
from srt.utils.eagle3_config import NUM_TAPS, Eagle3Config
from srt.utils.layer_spec import FeedForward
from srt.utils.model_error import ModelError

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

ALONE = TensorParallel(0, 1, None, torch.device("cpu"))
IGNORED = ("t2d",)  # says which tokens `d2t` names


class DraftVocabulary(WeightedModule):
    """The tokens that the head's logits are of."""

    own_dtypes = {"offsets": torch.int32}  # noqa: RUF012  # read by the loader

    def __init__(self, size: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.empty(size, dtype=torch.int32), requires_grad=False)

    @property
    def tokens(self) -> Tensor:
        """The id [size] int64 of each draft token."""
        places = torch.arange(len(self.offsets), device=self.offsets.device)
        return places + self.offsets.long()

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        size = len(self.offsets)
        yield WeightPiece("d2t", (size,), self, "offsets", 0, 0, size, 0, is_optional=True)


class Eagle3Attention(nn.Module):
    """Self-attention whose queries, keys and values come from two vectors a token."""

    def __init__(self, config: Eagle3Config, ops: LayerOps) -> None:
        super().__init__()
        spec, size, eps = config.layer.layers[0].self_attention, config.layer.hidden_size, config.layer.norm.eps
        self._ops = ops
        self.qkv_proj = QKVParallelLinear(
            2 * size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qkv_bias, ALONE, ops
        )
        self.q_norm = RMSNorm(spec.head_dim, eps) if spec.norms == "head" else None
        self.k_norm = RMSNorm(spec.head_dim, eps) if spec.norms == "head" else None
        self.attn = RadixAttention(spec.num_heads, spec.head_dim, spec.num_kv_heads, 0, spec.scale)
        self.o_proj = RowParallelLinear(spec.query_width, size, spec.o_bias, ALONE, ops)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.norm, self.k_norm.norm)
        return self._ops.attend(self.qkv_proj(x), norms, rotation, self.attn, batch)


class Eagle3Layer(nn.Module):
    """The one layer: attention over both vectors of each token, and a gated MLP."""

    def __init__(self, config: Eagle3Config, ops: LayerOps) -> None:
        super().__init__()
        size, eps, spec = config.layer.hidden_size, config.layer.norm.eps, config.layer.layers[0].feed_forward
        assert isinstance(spec, FeedForward), "the configuration was checked"
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps, ops)
        self.hidden_norm = RMSNorm(size, eps, ops)
        self.self_attn = Eagle3Attention(config, ops)
        self.post_attention_layernorm = RMSNorm(size, eps, ops)
        self.mlp = GatedMLP(size, spec, ALONE, ops)

    def forward(self, embedded: Tensor, features: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Return the stream behind the layer, of the batch's `output_tokens` if it has some."""
        normed = self.hidden_norm(features)
        hidden = normed if self._norm_before_residual else features
        attended = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), rotation, batch)
        if batch.output_tokens is not None:
            attended, hidden = attended[batch.output_tokens], hidden[batch.output_tokens]
            if not len(hidden):
                return hidden
        stream = self.self_attn.o_proj.onto(hidden, attended, self.post_attention_layernorm)
        return self.mlp(stream, self.post_attention_layernorm, None).total  # type: ignore[no-any-return]  # calls of modules are untyped


class Eagle3Head(nn.Module):
    """Maps tokens and the vectors before them to hidden states; `logits` has the tokens that may follow."""

    def __init__(
        self, config: Eagle3Config, embedding: VocabParallelEmbedding, target_head: ParallelLMHead, ops: LayerOps
    ) -> None:
        """`embedding` and `target_head` are the model's. They serve if the checkpoint has no embedding and no output layer."""
        super().__init__()
        layer, size = config.layer, config.layer.hidden_size
        self._config = config
        self._target = embedding, target_head  # in a tuple, because they are no parts of this module
        inputs = NUM_TAPS * config.target_hidden_size
        self.fc = ColumnParallelLinear(inputs, [ColumnPart("fc", size, 0, size)], bias=False, ops=ops)
        self.input_norm = RMSNorm(inputs, layer.norm.eps, ops) if config.norm_before_fc else None
        self.embed_tokens: VocabParallelEmbedding | None = VocabParallelEmbedding(config.target_vocab_size, size, ALONE)
        self.midlayer = Eagle3Layer(config, ops)
        self.norm = RMSNorm(size, layer.norm.eps, ops)
        self.lm_head: ParallelLMHead | None = ParallelLMHead(layer.vocab_size, size, ALONE, None, ops)
        self.d2t = DraftVocabulary(layer.vocab_size)
        spec = layer.layers[0].self_attention
        assert spec.rope is not None, "the configuration was checked"
        self.rotary_emb = RotaryEmbedding(spec.rope, spec.head_dim, ops)

    def weight_pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of all parameters, by their names in the checkpoint. What it has not `stored` is the model's.

        None stands for random weights, which have an output layer but no embedding.
        """
        names = {"lm_head.weight"} if stored is None else set(stored)
        config, layer = self._config, self._config.layer
        is_alike = layer.hidden_size == config.target_hidden_size
        if "embed_tokens.weight" not in names and is_alike:
            self.embed_tokens = None
        if "lm_head.weight" not in names and is_alike and layer.vocab_size == config.target_vocab_size:
            self.lm_head = None
        if stored is not None and "d2t" not in names and layer.vocab_size != config.target_vocab_size:
            raise ModelError("The head's checkpoint lacks d2t, which says of which tokens its logits are.")
        pieces = model_weight_pieces(self)
        if any(name.startswith("layers.0.") for name in names):
            pieces = [replace(piece, name=piece.name.replace("midlayer.", "layers.0.", 1)) for piece in pieces]
        return pieces

    def check_vocabulary(self) -> None:
        """Raise ModelError if d2t names a token that the model does not have."""
        tokens, size = self.d2t.tokens, self._config.target_vocab_size
        if self.lm_head is not None and bool(((tokens < 0) | (tokens >= size)).any()):
            raise ModelError(f"The head's d2t names tokens outside the model's vocabulary of {size}.")

    def fuse(self, inputs: Tensor) -> Tensor:
        """Return one vector for the concatenated hidden states of the model at each token."""
        return self.fc(inputs if self.input_norm is None else self.input_norm(inputs))  # type: ignore[no-any-return]

    @property
    def fuse_weights(self) -> tuple[Tensor, Tensor | None, float]:
        """The matrix with which `fuse` multiplies, and the norm before it, for compiled code."""
        matrix, norm = self.fc.affine.matrix, self.input_norm
        assert matrix is not None, "heads have plain weights"
        return matrix, None if norm is None else norm.weight, self._config.layer.norm.eps

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of tokens whose vectors before them are what `batch` has received."""
        embed = self._target[0] if self.embed_tokens is None else self.embed_tokens
        return self.midlayer(embed(input_ids), batch.received, self.rotary_emb(positions), batch)  # type: ignore[no-any-return]

    def next_features(self, hidden: Tensor) -> Tensor:
        """Return the vectors with which a chain goes on behind these hidden states."""
        return self.norm(hidden) if self._config.norm_output else hidden

    @property
    def output_layer(self) -> ParallelLMHead:
        return self._target[1] if self.lm_head is None else self.lm_head

    @property
    def embedding(self) -> Tensor:
        """This rank's part of the embedding."""
        return (self._target[0] if self.embed_tokens is None else self.embed_tokens).weight

    @property
    def known_tokens(self) -> Tensor:
        """The ids that the logits are of."""
        size = self.output_layer.weight.shape[0]
        return self.d2t.tokens if self.lm_head is not None else torch.arange(size, device=self.embedding.device)

    @property
    def covers_all(self) -> bool:
        """Whether the logits are those of the model's whole vocabulary, in its order."""
        if self.lm_head is None:
            return True
        tokens = self.d2t.tokens
        is_whole = len(tokens) == self._config.target_vocab_size
        return is_whole and bool((tokens == torch.arange(len(tokens), device=tokens.device)).all())
