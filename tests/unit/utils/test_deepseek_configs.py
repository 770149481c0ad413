"""DeepSeek's configurations, and Kimi K2's: latents, rotations, the choice of experts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.utils.layer_spec import Experts, FeedForward, LatentAttention, Routing
from srt.utils.model_config import ModelConfig, ModelError

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
V2_LITE: dict[str, Any] = json.loads((CONFIGS / "deepseek-v2-lite.json").read_text())
KIMI_K2: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}
V3_GROUPS = {"n_group": 8, "topk_group": 4, "n_routed_experts": 256}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(folder)


def latents_of(config: ModelConfig) -> LatentAttention:
    attention = config.layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert {layer.attention for layer in config.layers} == {attention}
    return attention


def experts_of(config: ModelConfig) -> Experts:
    experts = config.layers[-1].feed_forward
    assert isinstance(experts, Experts)
    return experts


def test_v2_lite_makes_queries_of_hidden_states(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE)
    latents = latents_of(config)
    assert (latents.query_rank, latents.latent_dim, latents.head_dim) == (None, 576, 192)
    assert latents.rope.is_interleaved
    assert (latents.rope.attention_factor, config.context_length) == (1.0, 163840)
    raised = 0.1 * 0.707 * 3.6888794541139363 + 1.0  # ln 40
    assert latents.scale == pytest.approx(192**-0.5 * raised**2)
    assert [isinstance(layer.feed_forward, FeedForward) for layer in config.layers[:2]] == [True, False]
    assert experts_of(config).routing == Routing(64, 6, is_renormalised=False)
    shared = experts_of(config).shared
    assert shared is not None and shared.size == 2816


def test_kimi_k2_is_a_v3_without_groups(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI_K2)
    assert (config.architecture, latents_of(config).query_rank) == ("DeepseekV3ForCausalLM", 1536)
    assert experts_of(config).routing == Routing(384, 8, "sigmoid", scale=2.827, has_correction=True)


def test_groups_are_ranked_by_two_experts_in_v3_and_by_one_in_v2(tmp_path: Path) -> None:
    third = experts_of(read(tmp_path, {**KIMI_K2, **V3_GROUPS})).routing
    assert (third.num_groups, third.num_chosen_groups, third.num_group_scores) == (8, 4, 2)
    limited = {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}
    second = experts_of(read(tmp_path, {**V2_LITE, **limited})).routing
    assert (second.num_groups, second.num_chosen_groups, second.num_group_scores) == (8, 3, 1)


def test_ranks_share_heads_but_not_latents(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE)
    config.check_tp(16)
    with pytest.raises(ModelError, match="does not divide the model's 16 query heads"):
        config.check_tp(32)


def test_yarn_without_a_factor_raises_scores_by_the_factor_of_its_rotation(tmp_path: Path) -> None:
    yarn = {**KIMI_K2["rope_scaling"], "factor": 32.0}
    stated = latents_of(read(tmp_path, {**KIMI_K2, "rope_scaling": yarn}))
    del yarn["factor"]
    found = latents_of(read(tmp_path, {**KIMI_K2, "rope_scaling": yarn}))
    assert (found.rope.factor, found.scale) == (32.0, pytest.approx(stated.scale))


def test_the_order_of_rotations_is_true_or_false(tmp_path: Path) -> None:
    assert latents_of(read(tmp_path, KIMI_K2)).rope.is_interleaved
    assert not latents_of(read(tmp_path, {**KIMI_K2, "rope_interleave": False})).rope.is_interleaved
    with pytest.raises(ModelError, match="rope_interleave must be true or false, not 0"):
        read(tmp_path, {**KIMI_K2, "rope_interleave": 0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, "64 experts do not make 3 groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"kv_lora_rank": None}, "no kv_lora_rank"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be a positive integer of at most 10000"),
        ({"n_routed_experts": 2**31 - 1}, "n_routed_experts must be a positive integer of at most 10000"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, {**V2_LITE, **changes})
