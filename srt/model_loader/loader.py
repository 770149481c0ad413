"""Load a model from a checkpoint folder onto its device. Every rank keeps only its own part.

All problems visible in the files' headers (missing, surplus and misshapen tensors) are reported before any weight is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops_choice import layer_ops
from srt.layers.quantization.weight import LinearWeight
from srt.layers.weights import WeightPiece, model_weight_pieces
from srt.model_loader.dummy_weights import DummyWeights
from srt.model_loader.safetensors_weights import check_checkpoint
from srt.model_loader.weight_copy import copy_weights
from srt.models.causal_lm import CausalLM
from srt.utils.checkpoint import read_headers
from srt.utils.model_config import ModelConfig

Progress = Callable[[int, int], None]
"""Callback with the bytes of weights loaded and the bytes in all, both for this rank."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Options for reading weights."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """auto means safetensors, the only file format that is read; dummy draws random weights and needs no files."""
    seed: int = 0
    """Seed of dummy weights."""


class ModelLoader(ABC):
    """Builds a model and fills its parameters."""

    def load_model(
        self,
        config: ModelConfig,
        folder: str | Path,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        check_size: Callable[[int], None] = lambda num_bytes: None,
    ) -> CausalLM:
        """Return this rank's model on `device`, ready to run; ModelError names what the checkpoint lacks.

        `check_size` is called with the size of the parameters in bytes before anything is read or allocated.
        """
        config.check_tp(tp.size)
        with torch.device("meta"):
            model = CausalLM(config, tp, layer_ops(device))
        pieces = model_weight_pieces(model)
        check_size(_num_bytes(model, dtype))
        fill = self.prepare(config, Path(folder), pieces)
        materialize(model, dtype, device)
        _clear_padding(pieces)
        fill(progress)
        for module in model.modules():
            if isinstance(module, LinearWeight):
                module.finish()
        return model.eval()

    @abstractmethod
    def prepare(self, config: ModelConfig, folder: Path, pieces: list[WeightPiece]) -> Callable[[Progress], None]:
        """Check everything that can be checked before memory is allocated, and return a function that does the rest."""


class SafetensorsLoader(ModelLoader):
    """Reads this rank's slices of safetensors files."""

    def prepare(self, config: ModelConfig, folder: Path, pieces: list[WeightPiece]) -> Callable[[Progress], None]:
        headers = read_headers(folder)
        check_checkpoint(folder, config, headers, pieces)
        stored = [piece for piece in pieces if piece.name in headers]
        return lambda progress: copy_weights(headers, stored, stored[0].parameter.device, progress)


class DummyLoader(ModelLoader):
    """Draws random weights: the same for the same seed, for any number of ranks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prepare(self, config: ModelConfig, folder: Path, pieces: list[WeightPiece]) -> Callable[[Progress], None]:
        stored = [piece for piece in pieces if not piece.is_optional]
        return lambda progress: DummyWeights(self._seed).fill(stored, progress)


def get_model_loader(config: LoadConfig) -> ModelLoader:
    """Return the loader for a load format."""
    match config.load_format:
        case "auto" | "safetensors":
            return SafetensorsLoader()
        case "dummy":
            return DummyLoader(config.seed)


def materialize(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate every parameter of a model built on the meta device on `device`, uninitialised, and move its buffers there.

    Parameters get `dtype`, but for those of quantised weights that have types of their own. Modules that share a parameter still share
    it afterwards.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            twin = made.get(id(parameter))
            if twin is None:
                own = _dtype_of(module, name, dtype)
                twin = nn.Parameter(torch.empty(parameter.shape, dtype=own, device=device), requires_grad=False)
                made[id(parameter)] = twin
            setattr(module, name, twin)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _num_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the size of the parameters once they are allocated. Shared ones count once."""
    sizes = {
        id(parameter): parameter.numel() * _dtype_of(module, name, dtype).itemsize
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return sum(sizes.values())


def _dtype_of(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    return module.own_dtypes.get(name, dtype) if isinstance(module, LinearWeight) else dtype


def _clear_padding(pieces: list[WeightPiece]) -> None:
    """Zero the parameters that the checkpoint does not fill completely: rows beyond the vocabulary must give finite logits."""
    filled: dict[int, int] = {}
    for piece in pieces:
        if piece.is_optional:
            piece.parameter.zero_()
        filled[id(piece.parameter)] = filled.get(id(piece.parameter), 0) + piece.num_elements
    for piece in pieces:
        if filled[id(piece.parameter)] < piece.parameter.numel():
            piece.parameter.zero_()
