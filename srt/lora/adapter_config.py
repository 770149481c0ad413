"""adapter_config.json of PEFT: ranks and scales of an adapter's layers. What is not supported is refused by its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from srt.utils.config_values import shown
from srt.utils.model_error import ModelError

T = TypeVar("T")
CONFIG_FILE: Final = "adapter_config.json"
MOST_RANK: Final = 4096

# Keys that change what an adapter computes, and a name for what they ask for. Each must be absent, null, false or empty.
_REFUSED: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of its matrices (lora_bias)",
    "fan_in_fan_out": "layers that are stored transposed (fan_in_fan_out)",
    "modules_to_save": "layers that replace the model's (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "target_parameters": "changes of parameters that are no layers, such as stacked experts (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "megatron_config": "Megatron's layers (megatron_config)",
}
# Ways to begin the training that also change the model's own weights, so that the adapter alone is not what was trained.
_REFUSED_INITS: Final = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales by layer."""

    rank: int
    alpha: float
    by_root: bool
    """Whether the scale is alpha / sqrt(rank), as rank-stabilised LoRA has it, in place of alpha / rank."""
    ranks: Mapping[str, int]
    """By pattern of layers' paths."""
    alphas: Mapping[str, float]

    def rank_of(self, path: str) -> int:
        return _by_pattern(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """Return the factor of a layer's B A x."""
        rank = self.rank_of(path)
        return _by_pattern(self.alphas, path, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def parse_config(text: bytes) -> AdapterConfig:
    """Return what the file says; raise ModelError, with a sentence, if that is not supported."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG_FILE} is not JSON.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{CONFIG_FILE} must be a JSON object.")
    _check_supported(raw)
    by_root = raw.get("use_rslora") or False
    if type(by_root) is not bool:
        raise ModelError(f"{CONFIG_FILE}: use_rslora must be true or false, not {shown(by_root)}.")
    rank = _rank("r", raw.get("r"))
    alpha = _alpha("lora_alpha", raw.get("lora_alpha", 8))
    ranks = {name: _rank("rank_pattern", value) for name, value in _patterns(raw, "rank_pattern").items()}
    alphas = {name: _alpha("alpha_pattern", value) for name, value in _patterns(raw, "alpha_pattern").items()}
    return AdapterConfig(rank, alpha, by_root, ranks, alphas)


def read_config_file(folder: Path) -> bytes:
    try:
        return (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise ModelError(
            f"{folder} has no {CONFIG_FILE} that can be read ({error.strerror}): give a folder that PEFT has saved."
        ) from error


def _check_supported(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"The adapter is of the kind {shown(kind)}, and only LORA is supported.")
    for key, name in _REFUSED.items():
        if raw.get(key):
            raise ModelError(f"The adapter has {name}, which is not supported.")
    if raw.get("bias") not in (None, "none"):
        raise ModelError(f"The adapter has biases (bias {shown(raw['bias'])}), which is not supported.")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_REFUSED_INITS):
        raise ModelError(
            f"The adapter was begun with {init}, which changes the model's weights too: convert it to plain LoRA first."
        )


def _by_pattern(values: Mapping[str, T], path: str, default: T) -> T:
    """Return the value of the first pattern that fits the end of the path, as PEFT looks it up."""
    for pattern, value in values.items():
        form = pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})$"
        if re.match(form, path):
            return value
    return default


def _patterns(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{CONFIG_FILE}: {key} must be an object, not {shown(patterns)}.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{CONFIG_FILE}: {key} has {shown(pattern)}, which is no pattern of names.") from error
    return patterns


def _rank(key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RANK:
        raise ModelError(f"{CONFIG_FILE}: {key} must have ranks from 1 to {MOST_RANK}, not {shown(value)}.")
    return value


def _alpha(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ModelError(f"{CONFIG_FILE}: {key} must have numbers, not {shown(value)}.")
    return float(value)
