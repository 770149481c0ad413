"""What a family declares about its models, and the reader of config.json that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srt.utils.config_values import flag, names, positive_int, positive_number, shown
from srt.utils.layer_spec import FastPath, FeedForward, LayerSpec, SelfAttention
from srt.utils.model_error import ModelError
from srt.utils.rope_config import RopeConfig, read_rope


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config.json is read."""

    architecture: str
    """Its name in config.json."""
    title: str
    """The models that have it, for documents."""
    read_layers: Callable[[ConfigReader], Sequence[LayerSpec]]
    fast_paths: Callable[[LayerSpec], tuple[FastPath, ...]]
    """Returns the fast paths that can run a layer."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may leave out, where they are not those of most models."""


class ConfigReader:
    """config.json of one model, with its family's defaults. Raises ModelError for values that are not supported."""

    def __init__(self, raw: Mapping[str, Any], family: Family) -> None:
        self.raw = raw
        """As the file has it, null included."""
        self._values = {**family.defaults, **{key: value for key, value in raw.items() if value is not None}}
        self.num_layers = self.positive_int("num_hidden_layers")
        self.hidden_size = self.positive_int("hidden_size")
        self.num_heads = self.positive_int("num_attention_heads")
        self.max_position_embeddings = self.positive_int("max_position_embeddings")

    def flag(self, key: str) -> bool:
        return flag(self._values, key)

    def positive_int(self, key: str, default: int | None = None) -> int:
        return positive_int(self._values, key, default)

    def positive_number(self, key: str, default: float | None = None) -> float:
        return positive_number(self._values, key, default)

    def rope(self) -> RopeConfig:
        """Return the one rotary embedding of all layers."""
        return read_rope(self.raw["rope_parameters"], self._values, self.max_position_embeddings)

    def attention(self, **given: Any) -> SelfAttention:
        """Return full attention with the usual keys; `given` are the fields that the family sets."""
        head_dim = self.positive_int("head_dim", self.hidden_size // self.num_heads)
        num_kv_heads = self.positive_int("num_key_value_heads", self.num_heads)
        if self.num_heads % num_kv_heads:
            raise ModelError(f"config.json: {self.num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {head_dim}.")
        usual = SelfAttention(self.num_heads, num_kv_heads, head_dim, float(head_dim**-0.5), self.rope())
        return dataclasses.replace(usual, **given)

    def feed_forward(self, **given: Any) -> FeedForward:
        """Return the usual MLP; `given` are the fields that the family sets."""
        activation = self._values.get("hidden_act")
        if activation not in (None, "silu"):
            raise ModelError(f"config.json: hidden_act {shown(activation)} is not supported, only 'silu'.")
        return FeedForward(self.positive_int("intermediate_size"), **given)

    def slides(self) -> list[bool] | None:
        """Return for each layer whether `layer_types` gives it a window; None if config.json does not name them."""
        kinds = names(self._values, "layer_types")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(
                    f"config.json: layer type {kind} is not supported, only full_attention and sliding_attention."
                )
        if kinds and len(kinds) != self.num_layers:
            raise ModelError(f"config.json: layer_types names {len(kinds)} layers of {self.num_layers}.")
        return [kind == "sliding_attention" for kind in kinds] or None

    def windows(self, slides: Sequence[bool]) -> list[int | None]:
        """Return the window of each layer, of which those in `slides` have one."""
        if not any(slides):
            return [None] * self.num_layers
        window = self.positive_int("sliding_window", 4096)
        return [window if is_sliding else None for is_sliding in slides]
