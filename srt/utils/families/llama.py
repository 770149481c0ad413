"""Llama and Mistral."""

from __future__ import annotations

from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.fast import fast_paths
from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import LayerSpec


def _llama_layers(config: ConfigReader) -> list[LayerSpec]:
    """config.json says which layers have biases; usually none. `layer_types` is checked, but transformers ignores it."""
    config.slides()
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, o_bias=bias)
    return windowed_layers(attention, config.feed_forward(bias=config.flag("mlp_bias")), [None] * config.num_layers)


def _mistral_layers(config: ConfigReader) -> list[LayerSpec]:
    """There are no biases. All layers have a window unless `sliding_window` is null, as in versions after v0.1."""
    config.slides()
    windows = config.windows([config.raw.get("sliding_window", 4096) is not None] * config.num_layers)
    return windowed_layers(config.attention(config.rope()), config.feed_forward(), windows)


LLAMA = Family(
    "LlamaForCausalLM",
    "Llama 2 to 3.x, and the many models with the same layers",
    "biases where config.json says so",
    _llama_layers,
    fast_paths,
)
MISTRAL = Family("MistralForCausalLM", "Mistral", "windows up to v0.1", _mistral_layers, fast_paths)
