"""Granite 3, dense: Llama's layers with factors of the embedding, the attention, the residuals and the logits."""

from __future__ import annotations

from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import LayerSpec, Scales


def _layers(config: ConfigReader) -> list[LayerSpec]:
    bias = config.flag("attention_bias")
    scale = config.positive_number("attention_multiplier", 1.0)
    return windowed_layers(
        config.attention(config.rope(), scale=scale, qkv_bias=bias, o_bias=bias),
        config.feed_forward(bias=config.flag("mlp_bias")),
        [None] * config.num_layers,
        residual_scale=config.positive_number("residual_multiplier", 1.0),
    )


def _scales(config: ConfigReader) -> Scales:
    return Scales(
        embedding=config.positive_number("embedding_multiplier", 1.0),
        logits=1.0 / config.positive_number("logits_scaling", 1.0),
    )


GRANITE = Family(
    "GraniteForCausalLM",
    "Granite 3, dense",
    "factors of embedding, attention, residuals and logits",
    _layers,
    read_scales=_scales,
)
