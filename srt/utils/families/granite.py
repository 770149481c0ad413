"""Granite 3, dense and with experts: Llama's layers with factors of the embedding, the attention, the residuals and the logits."""

from __future__ import annotations

from srt.utils.families.experts import routing
from srt.utils.families.family import ConfigReader, Family
from srt.utils.layer_spec import Experts, FeedForward, LayerSpec, Scales


def _layers(config: ConfigReader, feed_forward: FeedForward | Experts) -> list[LayerSpec]:
    bias = config.flag("attention_bias")
    scale = config.positive_number("attention_multiplier", 1.0)
    attention = config.attention(config.rope(), scale=scale, qkv_bias=bias, o_bias=bias)
    residual_scale = config.positive_number("residual_multiplier", 1.0)
    return [LayerSpec(attention, feed_forward, residual_scale=residual_scale)] * config.num_layers


def _dense_layers(config: ConfigReader) -> list[LayerSpec]:
    return _layers(config, config.feed_forward(bias=config.flag("mlp_bias")))


def _expert_layers(config: ConfigReader) -> list[LayerSpec]:
    config.only("hidden_act", "silu")
    experts = Experts(
        routing(config),
        config.positive_int("intermediate_size"),
        layout="input_output",
        name="block_sparse_moe",
        router_name="router.layer",
    )
    return _layers(config, experts)


def _scales(config: ConfigReader) -> Scales:
    return Scales(
        embedding=config.positive_number("embedding_multiplier", 1.0),
        logits=1.0 / config.positive_number("logits_scaling", 1.0),
    )


GRANITE = Family(
    "GraniteForCausalLM",
    "Granite 3, dense",
    "factors of embedding, attention, residuals and logits",
    _dense_layers,
    read_scales=_scales,
)
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "Granite 3 with experts",
    "experts in all layers; the factors of Granite 3, dense",
    _expert_layers,
    read_scales=_scales,
)
