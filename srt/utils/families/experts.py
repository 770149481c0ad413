"""What config.json says about experts, as far as several families say it alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from srt.utils.families.family import MOST_PARTS, ConfigReader
from srt.utils.layer_spec import Experts, FeedForward, Routing
from srt.utils.model_error import ModelError


def routing(config: ConfigReader, **given: Any) -> Routing:
    """Return the choice of `num_experts_per_tok` experts by a softmax; `given` are the fields that the family sets.

    Some versions of transformers write the number of experts as `num_local_experts` for families whose own name is `num_experts`.
    """
    stated = [
        key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.raw.get(key) is not None
    ]
    num_experts = config.positive_int(stated[0] if stated else "num_experts", most=MOST_PARTS)
    top_k = config.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are only {num_experts} experts.")
    return Routing(num_experts, top_k, **given)


def groups_of(config: ConfigReader, num_experts: int, top_k: int, least: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those that a token chooses from; each has `least` experts or more."""
    num_groups, num_chosen = config.positive_int("n_group", 1), config.positive_int("topk_group", 1)
    if num_groups > 1 and (num_experts % num_groups or num_experts < least * num_groups):
        raise ModelError(f"config.json: {num_experts} experts do not make {num_groups} groups of {least} or more.")
    if num_chosen > num_groups or num_chosen * (num_experts // num_groups) < top_k:
        raise ModelError(f"config.json: topk_group {num_chosen} of n_group {num_groups} does not hold enough experts.")
    return num_groups, num_chosen


def corrected_routing(config: ConfigReader) -> Routing:
    """Return the choice by a sigmoid with a correction, from the groups with the largest sums of their two best scores."""
    plain = routing(config)
    num_groups, num_chosen = groups_of(config, plain.num_experts, plain.top_k, 2)
    return replace(
        plain,
        scoring="sigmoid",
        is_renormalised=config.flag("norm_topk_prob"),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scale=config.positive_number("routed_scaling_factor", 1.0),
        has_correction=True,
    )


def dense_layers_first(config: ConfigReader, experts: Experts, default: int) -> list[FeedForward | Experts]:
    """Return what each layer has: a plain MLP in the first `first_k_dense_replace` layers, or the first `default`, else experts."""
    stated = config.raw.get("first_k_dense_replace", default)
    num_dense = 0 if stated == 0 else config.positive_int("first_k_dense_replace", default)
    dense = config.feed_forward()
    return [dense if layer < num_dense else experts for layer in range(config.num_layers)]


def expert_layers(config: ConfigReader) -> list[bool]:
    """Return for each layer whether it has experts: each `decoder_sparse_step`-th has, unless `mlp_only_layers` lists it."""
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError("config.json: mlp_only_layers must be a list of layers' numbers.")
    step = config.positive_int("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)]
