"""DeepSeek V3 with a layer that predicts the token after the next (MTP), of random weights, and that layer by the library transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_mtp_layer(target: Path, folder: Path) -> Path:
    """Copy a checkpoint of DeepSeek V3, with a layer behind its last one that is like it but for noise."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    size, number = config["hidden_size"], config["num_hidden_layers"]
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return 0.05 * torch.randn(shape, generator=generator)

    last, prefix = f"model.layers.{number - 1}.", f"model.layers.{number}."
    for name, weight in list(weights.items()):
        if name.startswith(last):
            weights[prefix + name.removeprefix(last)] = weight + 0.1 * weight.float().std() * torch.randn(
                weight.shape, generator=generator
            )
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{name}.weight"] = 1 + random(size)
    weights[f"{prefix}eh_proj.weight"] = random(size, 2 * size)
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


class ReferenceMtp:
    """The layer over whole sequences."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        number = config.num_hidden_layers
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config.num_hidden_layers = number + 1
        longer = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        self._layer, self._rotary = longer.model.layers[number], longer.model.rotary_emb
        stored, prefix = load_file(folder / "model.safetensors"), f"model.layers.{number}."
        self._weights = {
            name.removeprefix(prefix): weight.float() for name, weight in stored.items() if name.startswith(prefix)
        }
        self._eps = config.rms_norm_eps

    @torch.inference_mode()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the greedy drafts behind these tokens."""
        features = self._model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        drafts: list[int] = []
        for _ in range(count):
            hidden = self._norm(self._hidden([*ids[1:], *drafts], features)[-1:], "shared_head.norm")
            drafts.append(int((hidden @ self._weights["shared_head.head.weight"].t()).argmax()))
            features = torch.cat((features, hidden))
        return drafts

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _hidden(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self._model.get_input_embeddings()(torch.tensor(ids))
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(features, "hnorm")), dim=-1)
        x, length = (both @ self._weights["eh_proj.weight"].t())[None], len(ids)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        given = {"attention_mask": mask, "position_ids": positions, "position_embeddings": self._rotary(x, positions)}
        hidden: torch.Tensor | tuple[torch.Tensor, ...] = self._layer(x, **given)
        return (hidden[0] if isinstance(hidden, tuple) else hidden)[0]
