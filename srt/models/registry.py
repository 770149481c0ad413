"""Map architecture names to classes. A new model is a file beside this one, a line here and one in ModelConfig."""

from __future__ import annotations

from collections.abc import Callable

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops import TORCH_OPS, LayerOps
from srt.models.decoder import CausalLM
from srt.models.llama import LlamaForCausalLM
from srt.models.mistral import MistralForCausalLM
from srt.models.qwen2 import Qwen2ForCausalLM
from srt.models.qwen3 import Qwen3ForCausalLM
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

MODELS: dict[str, Callable[[ModelConfig, TensorParallel, LayerOps], CausalLM]] = {
    model.__name__: model for model in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def build_model(config: ModelConfig, tp: TensorParallel, ops: LayerOps = TORCH_OPS) -> CausalLM:
    """Build this rank's part of the model, with unfilled parameters on the current default device."""
    build = MODELS.get(config.architecture)
    if build is None:
        supported = ", ".join(MODELS)
        raise ModelError(f"The model architecture {config.architecture} is not supported; supported are {supported}.")
    return build(config, tp, ops)
