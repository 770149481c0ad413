"""GLM-4: the first half of each head is rotated, by neighbouring pairs; norms stand before and after attention and MLP.

GLM-4.5 to 4.7 rotate the same half by pairs that are apart, and have experts in all layers but the first.
"""

from __future__ import annotations

from srt.utils.families.experts import corrected_routing, dense_layers_first
from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import Experts, LayerNorms, LayerSpec, SharedExpert

_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm")


def _layers(config: ConfigReader, norms: LayerNorms) -> list[LayerSpec]:
    rope = config.rope(may_be_partial=True, is_interleaved=True)
    attention = config.attention(rope, qkv_bias=config.flag("attention_bias"))
    return [LayerSpec(attention, config.feed_forward(is_one_tensor=True), norms)] * config.num_layers


def _moe_layers(config: ConfigReader) -> list[LayerSpec]:
    """Experts are chosen by a sigmoid with a correction. The shared expert has no gate."""
    norms = "head" if config.flag("use_qk_norm") else None
    attention = config.attention(config.rope(may_be_partial=True), qkv_bias=config.flag("attention_bias"), norms=norms)
    chosen = corrected_routing(config)
    size = config.positive_int("moe_intermediate_size")
    experts = Experts(chosen, size, SharedExpert("shared_experts", size * config.positive_int("n_shared_experts", 1)))
    return [LayerSpec(attention, feed_forward) for feed_forward in dense_layers_first(config, experts, 1)]


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
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5 to 4.7, and their Air models",
    "experts chosen by a sigmoid, beside a shared one; dense layers first; partial rotation; norms of heads",
    _moe_layers,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
)
