"""Check that safetensors files hold the tensors that a model needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from srt.layers.weights import WeightPiece
from srt.model_loader.kv_scales import is_kv_scale
from srt.utils.checkpoint import FLOATS, TensorHeader, some
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError


def check_checkpoint(
    folder: Path,
    config: ModelConfig,
    headers: Mapping[str, TensorHeader],
    pieces: Sequence[WeightPiece],
    ignored: Collection[str] = (),
    *,
    is_partial: bool = False,
) -> None:
    """Raise ModelError, naming tensors, unless the checkpoint holds exactly what the model needs, and perhaps what is `ignored`.

    If it `is_partial`, it may lack tensors.
    """
    needed = {piece.name: piece for piece in pieces}
    missing = [name for name, piece in needed.items() if name not in headers and not piece.is_optional]
    missing = [] if is_partial else missing
    surplus = [name for name in headers if not (name in needed or name in ignored or is_benign(name, config))]
    present = {name: (piece, headers[name]) for name, piece in needed.items() if name in headers}
    misshapen = [
        f"{name} {list(header.shape)} instead of {list(piece.shape)}"
        for name, (piece, header) in present.items()
        if not _fits(piece, header)
    ]
    unreadable = [
        f"{name} ({header.dtype})" for name, (piece, header) in present.items() if not _is_readable(piece, header)
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


def _fits(piece: WeightPiece, header: TensorHeader) -> bool:
    if piece.is_scale:
        return [n for n in header.shape if n != 1] == [n for n in piece.shape if n != 1]
    return header.shape == piece.shape


def _is_readable(piece: WeightPiece, header: TensorHeader) -> bool:
    """Return whether the tensor's type can be stored in the piece's parameter without a change of meaning."""
    dtype = piece.parameter.dtype
    if piece.quantise is not None:
        return header.dtype in FLOATS
    if dtype is torch.float8_e4m3fn:
        return header.dtype == "F8_E4M3"
    if dtype in (torch.uint8, torch.int8):
        return header.dtype == ("U8" if dtype is torch.uint8 else "I8")
    return header.dtype in ("I32", "I64") if dtype is torch.int32 else header.dtype in FLOATS


def is_benign(name: str, config: ModelConfig) -> bool:
    """Return whether this tensor, which the model does not use, is one that checkpoints commonly contain."""
    if name.endswith("rotary_emb.inv_freq"):
        return True  # computed from the configuration
    if is_kv_scale(name):
        return True  # read separately by an fp8 KV memory
    if name.endswith(".weight_shape"):
        return config.weight_formats.method == "compressed-tensors"  # the shape of an unpacked weight
    if name == "lm_head.weight":
        return (
            config.tie_word_embeddings
        )  # unused by a model that pools; else a copy of the embedding: start-up refuses one that differs
    if re.match(r"(model\.)?mtp(_layers)?\.", name):
        return True  # multi-token prediction
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_mtp_layers
