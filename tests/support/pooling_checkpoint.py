"""Embedding models and classifiers made of random checkpoints that generate text, and what `transformers` makes of a text with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from srt.utils.pooling_config import Pooling

MODE_KEYS = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write_embedder(folder: Path, source: Path, pooling: Pooling, *, normalize: bool = True, bare: bool = False) -> Path:
    """Copy a checkpoint with the files of sentence-transformers. `bare`: saved without its head, as those save it."""
    shutil.copytree(source, folder)
    write_modules(folder, pooling, normalize=normalize)
    if bare:
        _rewrite(folder, "Model", lambda weights: {k.removeprefix("model."): v for k, v in weights.items()})
    return folder


def write_modules(folder: Path, pooling: Pooling, *, normalize: bool) -> None:
    """Write the files of sentence-transformers beside a checkpoint."""
    kinds = ["Transformer", "Pooling", "Normalize"] if normalize else ["Transformer", "Pooling"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {key: mode == pooling for mode, key in MODE_KEYS.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


def write_classifier(folder: Path, source: Path, labels: list[str]) -> Path:
    """Copy a checkpoint with a random head that scores these labels."""
    import torch

    shutil.copytree(source, folder)

    def with_head(weights: dict[str, Any]) -> dict[str, Any]:
        width = weights["model.norm.weight"].shape[0]
        head = torch.randn((len(labels), width), generator=torch.Generator().manual_seed(5)) / width**0.5
        return {**{k: v for k, v in weights.items() if k != "lm_head.weight"}, "score.weight": head}

    config = _rewrite(folder, "ForSequenceClassification", with_head)
    config |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    config["pad_token_id"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _rewrite(folder: Path, ending: str, change: Any) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", ending)]
    (folder / "config.json").write_text(json.dumps(config))
    return config


def reference_vectors(folder: Path, prompts: list[list[int]], pooling: Pooling) -> NDArray[np.float32]:
    """Return what `transformers` computes, one prompt at a time, and the pooling written out; not normalised."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts]
    if pooling == "mean":
        return np.stack([one.mean(axis=0) for one in states])
    return np.stack([one[-1 if pooling == "last" else 0] for one in states])


def reference_scores(folder: Path, prompts: list[list[int]]) -> NDArray[np.float32]:
    """Return the scores that `transformers` gives each prompt's labels."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None  # one prompt at a time has no padding; the last token counts, whichever it is
    with torch.inference_mode():
        scores = [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
    return np.stack(scores)
