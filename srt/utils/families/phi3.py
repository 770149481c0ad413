"""Phi-3 and Phi-4: fused tensors, and heads that may be rotated in part."""

from __future__ import annotations

from srt.utils.config_values import shown
from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.windows import windowed_layers
from srt.utils.layer_spec import LayerSpec
from srt.utils.model_error import ModelError


def _layers(config: ConfigReader) -> list[LayerSpec]:
    """All layers have the window, if there is one."""
    rope = config.rope(may_be_partial=True)
    if rope.kind != "default":
        raise ModelError(f"config.json: RoPE type {shown(rope.kind)} is not supported for Phi-3, only 'default'.")
    windows = config.windows([config.raw.get("sliding_window") is not None] * config.num_layers)
    return windowed_layers(config.attention(rope, is_one_tensor=True), config.feed_forward(is_one_tensor=True), windows)


PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3 and Phi-4 without LongRoPE",
    "fused tensors; partial rotation; windows",
    _layers,
    defaults={"rms_norm_eps": 1e-5},
)
