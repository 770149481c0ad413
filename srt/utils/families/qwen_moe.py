"""Qwen2 and Qwen3 with experts. Some layers may have a dense MLP instead."""

from __future__ import annotations

from srt.utils.families.experts import expert_layers, routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.families.fast import fast_paths
from srt.utils.layer_spec import Experts, LayerSpec, SelfAttention, SharedExpert
from srt.utils.model_error import ModelError


def _layers(config: ConfigReader, attention: SelfAttention, shared: SharedExpert | None) -> list[LayerSpec]:
    chosen = routing(config, is_renormalised=config.flag("norm_topk_prob"))
    experts = Experts(chosen, config.positive_int("moe_intermediate_size"), shared)
    dense = config.feed_forward()
    return [LayerSpec(attention, experts if has_experts else dense) for has_experts in expert_layers(config)]


def _qwen2_layers(config: ConfigReader) -> list[LayerSpec]:
    """Beside the experts there is a shared one, which is weighted by a gate of its own."""
    config.only("use_sliding_window", False)
    if any(config.slides() or ()):
        raise ModelError("config.json: layers with a window are not supported for Qwen2 with experts.")
    shared = SharedExpert("shared_expert", config.positive_int("shared_expert_intermediate_size"), "shared_expert_gate")
    return _layers(config, config.attention(config.rope(), qkv_bias=config.flag("qkv_bias")), shared)


def _qwen3_layers(config: ConfigReader) -> list[LayerSpec]:
    """Queries and keys are normed per head. All layers have a window, if there is one."""
    bias = config.flag("attention_bias")
    (window, *_) = config.windows([config.flag("use_sliding_window")] * config.num_layers)
    attention = config.attention(config.rope(), qkv_bias=bias, o_bias=bias, norms="head", window=window)
    return _layers(config, attention, None)


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "Qwen1.5-MoE and Qwen2 with experts",
    "experts beside a shared one with a gate; biases of q, k and v; dense layers among them",
    _qwen2_layers,
    fast_paths,
    {"qkv_bias": True},
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3 with experts, such as 30B-A3B and 235B-A22B",
    "experts; norms of heads; windows; dense layers among them",
    _qwen3_layers,
    fast_paths,
)
