"""Gemma 2 and Gemma 3's text models: norms of 1 + w around attention and MLP, a scaled embedding, windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import FeedForward, LayerNorms, LayerSpec, Scales, SelfAttention
from srt.utils.rope_config import RopeConfig

_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}


def _attention(config: ConfigReader, rope: RopeConfig) -> SelfAttention:
    config.only("use_bidirectional_attention", False)
    bias = config.flag("attention_bias")
    scale = config.positive_number("query_pre_attn_scalar") ** -0.5
    return config.attention(rope, scale=scale, qkv_bias=bias, o_bias=bias)


def _feed_forward(config: ConfigReader) -> FeedForward:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    return FeedForward(config.positive_int("intermediate_size"), activation="gelu_tanh")


def _gemma2_layers(config: ConfigReader) -> list[LayerSpec]:
    """The products of queries and keys are capped. Every second layer has a window."""
    attention = replace(_attention(config, config.rope()), softcap=config.optional_number("attn_logit_softcapping"))
    windows = config.windows(config.slides_except_every(2))
    return windowed_layers(attention, _feed_forward(config), windows, norms=_NORMS)


def _gemma3_layers(config: ConfigReader) -> list[LayerSpec]:
    """Queries and keys are normed per head. Five of six layers have a window, and a rotation of their own."""
    config.only("attn_logit_softcapping", None)
    sliding_theta = config.positive_number("rope_local_base_freq", 10000.0)
    full, sliding = (replace(_attention(config, rope), norms="head") for rope in config.ropes_by_kind(sliding_theta))
    windows = config.windows(config.slides_except_every(config.positive_int("sliding_window_pattern", 6)))
    return [
        LayerSpec(full if window is None else replace(sliding, window=window), _feed_forward(config), _NORMS)
        for window in windows
    ]


def _scales(config: ConfigReader) -> Scales:
    return Scales(embedding=config.hidden_size**0.5, logit_softcap=config.optional_number("final_logit_softcapping"))


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "Gemma 2",
    "capped attention and logits; norms of 1 + w, before and after; windows; a factor of the embedding",
    _gemma2_layers,
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norm="rms_plus_one",
    read_scales=_scales,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "Gemma 3, text",
    "those of Gemma 2 without the caps; norms of heads; two rotations",
    _gemma3_layers,
    defaults={**_DEFAULTS, "rope_theta": 1e6},
    norm="rms_plus_one",
    read_scales=_scales,
)
