"""The rotary embedding of a config.json, in one form for old and new files. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from srt.utils.config_values import mapping, positive_int, positive_number, shown
from srt.utils.model_error import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]

NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Parameters without a default, by kind."""

REFUSED_KINDS = {
    "dynamic": "its angles depend on the longest row of the batch",
    "longrope": "its angles depend on the longest row of the batch",
    "su": "its angles depend on the longest row of the batch",
    "mrope": "it is for images and video",
}
"""Known kinds that no supported model can use, with the reason; any other name is reported as unknown."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters that turn positions into angles. Every derived value is resolved; fields that `kind` does not use keep their default."""

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
    partial: float = 1.0
    """Share of each head, from its first element on, that is rotated."""
    is_interleaved: bool = False
    """Whether the two elements of a pair are neighbours, instead of half a rotated part apart."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.partial)

    def context_limit(self, max_position_embeddings: int) -> int:
        """Return the longest context that the scaling was made for, at least `max_position_embeddings`."""
        stretched = {
            "default": 0,
            "linear": int(max_position_embeddings * self.factor),
            "llama3": int(self.original_context_length * self.factor),
            "yarn": int(self.original_context_length * self.factor),
        }
        return max(max_position_embeddings, stretched[self.kind])


def rope_parameters(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters of an old or new config.json in the new form, with those of `overrides` on top.

    Overriding the scaling replaces all parameters except theta, which the override may leave out.
    """
    stated, asked = _gather(raw), _gather(overrides)
    if {"rope_scaling", "rope_parameters"} & overrides.keys():
        stated = {"rope_theta": stated.get("rope_theta")}
    return {**stated, **asked}


def _gather(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters of one source: `rope_scaling` and `rope_theta` in old files, `rope_parameters` in new ones.

    As in transformers 5, an old scaling replaces all new parameters including their theta; the theta beside them is used only if
    the parameters contain none.
    """
    new, scaling = mapping(raw, "rope_parameters"), mapping(raw, "rope_scaling")
    parameters = {"rope_theta": raw.get("rope_theta"), **(scaling or new)}
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    return {key: value for key, value in parameters.items() if value is not None}


def read_rope(
    values: Mapping[str, Any], merged: Mapping[str, Any], max_position_embeddings: int, may_be_partial: bool = False
) -> RopeConfig:
    """Return the rotary embedding described by `values` (from `rope_parameters`), given the config.json `merged`.

    ModelError names what is missing or not supported.
    """
    partial = _partial(values, merged, may_be_partial)
    return replace(_read_frequencies(values, merged, max_position_embeddings), partial=partial)


def _read_frequencies(values: Mapping[str, Any], merged: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    kind = values.get("rope_type", "default")
    _refuse(kind, values)
    theta = positive_number(values, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=positive_number(values, "factor"))
    # An original context length beside the parameters overrides the one among them.
    stated = merged if merged.get("original_max_position_embeddings") is not None else values
    original = positive_int(stated, "original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=positive_number(values, "factor"),
            original_context_length=original,
            low_freq_factor=positive_number(values, "low_freq_factor"),
            high_freq_factor=positive_number(values, "high_freq_factor"),
        )
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta must be more than 1 with the RoPE type yarn, not {theta}.")
    factor = positive_number(values, "factor", max_position_embeddings / original)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_context_length=original,
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=positive_number(values, "beta_fast", 32.0),
        beta_slow=positive_number(values, "beta_slow", 1.0),
        truncate=values.get("truncate") is not False,
    )


def _partial(values: Mapping[str, Any], merged: Mapping[str, Any], may_be_partial: bool) -> float:
    stated = [source for source in (values, merged) if source.get("partial_rotary_factor") is not None]
    for source in stated:
        share = source["partial_rotary_factor"]
        if share != 1 and not may_be_partial:
            raise ModelError(f"config.json: partial_rotary_factor {shown(share)} is not supported, only 1.")
        if positive_number(source, "partial_rotary_factor") > 1:
            raise ModelError(f"config.json: partial_rotary_factor must be at most 1, not {shown(share)}.")
    return float(stated[0]["partial_rotary_factor"]) if stated else 1.0


def _refuse(kind: object, values: Mapping[str, Any]) -> None:
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError("config.json: RoPE parameters by layer type are not supported.")
    if not isinstance(kind, str) or kind not in NEEDED:
        reason = REFUSED_KINDS.get(str(kind)) or f"supported are {', '.join(NEEDED)}"
        raise ModelError(f"config.json: RoPE type {shown(kind)} is not supported ({reason}).")
    for key in NEEDED[kind]:
        if values.get(key) is None:
            raise ModelError(f"config.json: the RoPE type {kind} needs {key}.")


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return positive_number(values, "attention_factor")
    numerator, denominator = values.get("mscale"), values.get("mscale_all_dim")
    if numerator and denominator:
        return yarn_mscale(factor, positive_number(values, "mscale")) / yarn_mscale(
            factor, positive_number(values, "mscale_all_dim")
        )
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return the factor by which YaRN raises attention for a context that is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
