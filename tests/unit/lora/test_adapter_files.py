"""Adapters that cannot be served as they were trained are refused with a sentence that names why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.lora.adapter_config import parse_config
from srt.lora.adapter_files import AdapterLimits, content_hash, read_adapter
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.random_adapter import AdapterSpec, write_adapter

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def limits(qwen3_checkpoint: Path) -> AdapterLimits:
    found = AdapterLimits.of(ServerArgs(model_path="m", enable_lora=True), ModelConfig.from_folder(qwen3_checkpoint))
    assert found is not None
    return found


@pytest.fixture
def folder(qwen3_checkpoint: Path, tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", qwen3_checkpoint, AdapterSpec())
    return tmp_path / "adapter"


def change_config(folder: Path, **entries: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"r": 0}, "r must have ranks"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj(": 3}}, "rank_pattern"),
        ({"alpha_pattern": {"(" * 50 + "q" + "{99999999999}" + ")" * 50: 3}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 3}}, r"lora_A.weight has the shape \[4, 64\], and must have \[3, 64\]"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
    ids=str,
)
def test_what_the_configuration_asks_for_is_refused_by_name(
    folder: Path, limits: AdapterLimits, entries: dict[str, Any], reason: str
) -> None:
    change_config(folder, **entries)
    with pytest.raises(ModelError, match=reason):
        read_adapter(folder, limits)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.lm_head.lora_A.weight", "output layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        (f"base_model.model.{LAYER}.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "experts"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "layers.9.self_attn.q_proj, a layer"),
        ("something.else", "something.else"),
    ],
)
def test_a_tensor_that_is_not_supported_is_refused_by_name(
    folder: Path, limits: AdapterLimits, name: str, reason: str
) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=reason):
        read_adapter(folder, limits)


def test_halves_wrong_types_and_missing_files_are_refused(folder: Path, limits: AdapterLimits, tmp_path: Path) -> None:
    half, packed = tmp_path / "half", tmp_path / "packed"
    for copy in (half, packed):
        shutil.copytree(folder, copy)
    name = f"base_model.model.{LAYER}.lora_B.weight"
    change_tensors(half, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"only one of the two matrices of {LAYER}"):
        read_adapter(half, limits)
    change_tensors(packed, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelError, match="I8"):
        read_adapter(packed, limits)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_adapter(folder, limits)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(tmp_path, limits)


def test_options_limit_ranks_and_layers(folder: Path, limits: AdapterLimits) -> None:
    assert len(read_adapter(folder, replace(limits, most_rank=4))) == 14
    with pytest.raises(ModelError, match="more than --max-lora-rank 3"):
        read_adapter(folder, replace(limits, most_rank=3))
    with pytest.raises(ModelError, match="--lora-target-modules allows only q_proj, v_proj"):
        read_adapter(folder, replace(limits, modules=("q_proj", "v_proj")))


def test_scales_follow_patterns_as_peft_looks_them_up() -> None:
    text = json.dumps(
        {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"layers.1.self_attn.q_proj": 4, "^model.layers.0": 2},
            "alpha_pattern": {"q_proj": 4},
        }
    )
    config = parse_config(text.encode())
    assert (config.rank_of("model.layers.1.self_attn.q_proj"), config.scale_of("model.layers.1.self_attn.q_proj")) == (
        4,
        1,
    )
    assert (config.rank_of("model.layers.0.mlp.up_proj"), config.scale_of("model.layers.0.mlp.up_proj")) == (2, 8)
    assert config.scale_of("model.layers.11.self_attn.v_proj") == 2
    assert replace(config, by_root=True, rank=4).scale_of("model.layers.11.self_attn.v_proj") == 8


def test_the_hash_tells_contents_apart_and_not_folders(
    folder: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert content_hash(tmp_path / "copy") == content_hash(folder)
    change_config(tmp_path / "copy", lora_alpha=9)
    hashes = {content_hash(folder), content_hash(tmp_path / "copy")}
    change_tensors(folder, lambda tensors: next(iter(tensors.values())).add_(1))
    assert len(hashes | {content_hash(folder)}) == 3
