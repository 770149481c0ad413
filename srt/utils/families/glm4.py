"""GLM-4: the first half of each head is rotated, by neighbouring pairs; norms stand before and after attention and MLP."""

from __future__ import annotations

from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import LayerNorms, LayerSpec

_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm")


def _layers(config: ConfigReader, norms: LayerNorms) -> list[LayerSpec]:
    rope = config.rope(may_be_partial=True, is_interleaved=True)
    attention = config.attention(rope, qkv_bias=config.flag("attention_bias"))
    return [LayerSpec(attention, config.feed_forward(is_one_tensor=True), norms)] * config.num_layers


GLM4 = Family(
    "Glm4ForCausalLM",
    "GLM-4 0414, dense",
    "partial interleaved rotation; norms before and after attention and MLP",
    lambda config: _layers(config, _NORMS),
    defaults={
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "num_key_value_heads": 2,
    },
)
