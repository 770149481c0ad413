"""Small random checkpoints of architectures that the library transformers runs, written by the library itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

USUAL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96}

SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, "head_dim": 16, "num_dense_layers": 1, "sliding_window": 24},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window": 24},
    "ctrl": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "dff": 96},
    "cwm": {"sliding_window": 24},
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 4},
    "flex_olmo": {**EXPERTS},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        **EXPERTS,
        "head_dim": 16,
        "n_routed_experts": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": {},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {**EXPERTS, "head_dim": 16, "moe_topk": 2},
    "llama": {},
    "minimax_m2": {**EXPERTS, "head_dim": 16, "num_local_experts": 6},
    "ministral": {"head_dim": 16, "sliding_window": 24},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 24},
    "olmoe": {**EXPERTS},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 24},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "smollm3": {},
    "solar_open": {**EXPERTS, "n_routed_experts": 6},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
    "vaultgemma": {"head_dim": 16, "sliding_window": 24},
}
"""For each model type that is served what its configuration has beside, or instead of, what is usual."""


def write_library_checkpoint(folder: Path, model_type: str, config: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint of this type with random weights and no tokenizer; `config` replaces keys of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**USUAL, **SERVED.get(model_type, {}), **(config or {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    model.save_pretrained(folder)


def _scaled(name: str, noise: Any) -> Any:
    """Scale noise so that layers change the stream, and the best two of 512 logits are apart."""
    if name.endswith("bias"):
        return 0.3 * noise
    if noise.ndim == 1:
        return 1.0 + 0.2 * noise
    return noise * (1.5 / math.sqrt(noise.shape[-1]))
