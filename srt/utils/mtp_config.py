"""The layer of a model's own checkpoint that predicts the token after the next (MTP), as a head that drafts. No torch.

DeepSeek V3 stores it behind the model's layers, as `model.layers.<number of layers>`. It is like the layer before it, with norms of what it
reads and of what it gives; its embedding and its output layer are copies of the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's own tensors


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The layer as that of a model of one layer."""

    layer: ModelConfig
    number: int
    """By which the checkpoint names the layer."""

    @property
    def target_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def prefix(self) -> str:
        """The beginning of the names of the layer's tensors."""
        return f"model.layers.{self.number}."


def served_mtp(model: ModelConfig) -> MtpConfig:
    """Return the layer of this model; ModelError if its checkpoint has none that is supported."""
    if model.architecture not in ARCHITECTURES or not model.num_mtp_layers:
        raise ModelError(
            f"--speculative-algorithm NEXTN needs a checkpoint of {', '.join(ARCHITECTURES)} whose config.json has a"
            " num_nextn_predict_layers of at least 1: choose another algorithm."
        )
    if model.implementation == "transformers":
        raise ModelError(
            "--speculative-algorithm NEXTN does not support the layers of the library transformers: leave out --model-impl"
            " transformers, or choose another algorithm."
        )
    layer = replace(model, layers=model.layers[-1:], num_mtp_layers=0)
    return MtpConfig(layer, model.num_layers)
