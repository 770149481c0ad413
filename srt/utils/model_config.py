"""What a checkpoint folder says about its model: config.json of any age and generation_config.json. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.utils.model_error import ModelError as ModelError
from srt.utils.rope_config import RopeConfig, read_rope, rope_parameters

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What `srt.models.registry` can build; known here so that start-up can refuse the rest without torch."""

DTYPES = ("float32", "bfloat16", "float16")

READ_KEYS = frozenset(
    "architectures model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " intermediate_size vocab_size hidden_act rms_norm_eps tie_word_embeddings attention_bias mlp_bias"
    " max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling rope_theta"
    " partial_rotary_factor use_sliding_window sliding_window max_window_layers layer_types quantization_config dtype"
    " torch_dtype bos_token_id eos_token_id num_nextn_predict_layers".split()
)
"""The keys of config.json that have an effect: an override of any other is refused, it would be ignored."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as it will run, with every default resolved and every override applied. The same on all ranks."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    """As config.json has it; architectures whose biases are fixed say so in their own file."""
    mlp_bias: bool
    rope: RopeConfig
    max_position_embeddings: int
    context_length: int
    """The most positions a request may have, prompt and output together."""
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int
    """Extra layers for multi-token prediction that the checkpoint may hold; they are not loaded."""
    sampling_defaults: dict[str, float | int]
    """What generation_config.json wants for requests that do not say: some of temperature, top_k, top_p, min_p, repetition_penalty."""

    @classmethod
    def from_folder(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, context_length: int | None = None
    ) -> ModelConfig:
        """Read the folder, with `overrides` laid over config.json; ModelError for whatever is wrong or not supported."""
        folder = Path(path)
        raw = _read_config(folder, overrides or {})
        generation = _read_json(folder / "generation_config.json", required=False)
        reader = _Reader(raw)
        architecture = _architecture(raw)
        max_position_embeddings = reader.positive_int("max_position_embeddings")
        rope = read_rope(raw["rope_parameters"], raw, max_position_embeddings)
        num_heads = reader.positive_int("num_attention_heads")
        hidden_size = reader.positive_int("hidden_size")
        config = cls(
            architecture=architecture,
            model_type=str(raw.get("model_type") or ""),
            hidden_size=hidden_size,
            num_layers=reader.positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=reader.positive_int("num_key_value_heads", num_heads),
            head_dim=reader.positive_int("head_dim", _default_head_dim(architecture, hidden_size, num_heads)),
            intermediate_size=reader.positive_int("intermediate_size"),
            vocab_size=reader.positive_int("vocab_size"),
            rms_norm_eps=reader.positive_float("rms_norm_eps", 1e-6),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=reader.flag("attention_bias"),
            mlp_bias=reader.flag("mlp_bias"),
            rope=rope,
            max_position_embeddings=max_position_embeddings,
            context_length=_context_length(context_length, max_position_embeddings, rope),
            torch_dtype=_dtype(raw),
            bos_token_id=_first(_token_ids("config.json", raw, "bos_token_id")),
            eos_token_ids=_token_ids("generation_config.json", generation, "eos_token_id")
            or _token_ids("config.json", raw, "eos_token_id"),
            num_mtp_layers=reader.count("num_nextn_predict_layers"),
            sampling_defaults=_sampling_defaults(generation),
        )
        config._check_shape()
        _refuse_unsupported(raw, config)
        return config

    def config_hash(self) -> str:
        """A hash that is equal in two processes exactly when all of the above is; compared in the handshake."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_tp(self, tp_size: int) -> None:
        """Raise ModelError if the layers cannot be split over `tp_size` ranks."""
        if self.num_heads % tp_size:
            raise ModelError(f"--tp {tp_size} does not divide the model's {self.num_heads} query heads.")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ModelError(
                f"--tp {tp_size} neither divides the model's {self.num_kv_heads} KV heads nor is a multiple of them."
            )
        if self.intermediate_size % tp_size:
            raise ModelError(f"--tp {tp_size} does not divide the model's intermediate size, {self.intermediate_size}.")

    def num_kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads in one rank's memory: heads are replicated where ranks exceed them."""
        return max(1, self.num_kv_heads // tp_size)

    def _check_shape(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly."
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {self.head_dim}.")


class _Reader:
    """Typed access to config.json: every value that is not what it should be is a ModelError that names the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no {key}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}.")
        return value

    def count(self, key: str) -> int:
        return self.positive_int(key) if self._raw.get(key) else 0

    def positive_float(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {key} must be a positive number, not {value!r}.")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"config.json: {key} must be true or false, not {value!r}.")
        return bool(value)


def _read_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the overrides on top; all that RoPE needs is in `rope_parameters`."""
    unread = sorted(set(overrides) - READ_KEYS)
    if unread:
        raise ModelError(f"--json-model-override-args: {unread[0]} has no effect on any supported model.")
    stated = _read_json(folder / "config.json", required=True)
    raw = {**stated, **overrides, "rope_parameters": rope_parameters(stated, overrides)}
    if "torch_dtype" in overrides and "dtype" not in overrides:
        raw["dtype"] = overrides["torch_dtype"]
    return raw


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}: it is not a Hugging Face checkpoint folder.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError("config.json names no model in architectures.")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"The model architecture {names[0]} is not supported; supported are {supported}.")
    return names[0]


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    return 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads


