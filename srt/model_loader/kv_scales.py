"""Read the scales of keys and values in checkpoints made for an fp8 KV memory: one number per layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from srt.model_loader.weight_copy import DTYPES
from srt.utils.checkpoint import TensorHeader, read_headers, read_parts
from srt.utils.model_error import ModelError

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")


@dataclass(frozen=True, slots=True)
class KvScales:
    """Factors by which each layer's stored keys and values are multiplied when read."""

    k: list[float]
    v: list[float]


def is_kv_scale(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_kv_scales(folder: str | Path, num_layers: int) -> KvScales | None:
    """Return the scales; None if the checkpoint has none. ModelError if some are missing or one is not a positive number."""
    headers = read_headers(folder)
    found: dict[tuple[str, int], float] = {}
    for name, header in headers.items():
        match = _NAME.fullmatch(name)
        if match is not None and int(match[1]) < num_layers:
            found[match[2], int(match[1])] = _read_number(header)
    if not found:
        return None
    _check(found, num_layers, folder)
    return KvScales(*([found[kind, layer] for layer in range(num_layers)] for kind in "kv"))


def _check(found: Mapping[tuple[str, int], float], num_layers: int, folder: str | Path) -> None:
    for kind in "kv":
        for layer in range(num_layers):
            scale = found.get((kind, layer))
            if scale is None:
                raise ModelError(
                    f"The checkpoint {folder} has scales for an fp8 KV memory, but no {kind}_scale of layer {layer}."
                )
            if not (math.isfinite(scale) and scale > 0):
                raise ModelError(
                    f"The checkpoint {folder}: {kind}_scale of layer {layer} must be positive, not {scale}."
                )


def _read_number(header: TensorHeader) -> float:
    if header.num_elements != 1:
        raise ModelError(f"{header.file}: {header.name} must be one number, not {list(header.shape)}.")
    if header.dtype not in DTYPES:
        raise ModelError(f"{header.file}: {header.name} is of type {header.dtype}, which is not supported.")
    stored = bytearray().join(read_parts(header))
    return float(torch.frombuffer(stored, dtype=DTYPES[header.dtype]).float().item())
