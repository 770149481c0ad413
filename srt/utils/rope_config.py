"""The rotary embedding that a config.json asks for, in one form whether the file is old or new. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from srt.utils.model_error import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")

REFUSED_KINDS = {
    "dynamic": "its angles depend on the longest row of the batch",
    "longrope": "its angles depend on the longest row of the batch",
    "su": "its angles depend on the longest row of the batch",
    "mrope": "it is for images and video",
}
"""Known kinds that no supported model can use, and why; any other name is simply unknown."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. Every derived value is resolved here; fields that `kind` does not use keep their default."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def context_limit(self, max_position_embeddings: int) -> int:
        """The longest context that the scaling was made for: at least what config.json states."""
        stretched = {
            "default": 0,
            "linear": int(max_position_embeddings * self.factor),
            "llama3": int(self.original_context_length * self.factor),
            "yarn": int(self.original_context_length * self.factor),
        }
        return max(max_position_embeddings, stretched[self.kind])


def rope_parameters(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE parameters of a config.json of any age in the new form, with those of `overrides` on top.

    Overriding the scaling replaces all parameters but theta, which the override may leave out.
    """
    stated, asked = _gather(raw), _gather(overrides)
    if {"rope_scaling", "rope_parameters"} & overrides.keys():
        stated = {"rope_theta": stated.get("rope_theta")}
    return {**stated, **asked}


def _gather(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Old files have `rope_scaling` and `rope_theta`, new ones `rope_parameters`; where both are there the old scaling counts."""
    new = _mapping(raw, "rope_parameters")
    parameters = {"rope_theta": new.get("rope_theta") or raw.get("rope_theta")} | (_mapping(raw, "rope_scaling") or new)
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    return {key: value for key, value in parameters.items() if value is not None}


def read_rope(values: Mapping[str, Any], merged: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """The rotary embedding that `values` (from `rope_parameters`) describe, in the config.json `merged`.

    ModelError names what is missing or not supported.
    """
    kind = values.get("rope_type", "default")
    _refuse(kind, values, merged)
    theta = _number(values, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=_number(values, "factor"))
    original = _number(
        {**values, **_stated_original(merged)}, "original_max_position_embeddings", max_position_embeddings
    )
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=_number(values, "factor"),
            original_context_length=int(original),
            low_freq_factor=_number(values, "low_freq_factor"),
            high_freq_factor=_number(values, "high_freq_factor"),
        )
    factor = _number(values, "factor", max_position_embeddings / original)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_context_length=int(original),
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=values.get("truncate") is not False,
    )


def _refuse(kind: object, values: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError("config.json: RoPE parameters by layer type are not supported.")
    if kind not in KINDS:
        reason = REFUSED_KINDS.get(str(kind)) or f"supported are {', '.join(KINDS)}"
        raise ModelError(f"config.json: RoPE type {kind!r} is not supported ({reason}).")
    for source in (values, merged):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise ModelError(
                f"config.json: partial_rotary_factor {source['partial_rotary_factor']} is not supported, only 1."
            )


def _stated_original(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Some files hold the original context length beside the parameters; there it counts more than inside."""
    stated = merged.get("original_max_position_embeddings")
    return {} if stated is None else {"original_max_position_embeddings": stated}


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return _number(values, "attention_factor")

    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    numerator, denominator = values.get("mscale"), values.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(factor, _number(values, "mscale")) / mscale(factor, _number(values, "mscale_all_dim"))
    return mscale(factor, 1.0)


def _mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} must be an object, not {value!r}.")
    return cast("dict[str, Any]", value)


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: the RoPE type {values.get('rope_type')!r} needs {key}.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} must be a positive number, not {value!r}.")
    return float(value)
