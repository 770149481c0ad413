"""Mistral. v0.1 attends within a sliding window, later versions to all positions."""

from __future__ import annotations

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import LayerOps
from srt.models.decoder import CausalLM, Traits
from srt.utils.model_config import ModelConfig


class MistralForCausalLM(CausalLM):
    """Mistral, which has no biases."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__(config, tp, ops, Traits())
