"""What a family declares about its models, and the reader of config.json that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from srt.utils.config_values import LARGEST, flag, mapping, names, positive_int, positive_number, shown
from srt.utils.layer_spec import NO_SCALES, FastPath, FeedForward, LayerSpec, NormKind, Scales, SelfAttention
from srt.utils.model_error import ModelError
from srt.utils.rope_config import RopeConfig, read_rope

MOST_PARTS: Final = 10_000
"""Most layers of a model, and most experts of a layer: each has objects of its own, so that a mistake would fill the memory."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config.json is read."""

    architecture: str
    """Its name in config.json."""
    title: str
    """The models that have it, for documents."""
    layers: str
    """A phrase for documents that says in what the layers differ from Llama's."""
    read_layers: Callable[[ConfigReader], Sequence[LayerSpec]]
    fast_paths: Callable[[LayerSpec], tuple[FastPath, ...]] | None = None
    """Returns the fast paths that can run a layer. None: the layers are run by `srt/models/plain_decoder.py`, which has none."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may leave out, where they are not those of most models."""
    norm: NormKind = "rms"
    eps_key: str = "rms_norm_eps"
    read_scales: Callable[[ConfigReader], Scales] = lambda config: NO_SCALES


class ConfigReader:
    """config.json of one model, with its family's defaults. Raises ModelError for values that are not supported."""

    def __init__(self, raw: Mapping[str, Any], family: Family) -> None:
        self.raw = raw
        """The content of the file, null values included."""
        self._values = {**family.defaults, **{key: value for key, value in raw.items() if value is not None}}
        self._default_theta = family.defaults.get("rope_theta", 10000.0)
        self.num_layers = self.positive_int("num_hidden_layers", most=MOST_PARTS)
        self.hidden_size = self.positive_int("hidden_size")
        self.num_heads = self.positive_int("num_attention_heads")
        self.max_position_embeddings = self.positive_int("max_position_embeddings")

    def flag(self, key: str) -> bool:
        return flag(self._values, key)

    def positive_int(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        return positive_int(self._values, key, default, most)

    def positive_number(self, key: str, default: float | None = None) -> float:
        return positive_number(self._values, key, default)

    def optional_number(self, key: str) -> float | None:
        """Return the number, or None if the file has null there; the family's default, if any, for files without the key."""
        is_none = self.raw[key] is None if key in self.raw else self._values.get(key) is None
        return None if is_none else self.positive_number(key)

    def rope(self, *, may_be_partial: bool = False, is_interleaved: bool = False) -> RopeConfig:
        """Return the one rotary embedding of all layers."""
        rope = read_rope(
            self._with_theta(self.raw["rope_parameters"]), self._values, self.max_position_embeddings, may_be_partial
        )
        return dataclasses.replace(rope, is_interleaved=is_interleaved)

    def ropes_by_kind(self, sliding_theta: float | None) -> tuple[RopeConfig, RopeConfig]:
        """Return the rotary embeddings of layers without and with a window.

        New files have `rope_parameters` for each of the two. In old files layers with a window have no scaling, and `sliding_theta`, or
        the theta of the others.
        """
        stated = self.raw["rope_parameters"]
        plain = self._with_theta({key: value for key, value in stated.items() if not isinstance(value, dict)})
        full = {**plain, **mapping(stated, "full_attention")}
        sliding = {"rope_theta": sliding_theta or plain["rope_theta"], **mapping(stated, "sliding_attention")}
        positions = self.max_position_embeddings
        return read_rope(full, self._values, positions), read_rope(sliding, self._values, positions)

    def _with_theta(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rope_theta": self._default_theta, **values}

    def attention(self, rope: RopeConfig, **given: Any) -> SelfAttention:
        """Return full attention with the usual keys; `given` are the fields that the family sets."""
        head_dim = self.positive_int("head_dim", self.hidden_size // self.num_heads)
        num_kv_heads = self.positive_int("num_key_value_heads", self.num_heads)
        if self.num_heads % num_kv_heads:
            raise ModelError(f"config.json: {self.num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {head_dim}.")
        if rope.rotary_dim(head_dim) % 2 or not rope.rotary_dim(head_dim):
            raise ModelError(f"config.json: partial_rotary_factor {rope.partial} of {head_dim} is not an even number.")
        usual = SelfAttention(self.num_heads, num_kv_heads, head_dim, float(head_dim**-0.5), rope)
        return dataclasses.replace(usual, **given)

    def feed_forward(self, **given: Any) -> FeedForward:
        """Return the usual MLP; `given` are the fields that the family sets."""
        self.only("hidden_act", "silu")
        return FeedForward(self.positive_int("intermediate_size"), **given)

    def only(self, key: str, value: object) -> None:
        """Raise ModelError if the file has another value than this one, which is also that of files without the key."""
        stated = self.raw.get(key)
        if stated is not None and stated != value:
            raise ModelError(f"config.json: {key} {shown(stated)} is not supported, only {value!r}.")

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

    def slides_except_every(self, interval: int) -> list[bool]:
        """Return `layer_types`; if config.json does not name them, every layer slides but each `interval`-th."""
        return self.slides() or [bool((layer + 1) % interval) for layer in range(self.num_layers)]
