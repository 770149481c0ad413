"""Mixtral: Mistral's layers with experts in all of them."""

from __future__ import annotations

from srt.utils.families.experts import routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.fast import fast_paths
from srt.utils.layer_spec import Experts, LayerSpec


def _layers(config: ConfigReader) -> list[LayerSpec]:
    """All layers have a window unless `sliding_window` is null or absent."""
    config.only("hidden_act", "silu")
    experts = Experts(
        routing(config), config.positive_int("intermediate_size"), layout="w1_w3_w2", name="block_sparse_moe"
    )
    (window, *_) = config.windows([config.raw.get("sliding_window") is not None] * config.num_layers)
    return [LayerSpec(config.attention(config.rope(), window=window), experts)] * config.num_layers


MIXTRAL = Family(
    "MixtralForCausalLM",
    "Mixtral",
    "experts in all layers; windows where config.json says so",
    _layers,
    fast_paths,
    {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
