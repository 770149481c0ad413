"""gpt-oss: experts in all layers with biases and a limited activation; sinks in attention; a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from srt.utils.families.experts import routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import Experts, LayerSpec


def _layers(config: ConfigReader) -> list[LayerSpec]:
    config.only("hidden_act", "silu")
    config.only("swiglu_alpha", 1.702)
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, o_bias=bias, has_sinks=True)
    experts = Experts(
        routing(config, has_bias=True),
        config.positive_int("intermediate_size"),
        layout="transposed",
        router_name="router",
        bias=True,
        limit=config.positive_number("swiglu_limit", 7.0),
    )
    slides = config.slides() or [layer % 2 == 0 for layer in range(config.num_layers)]
    return [LayerSpec(replace(attention, window=window), experts) for window in config.windows(slides)]


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt-oss in bfloat16",
    "experts with biases and a limited activation; sinks; windows",
    _layers,
    defaults={
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
    },
)
