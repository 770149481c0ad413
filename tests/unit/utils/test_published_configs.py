"""Configurations as well-known checkpoints have them: what they say arrives in ModelConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.utils.model_config import ModelConfig
from srt.utils.rope_config import RopeConfig

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
MISTRAL_7B_V0_3: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder, **more)


def test_llama_3_2(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_3_2_1B)
    assert config.layers[0].attention.rope == RopeConfig(
        "llama3", 5e5, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert (config.context_length, config.layers[0].attention.head_dim, config.tie_word_embeddings) == (
        131072,
        64,
        True,
    )
    assert config.eos_token_ids == (128001, 128008, 128009)
    config.check_tp(16)


def test_qwen_2_5_and_the_yarn_that_its_makers_advise(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_2_5_7B)
    assert (config.layers[0].attention.head_dim, config.context_length, config.torch_dtype) == (128, 32768, "bfloat16")
    for tp_size in (1, 2, 4):
        config.check_tp(tp_size)
    yarn = {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
    longer = read(tmp_path, QWEN_2_5_7B, overrides=yarn, context_length=131072)
    rope = longer.layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.theta, longer.context_length) == (
        "yarn",
        1e6,
        131072,
    )
    assert rope.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_qwen3(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_8B, QWEN3_GENERATION)
    assert (config.layers[0].attention.rope, config.context_length) == (RopeConfig("default", 1e6), 40960)
    assert config.eos_token_ids == (151645, 151643)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_mistral(tmp_path: Path) -> None:
    config = read(tmp_path, MISTRAL_7B_V0_3)
    assert (config.layers[0].attention.head_dim, config.context_length, config.vocab_size) == (128, 32768, 32768)
