"""Read the folder of an adapter: its layers, checked against the model's, and the hash that tells its content from any other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from srt.lora.adapter_config import parse_config, read_config_file
from srt.server_args import ServerArgs
from srt.utils.checkpoint import FLOATS, TensorHeader, read_safetensors_headers, some
from srt.utils.layer_spec import FeedForward, SelfAttention
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

TENSORS_FILE: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_READ_BYTES: Final = 1 << 20
# Parts of names that say what a tensor is for, and how a refusal names it.
_REFUSED_PARTS: Final = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "changes of the embedding"),
    ("embed_tokens", "changes of the embedding (embed_tokens)"),
    ("lm_head", "changes of the output layer (lm_head)"),
    ("expert", "changes of experts"),
    ("modules_to_save", "layers that replace the model's (modules_to_save)"),
)

Widths = Mapping[str, tuple[int, int]]
"""Outputs and inputs of linear layers by their path in the checkpoint."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """The change of one layer: y += scale · B A x."""

    path: str
    scale: float
    a: TensorHeader  # [rank, inputs]
    b: TensorHeader  # [outputs, rank]

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What adapters may change."""

    layers: Widths
    modules: Collection[str]
    """Last names of the layers that adapters may change."""
    most_rank: int | None = None

    @classmethod
    def of(cls, args: ServerArgs, config: ModelConfig) -> AdapterLimits | None:
        """Return what the adapters of a server may change; None if it has none."""
        if not args.serves_adapters:
            return None
        return cls(adaptable_layers(config), args.adapter_modules, args.max_lora_rank)


def adaptable_layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the widths of the layers that adapters can change: projections of attention, and MLPs without experts."""
    layers: dict[str, tuple[int, int]] = {}
    hidden = config.hidden_size
    for number, spec in enumerate(config.layers):
        path = f"model.layers.{number}"
        attention, feed_forward = spec.attention, spec.feed_forward
        if isinstance(attention, SelfAttention):
            query, key = attention.query_width, attention.num_kv_heads * attention.head_dim
            parts = {"q_proj": query, "k_proj": key, "v_proj": key}
            if attention.is_one_tensor:
                parts = {"qkv_proj": query + 2 * key}
            layers |= {f"{path}.self_attn.{name}": (width, hidden) for name, width in parts.items()}
            layers[f"{path}.self_attn.o_proj"] = hidden, query
        if isinstance(feed_forward, FeedForward):
            size, mlp = feed_forward.size, f"{path}.{feed_forward.name}"
            parts = {"gate_up_proj": 2 * size} if feed_forward.is_one_tensor else {"gate_proj": size, "up_proj": size}
            layers |= {f"{mlp}.{name}": (width, hidden) for name, width in parts.items()}
            layers[f"{mlp}.down_proj"] = hidden, size
    return layers


def read_adapter(folder: str | Path, limits: AdapterLimits) -> list[AdaptedLayer]:
    """Return the layers of the adapter in a folder, without reading its numbers. ModelError says what is wrong or not supported."""
    folder = Path(folder)
    config = parse_config(read_config_file(folder))
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for header in read_safetensors_headers(_tensors_file(folder)):
        layer, side = _layer_of(header.name, limits)
        if pairs.setdefault(layer, {}).setdefault(side, header) is not header:
            raise ModelError(f"The adapter has {layer} twice.")
    if not pairs:
        raise ModelError(f"{TENSORS_FILE} of {folder} has no tensors.")
    found = []
    for layer, sides in pairs.items():
        if len(sides) != 2:
            raise ModelError(f"The adapter has only one of the two matrices of {layer}.")
        _check_pair(layer, sides["A"], sides["B"], config.rank_of(layer), limits)
        found.append(AdaptedLayer(layer, config.scale_of(layer), sides["A"], sides["B"]))
    return found


def content_hash(folder: str | Path) -> str:
    """Return a hash of the adapter's two files. ModelError if one cannot be read."""
    folder = Path(folder)
    digest = hashlib.blake2b(hashlib.blake2b(read_config_file(folder)).digest(), digest_size=16)
    file = _tensors_file(folder)
    try:
        with file.open("rb") as stream:
            while part := stream.read(_READ_BYTES):
                digest.update(part)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _tensors_file(folder: Path) -> Path:
    file = folder / TENSORS_FILE
    if file.is_file():
        return file
    raise ModelError(
        f"{folder} has no {TENSORS_FILE} (adapters in .bin files are not read: save the adapter anew with PEFT's"
        " save_pretrained)."
    )


def _layer_of(name: str, limits: AdapterLimits) -> tuple[str, str]:
    """Return the path of the layer that a tensor changes, and which of its two matrices it is."""
    for part, what in _REFUSED_PARTS:
        if part in name:
            raise ModelError(f"The adapter has {what}, which is not supported (tensor {name[:200]}).")
    match = re.fullmatch(_TENSOR, name)
    if match is None:
        raise ModelError(f"The adapter has the tensor {name[:200]}, which is none of a LoRA adapter's.")
    layer = match["layer"]
    if layer not in limits.layers:
        raise ModelError(
            f"The adapter changes {layer}, a layer that this model does not have or that cannot be adapted."
        )
    module = layer.rpartition(".")[2]
    if module not in limits.modules:
        raise ModelError(
            f"The adapter changes {layer}, but --lora-target-modules allows only {some(sorted(limits.modules), 10)}."
        )
    return layer, match["side"]


def _check_pair(layer: str, a: TensorHeader, b: TensorHeader, rank: int, limits: AdapterLimits) -> None:
    num_outputs, num_inputs = limits.layers[layer]
    if limits.most_rank is not None and rank > limits.most_rank:
        raise ModelError(f"The adapter has rank {rank} in {layer}, more than --max-lora-rank {limits.most_rank}.")
    for header, shape in ((a, (rank, num_inputs)), (b, (num_outputs, rank))):
        if header.shape != shape:
            raise ModelError(f"{header.name} has the shape {list(header.shape)}, and must have {list(shape)}.")
        if header.dtype not in FLOATS:
            raise ModelError(f"{header.name} is of the type {header.dtype}, and must be of floating point.")
