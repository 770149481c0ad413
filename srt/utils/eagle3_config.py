"""The heads that draft from a model's hidden states (EAGLE-3): config.json of both formats, as numbers. No torch.

The first format names LlamaForCausalLMEagle3 as its architecture, the other, of the library speculators, has the values of the layer in
`transformer_layer_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from srt.utils.config_values import flag, mapping, names, positive_int, shown
from srt.utils.layer_spec import NO_SCALES, FeedForward
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head with one layer, whose attention reads the embedding of a token and the hidden states before it."""

    layer: ModelConfig
    """The layer as that of a model of one layer. The vocabulary is that of the drafts."""
    target_hidden_size: int
    target_vocab_size: int
    stated_taps: tuple[int, ...]
    """Layers of the model whose inputs the head reads, if the configuration names them."""
    norm_before_fc: bool = False
    """Whether the hidden states of the model are normed before they are fused."""
    norm_before_residual: bool = False
    """Whether the layer's stream begins with the normed hidden states."""
    norm_output: bool = False
    """Whether a chain goes on from the normed output of the layer."""

    @classmethod
    def from_folder(cls, path: str | Path) -> Eagle3Config:
        """Read the folder; ModelError for anything wrong or unsupported."""
        folder = Path(path)
        raw = _read(folder / "config.json")
        if "transformer_layer_config" in raw:
            return _of_speculators(folder, raw)
        architecture = next(iter(names(raw, "architectures")), None)
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{folder} is no EAGLE-3 head: its config.json names the architecture {architecture}, not {ARCHITECTURES[0]}."
            )
        eagle = mapping(raw, "eagle_config") if raw.get("eagle_config") else {}
        if eagle.get("use_aux_hidden_state") is False:
            raise ModelError("config.json: a head that reads no hidden states of three layers is not supported.")
        # This format names layers by their outputs, which are the inputs of the next ones.
        taps = tuple(layer + 1 for layer in _layer_ids(eagle))
        return _made(folder, raw, raw, "LlamaForCausalLM", taps, {**raw, **eagle})

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads, in a model of this many layers; ModelError if it has not got them."""
        taps = self.stated_taps or (2, num_layers // 2, num_layers - 3)
        if len(taps) != NUM_TAPS or not all(0 <= tap < num_layers for tap in taps):
            raise ModelError(f"The head reads the inputs of layers {taps}, which a model of {num_layers} layers lacks.")
        return taps


def _of_speculators(folder: Path, raw: Mapping[str, Any]) -> Eagle3Config:
    if raw.get("speculators_model_type") != "eagle3":
        raise ModelError(
            f"{folder}: speculators_model_type {shown(raw.get('speculators_model_type'))} is no EAGLE-3 head."
        )
    layer = mapping(raw, "transformer_layer_config")
    model_type = layer.get("model_type", "llama")
    if model_type not in LAYER_ARCHITECTURES:
        raise ModelError(f"config.json: a head whose layer is one of {shown(model_type)} is not supported.")
    dtype = {"dtype": raw.get("dtype") or raw.get("torch_dtype") or layer.get("dtype") or layer.get("torch_dtype")}
    taps = tuple(_layer_ids(raw))
    return _made(folder, raw, {**layer, **dtype}, LAYER_ARCHITECTURES[model_type], taps, raw)


def _made(
    folder: Path,
    raw: Mapping[str, Any],
    layer: Mapping[str, Any],
    architecture: str,
    taps: tuple[int, ...],
    flags: Mapping[str, Any],
) -> Eagle3Config:
    vocab_size = positive_int(layer, "vocab_size")
    num_layers = positive_int(layer, "num_hidden_layers", 1)
    if num_layers != 1:
        raise ModelError(f"config.json: an EAGLE-3 head of {num_layers} layers is not supported, only of 1.")
    if flags.get("fc_norm"):
        raise ModelError("config.json: fc_norm is not supported, only norm_before_fc.")
    draft_vocab = positive_int(raw, "draft_vocab_size") if raw.get("draft_vocab_size") else vocab_size
    if draft_vocab > vocab_size:
        raise ModelError(f"config.json: draft_vocab_size {draft_vocab} is larger than vocab_size, {vocab_size}.")
    values = {
        **layer,
        "num_hidden_layers": 1,
        "vocab_size": draft_vocab,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    values.setdefault("max_position_embeddings", 2048)
    config = ModelConfig.of_values(folder, architecture, values)
    (spec,) = config.layers
    plain = isinstance(spec.feed_forward, FeedForward) and spec.self_attention.window is None
    if not plain or config.scales != NO_SCALES or not config.weight_formats.is_plain:
        raise ModelError(
            f"{folder}: only heads with full attention, a gated MLP and unquantised weights are supported."
        )
    return Eagle3Config(
        layer=config,
        target_hidden_size=positive_int(raw, "target_hidden_size", config.hidden_size)
        if raw.get("target_hidden_size")
        else config.hidden_size,
        target_vocab_size=vocab_size,
        stated_taps=taps,
        norm_before_fc=flag(flags, "norm_before_fc"),
        norm_before_residual=flag(flags, "norm_before_residual"),
        norm_output=flag(flags, "norm_output"),
    )


def _layer_ids(raw: Mapping[str, Any]) -> list[int]:
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelError(f"config.json: eagle_aux_hidden_state_layer_ids must list layers, not {shown(ids)}.")
    return ids


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def served_head(path: str | Path, model: ModelConfig) -> Eagle3Config:
    """Read a head for this model, with its context; ModelError if it does not fit."""
    config = Eagle3Config.from_folder(path)
    if config.target_hidden_size != model.hidden_size:
        raise ModelError(
            f"The head {path} reads hidden states of {config.target_hidden_size} values, and the model's have"
            f" {model.hidden_size}: choose the head of this model."
        )
    if config.target_vocab_size != model.vocab_size:
        raise ModelError(
            f"The head {path} is one for a vocabulary of {config.target_vocab_size} tokens, and the model's has {model.vocab_size}:"
            " choose the head of this model."
        )
    config.taps(model.num_layers)
    return replace(config, layer=replace(config.layer, context_length=model.context_length))
