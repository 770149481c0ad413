"""A layer that predicts the token after the next from a model's output and the next token (MTP), as a head that drafts.

Modules are named as in the checkpoint. Ranks share the layer as they share those of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.linear import ColumnParallelLinear
from srt.layers.moe.mixture import find_stacked_experts
from srt.layers.norm import RMSNorm
from srt.layers.ops import LayerOps, Stream
from srt.layers.quantization.formats import use_formats
from srt.layers.rope import RotaryEmbedding
from srt.layers.weights import ColumnPart, WeightPiece, model_weight_pieces
from srt.models.plain_decoder import PlainLayer
from srt.utils.mtp_config import MtpConfig

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class SharedHead(nn.Module):
    """The norm before the output layer, which is the model's."""

    def __init__(self, config: MtpConfig, ops: LayerOps) -> None:
        super().__init__()
        self.norm = RMSNorm(config.layer.hidden_size, config.layer.norm.eps, ops)


class MtpLayer(PlainLayer):
    """A layer of the model, with what makes its input of two vectors, and the norm of its output."""

    eh_proj: ColumnParallelLinear

    def __init__(self, config: MtpConfig, tp: TensorParallel, ops: LayerOps) -> None:
        layer = config.layer
        rope = layer.layers[0].attention.rope
        assert rope is not None, "the configuration was checked"
        super().__init__(layer, tp, ops, 0, [rope])
        self.enorm = RMSNorm(layer.hidden_size, layer.norm.eps, ops)
        self.hnorm = RMSNorm(layer.hidden_size, layer.norm.eps, ops)
        self.shared_head = SharedHead(config, ops)


class MtpHead(nn.Module):
    """Maps tokens and the model's output at the tokens before them to hidden states; `output_layer` has the tokens that may follow."""

    lm_head: None = None  # the model's serves

    def __init__(
        self,
        config: MtpConfig,
        embedding: VocabParallelEmbedding,
        target_head: ParallelLMHead,
        tp: TensorParallel,
        ops: LayerOps,
    ) -> None:
        """`embedding` and `target_head` are the model's."""
        super().__init__()
        size, attention = config.layer.hidden_size, config.layer.layers[0].attention
        assert attention.rope is not None, "the configuration was checked"
        self._target = embedding, target_head  # in a tuple, because they are no parts of this module
        self._ops = ops
        layer = MtpLayer(config, tp, ops)
        self._layer = (layer,)  # likewise: as a part it is where the checkpoint has it
        layers = nn.ModuleList()
        layers.add_module(str(config.number), layer)
        self.model = nn.ModuleDict({"layers": layers})
        self.rotary_emb = RotaryEmbedding(attention.rope, attention.rope_dim, ops)
        use_formats(self, config.layer.weight_formats)
        # Never quantised, whatever the formats say.
        layer.eh_proj = ColumnParallelLinear(2 * size, [ColumnPart("eh_proj", size, 0, size)], bias=False, ops=ops)

    def weight_pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of all parameters, by their names in the checkpoint, which has `stored` these names."""
        find_stacked_experts(self, stored or ())
        return model_weight_pieces(self)

    def fuse(self, outputs: Tensor) -> Tensor:
        """Return the model's output at each token as it is."""
        return outputs

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of tokens whose vectors before them are what `batch` has received."""
        (layer,) = self._layer
        both = torch.cat((layer.enorm(self._target[0](input_ids)), layer.hnorm(batch.received)), dim=-1)
        stream = layer(Stream(layer.eh_proj(both)), [self.rotary_emb(positions)], batch, batch.output_tokens)
        return self._ops.total(stream)

    @property
    def norm(self) -> RMSNorm:
        """The norm before the output layer."""
        return self._layer[0].shared_head.norm

    def next_features(self, hidden: Tensor) -> Tensor:
        """Return the vectors with which a chain goes on behind these hidden states: normed, as the model's output is."""
        return self.norm(hidden)  # type: ignore[no-any-return]  # calls of modules are untyped

    @property
    def output_layer(self) -> ParallelLMHead:
        return self._target[1]

    @property
    def fuse_weights(self) -> None:
        """There are none."""
        return None
