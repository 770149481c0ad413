"""Check that safetensors files hold the tensors that a model needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from srt.layers.weights import WeightPiece
from srt.model_loader.kv_scales import is_kv_scale
from srt.utils.checkpoint import ITEM_BYTES, TensorHeader, some
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError


def check_checkpoint(
    folder: Path, config: ModelConfig, headers: Mapping[str, TensorHeader], pieces: Sequence[WeightPiece]
) -> None:
    """Raise ModelError, naming tensors, unless the checkpoint holds exactly what the model needs."""
    shapes = {piece.name: piece.shape for piece in pieces}
    missing = [name for name in shapes if name not in headers]
    surplus = [name for name in headers if name not in shapes and not is_benign(name, config)]
    misshapen = [
        f"{name} {list(headers[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in headers and headers[name].shape != shape
    ]
    unreadable = [
        f"{name} ({headers[name].dtype})"
        for name in shapes
        if name in headers and headers[name].dtype not in ITEM_BYTES
    ]
    complaints = (
        ("it lacks", missing),
        ("it has what the model does not use:", surplus),
        ("of the wrong shape is", misshapen),
        ("of a type that is not supported is", unreadable),
    )
    found = [f"{text} {some(names)} ({len(names)} in all)" for text, names in complaints if names]
    if found:
        raise ModelError(f"The checkpoint {folder} does not fit {config.architecture}: {'; '.join(found)}.")


def is_benign(name: str, config: ModelConfig) -> bool:
    """Return whether this tensor, which the model does not use, is one that checkpoints commonly contain."""
    if name.endswith("rotary_emb.inv_freq"):
        return True  # computed from the configuration
    if is_kv_scale(name):
        return True  # read separately by an fp8 KV memory
    if name == "lm_head.weight":
        return config.tie_word_embeddings  # a copy of the embedding: start-up refuses one that differs
    if re.match(r"(model\.)?mtp(_layers)?\.", name):
        return True  # multi-token prediction
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_mtp_layers
