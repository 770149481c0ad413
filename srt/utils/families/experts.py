"""What config.json says about experts, as far as several families say it alike."""

from __future__ import annotations

from typing import Any

from srt.utils.families.family import ConfigReader
from srt.utils.layer_spec import Routing
from srt.utils.model_error import ModelError


def routing(config: ConfigReader, **given: Any) -> Routing:
    """Return the choice of `num_experts_per_tok` experts by a softmax; `given` are the fields that the family sets.

    Some versions of transformers write the number of experts as `num_local_experts` for families whose own name is `num_experts`.
    """
    stated = [
        key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.raw.get(key) is not None
    ]
    num_experts = config.positive_int(stated[0] if stated else "num_experts")
    top_k = config.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are only {num_experts} experts.")
    return Routing(num_experts, top_k, **given)


def expert_layers(config: ConfigReader) -> list[bool]:
    """Return for each layer whether it has experts: each `decoder_sparse_step`-th has, unless `mlp_only_layers` lists it."""
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError("config.json: mlp_only_layers must be a list of layers' numbers.")
    step = config.positive_int("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)]
