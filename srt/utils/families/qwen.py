"""Qwen2 and Qwen3, dense."""

from __future__ import annotations

from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.fast import fast_paths
from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import LayerSpec


def _windows(config: ConfigReader) -> list[int | None]:
    """Return the windows by `layer_types`, else those from layer `max_window_layers` on, if windows are used at all."""
    slides = config.slides()
    if slides is None:
        none_below = config.raw.get("max_window_layers") == 0
        first = 0 if none_below else config.positive_int("max_window_layers", 28)
        slides = [config.flag("use_sliding_window") and layer >= first for layer in range(config.num_layers)]
    return config.windows(slides)


def _qwen2_layers(config: ConfigReader) -> list[LayerSpec]:
    """There are always biases on q, k and v, and on nothing else; config.json does not mention them."""
    return windowed_layers(config.attention(config.rope(), qkv_bias=True), config.feed_forward(), _windows(config))


def _qwen3_layers(config: ConfigReader) -> list[LayerSpec]:
    """Queries and keys are normed per head, instead of Qwen2's biases."""
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, o_bias=bias, norms="head")
    return windowed_layers(attention, config.feed_forward(), _windows(config))


QWEN2 = Family("Qwen2ForCausalLM", "Qwen2, Qwen2.5", "biases of q, k and v; windows", _qwen2_layers, fast_paths)
QWEN3 = Family(
    "Qwen3ForCausalLM", "Qwen3, dense", "norms of heads; windows", _qwen3_layers, fast_paths, {"head_dim": 128}
)
