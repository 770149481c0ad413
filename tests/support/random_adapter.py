"""LoRA adapters with random weights, in the layout that PEFT writes, and the checkpoint that one merges into."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from srt.lora.adapter_files import adaptable_layers
from srt.utils.model_config import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What a random adapter looks like."""

    seed: int = 0
    rank: int = 4
    alpha: float = 8.0
    modules: Sequence[str] = ALL
    by_root: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    """By the last part of a layer's name."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    layers: Sequence[int] | None = None
    """None: all."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of adapter_config.json."""
    size: float = 1.0
    """Of the changes, about as large as the weights with 1."""


def write_adapter(folder: Path, checkpoint: Path, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Write an adapter for the checkpoint's model. Return what it adds to each weight, by the layer's path."""
    generator = torch.Generator().manual_seed(spec.seed)
    tensors: dict[str, torch.Tensor] = {}
    deltas: dict[str, torch.Tensor] = {}
    for path, (num_outputs, num_inputs) in adaptable_layers(ModelConfig.from_folder(checkpoint)).items():
        name = path.rpartition(".")[2]
        if name not in spec.modules or (spec.layers is not None and int(path.split(".")[2]) not in spec.layers):
            continue
        rank, alpha = spec.ranks.get(name, spec.rank), spec.alphas.get(name, spec.alpha)
        scale = alpha / (math.sqrt(rank) if spec.by_root else rank)
        a = torch.randn(rank, num_inputs, generator=generator) / math.sqrt(num_inputs)
        b = torch.randn(num_outputs, rank, generator=generator) * spec.size / (scale * math.sqrt(rank))
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
        deltas[path] = scale * (b @ a)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.by_root,
        "rank_pattern": dict(spec.ranks),
        "alpha_pattern": dict(spec.alphas),
        "target_modules": list(spec.modules),
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        **spec.config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def merge(folder: Path, checkpoint: Path, deltas: Mapping[str, torch.Tensor]) -> Path:
    """Write the checkpoint with the adapter's changes in its weights."""
    shutil.copytree(checkpoint, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for path, delta in deltas.items():
        tensors[f"{path}.weight"] = tensors[f"{path}.weight"].float() + delta
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
