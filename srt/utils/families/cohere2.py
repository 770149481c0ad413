"""Cohere 2 (Command R7B and A): LayerNorm, attention and MLP side by side, rotation only in layers with a window."""

from __future__ import annotations

from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.windows import rotated_where, windowed_layers
from srt.utils.layer_spec import LayerNorms, LayerSpec, Scales


def _layers(config: ConfigReader) -> list[LayerSpec]:
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(is_interleaved=True), qkv_bias=bias, o_bias=bias)
    slides = config.slides_except_every(config.positive_int("sliding_window_pattern", 4))
    layers = windowed_layers(
        attention,
        config.feed_forward(),
        config.windows(slides),
        norms=LayerNorms(before_feed_forward=None),
        is_parallel=True,
    )
    return rotated_where(layers, slides)


COHERE2 = Family(
    "Cohere2ForCausalLM",
    "Command R7B, Command A",
    "LayerNorm; attention beside the MLP; windows; layers without rotation; a factor of logits",
    _layers,
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    norm="layer",
    eps_key="layer_norm_eps",
    read_scales=lambda config: Scales(logits=config.positive_number("logit_scale", 0.0625)),
)
