"""Checking and reading the tensors of safetensors files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from srt.layers.weights import WeightPiece
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
    """True for tensors that checkpoints are known to hold though the model does not need them."""
    if name.endswith("rotary_emb.inv_freq"):
        return True  # computed from the configuration
    if name == "lm_head.weight":
        return config.tie_word_embeddings  # a copy of the embedding
    if re.match(r"(model\.)?mtp(_layers)?\.", name):
        return True  # multi-token prediction
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_mtp_layers


def copy_weights(
    headers: Mapping[str, TensorHeader], pieces: Sequence[WeightPiece], progress: Callable[[int, int], None]
) -> None:
    """Fill the pieces in the order in which they lie in the files."""

    def place(piece: WeightPiece) -> tuple[str, int]:
        header = headers[piece.name]
        return str(header.file), header.start

    total = sum(_read_bytes(piece, headers) for piece in pieces)
    done = 0
    progress(0, total)
    for file, in_file in groupby(sorted(pieces, key=place), key=lambda piece: place(piece)[0]):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for piece in in_file:
                    _copy(opened.get_slice(piece.name), piece)
                    done += _read_bytes(piece, headers)
                    progress(done, total)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}.") from error


def _copy(stored: object, piece: WeightPiece) -> None:
    if not piece.size:
        return
    end = piece.start + piece.size
    index = (slice(None),) * piece.dim + (slice(piece.start, end),)
    values = stored[index]  # type: ignore[index]  # safetensors has no types
    assert isinstance(values, torch.Tensor)
    piece.target().copy_(values)


def _read_bytes(piece: WeightPiece, headers: Mapping[str, TensorHeader]) -> int:
    return piece.num_elements * ITEM_BYTES[headers[piece.name].dtype]
