"""Build a model from its configuration."""

from __future__ import annotations

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, LayerOps
from srt.models.decoder import CausalLM
from srt.utils.model_config import ModelConfig


def build_model(config: ModelConfig, tp: TensorParallel, ops: LayerOps = TORCH_OPS) -> CausalLM:
    """Build this rank's part of the model, with unfilled parameters on the current default device."""
    return CausalLM(config, tp, ops)