def _context_length(asked: int | None, max_position_embeddings: int, rope: RopeConfig) -> int:
    """What the model states, unless the user asks for less, or for more that the RoPE scaling was made for."""
    limit = rope.context_limit(max_position_embeddings)
    if asked is None:
        return max_position_embeddings
    if asked < 1:
        raise ModelError(f"--context-length must be at least 1, not {asked}.")
    if asked > limit:
        raise ModelError(f"--context-length {asked} is more than the {limit} positions that the model was made for.")
    return asked


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {value!r} is not supported; supported are {', '.join(DTYPES)}.")
    return name


def _token_ids(file: str, raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{file}: {key} must be a token id or a list of them, not {value!r}.")
    return tuple(dict.fromkeys(ids))


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The repetition penalty always; the rest only if the file wants sampling at all, as in transformers."""
    keys = ["repetition_penalty"]
    if generation.get("do_sample"):
        keys += ["temperature", "top_k", "top_p", "min_p"]
    defaults: dict[str, float | int] = {}
    for key in keys:
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ModelError(f"generation_config.json: {key} must be a number of at least 0, not {value!r}.")
        defaults[key] = value
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1  # transformers' way to say that the filter is off
    return defaults


def _refuse_unsupported(raw: Mapping[str, Any], config: ModelConfig) -> None:
    if raw.get("quantization_config"):
        method = (
            raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else None
        )
        raise ModelError(f"Quantized checkpoints are not supported (config.json: quantization_config {method or ''}).")
    if raw.get("hidden_act") not in (None, "silu"):
        raise ModelError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'.")
    window = _sliding_window(raw, config)
    if window is not None and window < config.context_length:
        raise ModelError(
            f"Sliding-window attention is not supported (config.json: sliding_window {window});"
            f" --context-length {window} or less would need none."
        )
    other = {layer for layer in raw.get("layer_types") or () if layer not in ("full_attention", "sliding_attention")}
    if other:
        raise ModelError(f"config.json: layer type {sorted(map(str, other))[0]} is not supported, only full_attention.")


def _sliding_window(raw: Mapping[str, Any], config: ModelConfig) -> int | None:
    """The window of the layers that have one; None if all attend to everything."""
    if config.architecture == "MistralForCausalLM":
        window = raw.get("sliding_window", 4096)
    elif raw.get("layer_types") is not None:
        window = raw.get("sliding_window", 4096) if "sliding_attention" in raw["layer_types"] else None
    elif raw.get("use_sliding_window"):
        window = raw.get("sliding_window", 4096) if raw.get("max_window_layers", 28) < config.num_layers else None
    else:
        window = None
    return None if window is None else _Reader({"sliding_window": window}).positive_int("sliding_window")
