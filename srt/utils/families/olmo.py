"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms over the width of all queries and keys.

OLMoE has the latter, experts, and norms before attention and experts, as Llama has them.
"""

from __future__ import annotations

from dataclasses import replace

from srt.utils.families.experts import routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import Experts, LayerNorms, LayerSpec
from srt.utils.rope_config import RopeConfig

_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def _layer(config: ConfigReader, rope: RopeConfig) -> LayerSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(rope, norms="width", qkv_bias=bias, o_bias=bias)
    return LayerSpec(attention, config.feed_forward(), _NORMS)


def _olmo2_layers(config: ConfigReader) -> list[LayerSpec]:
    return [_layer(config, config.rope())] * config.num_layers


def _olmo3_layers(config: ConfigReader) -> list[LayerSpec]:
    """Three of four layers have a window, and no scaling of the rotation."""
    full, sliding = (_layer(config, rope) for rope in config.ropes_by_kind(sliding_theta=None))
    windows = config.windows(config.slides_except_every(4))
    return [
        full if window is None else replace(sliding, attention=replace(sliding.self_attention, window=window))
        for window in windows
    ]


def _olmoe_layers(config: ConfigReader) -> list[LayerSpec]:
    config.only("clip_qkv", None)
    config.only("hidden_act", "silu")
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), norms="width", qkv_bias=bias, o_bias=bias)
    chosen = routing(config, is_renormalised=config.flag("norm_topk_prob"))
    return [LayerSpec(attention, Experts(chosen, config.positive_int("intermediate_size")))] * config.num_layers


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "OLMo 2",
    "norms after attention and MLP, and over all queries and keys",
    _olmo2_layers,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "OLMo 3",
    "those of OLMo 2; windows; two rotations",
    _olmo3_layers,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "OLMoE",
    "experts in all layers; norms over all queries and keys",
    _olmoe_layers,
    defaults={"rms_norm_eps": 1e-5},
)
