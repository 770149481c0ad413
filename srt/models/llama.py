"""Llama 2 to 3.x, and the many models with the same architecture."""

from __future__ import annotations

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import LayerOps
from srt.models.decoder import CausalLM, Traits
from srt.utils.model_config import ModelConfig


class LlamaForCausalLM(CausalLM):
    """Llama. config.json says which layers have biases; usually none."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps) -> None:
        bias = config.attention_bias
        super().__init__(config, tp, ops, Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias))
