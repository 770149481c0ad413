"""Qwen3, dense."""

from __future__ import annotations

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import LayerOps
from srt.models.decoder import CausalLM, Traits
from srt.utils.model_config import ModelConfig


class Qwen3ForCausalLM(CausalLM):
    """Qwen3. It norms queries and keys per head, instead of Qwen2's biases."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps) -> None:
        bias = config.attention_bias
        super().__init__(config, tp, ops, Traits(qkv_bias=bias, o_bias=bias, qk_norm=True))
