"""SmolLM3: every fourth layer does not rotate its queries and keys."""

from __future__ import annotations

from srt.utils.config_values import shown
from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.windows import rotated_where, windowed_layers
from srt.utils.layer_spec import LayerSpec
from srt.utils.model_error import ModelError


def _rotates(config: ConfigReader) -> list[bool]:
    """Return for each layer whether it rotates. In `no_rope_layers`, which says so, 1 is a layer that does."""
    stated = config.raw.get("no_rope_layers")
    if stated is None:
        interval = config.positive_int("no_rope_layer_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(config.num_layers)]
    if not isinstance(stated, list) or len(stated) != config.num_layers or any(one not in (0, 1) for one in stated):
        raise ModelError(f"config.json: no_rope_layers must have 0 or 1 for each layer, not {shown(stated)}.")
    return [one == 1 for one in stated]


def _layers(config: ConfigReader) -> list[LayerSpec]:
    rotates = _rotates(config)
    has_windows = config.flag("use_sliding_window") and config.raw.get("sliding_window") is not None
    slides = config.slides() or [has_windows and not is_rotated for is_rotated in rotates]
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, o_bias=bias)
    layers = windowed_layers(attention, config.feed_forward(bias=config.flag("mlp_bias")), config.windows(slides))
    return rotated_where(layers, rotates)


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    "layers without rotation; windows",
    _layers,
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
)
