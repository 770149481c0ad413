"""DeepSeek V2 and V3: latent attention, and experts beside shared ones in all layers but the first few. Kimi K2 is a V3."""

from __future__ import annotations

from dataclasses import replace

from srt.utils.config_values import positive_number, shown
from srt.utils.families.experts import corrected_routing, dense_layers_first, groups_of, routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import Experts, LatentAttention, LayerSpec, Routing, SharedExpert
from srt.utils.model_error import ModelError
from srt.utils.rope_config import RopeConfig, yarn_mscale


def _v2_layers(config: ConfigReader) -> list[LayerSpec]:
    return _layers(config, _v2_routing(config), 0, is_interleaved=True)


def _v3_layers(config: ConfigReader) -> list[LayerSpec]:
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    return _layers(config, corrected_routing(config), 3, is_interleaved=config.flag("rope_interleave"))


def _v2_routing(config: ConfigReader) -> Routing:
    """Experts are chosen by a softmax, from the groups with the best experts if `topk_method` says so. Weights are not renormalised."""
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    plain = routing(config, is_renormalised=False, scale=config.positive_number("routed_scaling_factor", 1.0))
    match config.raw.get("topk_method") or "greedy":
        case "greedy":
            return plain
        case "group_limited_greedy":
            num_groups, num_chosen = groups_of(config, plain.num_experts, plain.top_k, 1)
            return replace(plain, num_groups=num_groups, num_chosen_groups=num_chosen, num_group_scores=1)
        case method:
            raise ModelError(
                f"config.json: topk_method {shown(method)} is not supported, only 'greedy' and 'group_limited_greedy'."
            )


def _layers(config: ConfigReader, chosen: Routing, num_dense: int, *, is_interleaved: bool) -> list[LayerSpec]:
    """Return the layers; `num_dense` of them are dense if config.json does not say how many."""
    config.only("moe_layer_freq", 1)
    size = config.positive_int("moe_intermediate_size")
    num_shared = config.raw.get("n_shared_experts")
    shared = SharedExpert("shared_experts", size * config.positive_int("n_shared_experts")) if num_shared else None
    attention = _attention(config, is_interleaved=is_interleaved)
    feed_forwards = dense_layers_first(config, Experts(chosen, size, shared), num_dense)
    return [LayerSpec(attention, feed_forward) for feed_forward in feed_forwards]


def _attention(config: ConfigReader, *, is_interleaved: bool) -> LatentAttention:
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    nope_dim, rope_dim = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelError(f"config.json: qk_rope_head_dim must be even for rotary embeddings, not {rope_dim}.")
    rope = config.rope(is_interleaved=is_interleaved)
    return LatentAttention(
        config.num_heads,
        None if config.raw.get("q_lora_rank") is None else config.positive_int("q_lora_rank"),
        config.positive_int("kv_lora_rank"),
        nope_dim,
        rope_dim,
        config.positive_int("v_head_dim"),
        _scale(config, nope_dim + rope_dim, rope),
        rope,
    )


def _scale(config: ConfigReader, head_dim: int, rope: RopeConfig) -> float:
    """Return the factor of the products of queries and keys. YaRN raises it with the length of the context."""
    parameters = config.raw["rope_parameters"]
    scale = float(head_dim**-0.5)
    if rope.kind == "default" or not parameters.get("mscale_all_dim"):
        return scale
    raised = yarn_mscale(rope.factor, positive_number(parameters, "mscale_all_dim"))
    return scale * raised * raised


DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "DeepSeek V2, V2-Lite and V2.5",
    "latent attention; experts beside shared ones, chosen by groups where config.json says so; dense layers first",
    _v2_layers,
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight",
    "latent attention; experts chosen by a sigmoid from groups, beside a shared one; dense layers first",
    _v3_layers,
    defaults={"norm_topk_prob": True, "rope_interleave": True},
)
