"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import LayerOps
from srt.models.decoder import CausalLM, Traits
from srt.utils.model_config import ModelConfig


class Qwen2ForCausalLM(CausalLM):
    """Qwen2. It always has biases on q, k and v and on nothing else; config.json does not mention them."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: LayerOps) -> None:
        super().__init__(config, tp, ops, Traits(qkv_bias=True))
