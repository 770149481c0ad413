"""A language model: a decoder and its output layer, which is a classifier's in models that score texts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.embedding import ParallelLMHead
from srt.layers.moe.mixture import find_stacked_experts
from srt.layers.ops import LayerOps
from srt.layers.pooler import ScoreHead
from srt.layers.quantization.formats import formats_in, use_formats
from srt.layers.weights import WeightPiece, model_weight_pieces
from srt.models.decoder import Decoder
from srt.models.plain_decoder import PlainDecoder
from srt.utils.layer_spec import num_distinct_layers
from srt.utils.model_config import ModelConfig
from srt.utils.pipeline_stage import Stage

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


PREFIX = "model."


class CausalLM(nn.Module):
    """The model of any family. Layers that declare the fused path are built for it, others plainly."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps, stage: Stage | None = None) -> None:
        """Build the layers of a stage, or all of them. Only the last stage of a pipeline has an `lm_head`."""
        super().__init__()
        stage = stage or Stage.whole(config.num_layers)
        self.model: Decoder | PlainDecoder
        kind = Decoder if "fused" in config.fast_paths else PlainDecoder
        self.model = kind(config, tp, ops, stage)
        labels = () if config.pooling is None else config.pooling.labels
        self._pools = config.pooling is not None
        self.score = ScoreHead(config.hidden_size, len(labels)) if labels else None
        if stage.is_last:
            tied = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied, ops, config.scales)
        use_formats(self, config.weight_formats)
        specs, layers = config.layers[stage.layers.start : stage.layers.stop], self.model.layers.named_children()
        formats = [formats_in(layer, f"{PREFIX}layers.{name}", config.weight_formats) for name, layer in layers]
        self.num_distinct_layers = num_distinct_layers(specs, formats)
        """How many of the first layers use all kernels."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return hidden states [tokens with output, hidden_size], the same on every rank; `lm_head` turns them into logits.

        Those of a stage before the last one are those of all tokens, for the next stage.

        Call it under `torch.inference_mode()`, on all ranks together.
        """
        return self.model(input_ids, positions, batch)  # type: ignore[no-any-return]

    def weight_pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of all parameters. A checkpoint saved without its head has `stored` them without the decoder's prefix."""
        find_stacked_experts(self, stored or ())
        pieces = model_weight_pieces(self)
        if not self._pools or stored is None or any(name.startswith(PREFIX) for name in stored):
            return pieces
        return [replace(piece, name=piece.name.removeprefix(PREFIX)) for piece in pieces]

    @property
    def weights_per_layer(self) -> int:
        """The number of weights of a layer, on average."""
        layers = self.model.layers
        return sum(weight.numel() for weight in layers.parameters()) // len(layers)

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Inside, run only this many of the first layers."""
        layers = self.model.layers
        self.model.layers = layers[:num_layers]
        try:
            yield
        finally:
            self.model.layers = layers
