"""Load a model from a checkpoint folder onto its device. Every rank keeps only its own part.

All problems visible in the files' headers (missing, surplus and misshapen tensors) are reported before any weight is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.ops import LayerOps
from srt.layers.ops_choice import layer_ops
from srt.layers.quantization.weight import LinearWeight, are_factors
from srt.layers.weights import WeightedModule, WeightPiece
from srt.model_loader.dummy_weights import DummyWeights
from srt.model_loader.safetensors_weights import check_checkpoint
from srt.model_loader.weight_copy import copy_weights
from srt.models.any_model import AnyModel
from srt.models.causal_lm import CausalLM
from srt.models.library.encoder import LibraryEncoder
from srt.models.library.library_model import LibraryCausalLM
from srt.utils.checkpoint import TensorHeader, is_copy, read_headers
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.pipeline_stage import Stage

Progress = Callable[[int, int], None]
"""Callback with the bytes of weights loaded and the bytes in all, both for this rank."""
Prepare = Callable[[WeightPiece], None]
"""Allocates what a piece fills, unless it was allocated before."""
Fill = Callable[[torch.device, Progress, Prepare], None]


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Options for reading weights."""

    load_format: Literal["auto", "safetensors", "dummy", "sharded_state"] = "auto"
    """auto reads safetensors files, or PyTorch's own (.bin) where there are none; dummy draws random weights and needs no files;
    sharded_state is auto for all folders but those that `ShardedStateLoader` reads."""
    seed: int = 0
    """Seed of dummy weights."""


class ModelLoader(ABC):
    """Builds a model and fills its parameters."""

    @abstractmethod
    def load_model(
        self,
        config: ModelConfig,
        folder: str | Path,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        check_size: Callable[[int], None] = lambda num_bytes: None,
        model: LibraryCausalLM | LibraryEncoder | None = None,
        ops: LayerOps | None = None,
        stage: Stage | None = None,
    ) -> AnyModel:
        """Return this rank's model on `device`, ready to run; ModelError names what the checkpoint lacks.

        `check_size` is called with the size of the parameters in bytes before anything is read or allocated. `model` is a model of the
        library, on the meta device; without it our own is built, with `ops` or else those of the device: all of it, or one stage.
        """


class _FillingLoader(ModelLoader):
    """Fills what was built with tensors of a checkpoint, or random ones, and then brings them into the form that is used."""

    def load_model(
        self,
        config: ModelConfig,
        folder: str | Path,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        check_size: Callable[[int], None] = lambda num_bytes: None,
        model: LibraryCausalLM | LibraryEncoder | None = None,
        ops: LayerOps | None = None,
        stage: Stage | None = None,
    ) -> AnyModel:
        experts = tp.of_experts
        config.check_tp(tp.size, experts.expert_groups, experts.size)
        ops = ops or layer_ops(device)
        built = model or build_ours(config, tp, ops, stage)
        check_size(_num_bytes(built, dtype))
        has_all = experts.expert_groups == 1 and (stage is None or stage.num_stages == 1)
        whole = built if has_all else build_whole(config, ops)
        pieces, fill = self.prepare(config, Path(folder), built, whole)
        memory = ParameterMemory(dtype, device)
        for piece in incomplete(pieces):
            memory.allocate(piece.owner)
            piece.parameter.zero_()
        fill(device, progress, lambda piece: memory.allocate(piece.owner))
        memory.allocate_all(built)
        finish(built, dtype, device)
        return built.eval()

    @abstractmethod
    def prepare(
        self, config: ModelConfig, folder: Path, model: AnyModel, whole: AnyModel
    ) -> tuple[list[WeightPiece], Fill]:
        """Check everything that can be checked before memory is allocated. Return what will be filled, and a function that fills it.

        `whole` is the whole model if `model` has some of its layers or experts only, else `model` itself.
        """


class CheckpointLoader(_FillingLoader):
    """Reads this rank's slices of a checkpoint's files."""

    def __init__(self, is_safetensors_only: bool = False) -> None:
        self._is_safetensors_only = is_safetensors_only

    def prepare(
        self, config: ModelConfig, folder: Path, model: AnyModel, whole: AnyModel
    ) -> tuple[list[WeightPiece], Fill]:
        headers = read_headers(folder)
        if self._is_safetensors_only and any(header.file.suffix == ".bin" for header in headers.values()):
            raise ModelError(f"{folder} has no safetensors files, which --load-format safetensors asks for: use auto.")
        pieces = model.weight_pieces(headers)
        ignored = _unused(folder, headers, model) if isinstance(model, LibraryCausalLM | LibraryEncoder) else []
        if whole is not model:
            ignored += [piece.name for piece in whole.weight_pieces(headers)]
        check_checkpoint(folder, config, headers, pieces, ignored)
        stored = [piece for piece in pieces if piece.name in headers]
        return pieces, lambda device, progress, prepare: copy_weights(headers, stored, device, progress, prepare)


class DummyLoader(_FillingLoader):
    """Draws random weights: the same for the same seed, for any number of ranks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prepare(
        self, config: ModelConfig, folder: Path, model: AnyModel, whole: AnyModel
    ) -> tuple[list[WeightPiece], Fill]:
        pieces = model.weight_pieces(None)
        stored = [piece for piece in pieces if not piece.is_optional]

        def fill(device: torch.device, progress: Progress, prepare: Prepare) -> None:
            for piece in stored:
                prepare(piece)
            DummyWeights(self._seed).fill(stored, progress)

        return pieces, fill


def build_ours(config: ModelConfig, tp: TensorParallel, ops: LayerOps, stage: Stage | None) -> CausalLM:
    """Return the model of our layers, without memory: all of it, or one stage."""
    with torch.device("meta"):
        return CausalLM(config, tp, ops, stage)


def build_whole(config: ModelConfig, ops: LayerOps) -> CausalLM:
    """Return the model with all layers and experts, without memory: it knows what a checkpoint has for other ranks."""
    return build_ours(config, TensorParallel(0, 1, None, torch.device("cpu")), ops, None)


def _unused(folder: Path, headers: Mapping[str, TensorHeader], model: LibraryCausalLM | LibraryEncoder) -> list[str]:
    """Return the tensors that a model of the library ignores; ModelError if one of them differs from what is used in its place."""
    ignored, copies = model.unused_weights(headers)
    for name, used in copies:
        if not is_copy(headers[name], headers[used]):
            raise ModelError(
                f"The checkpoint {folder} has {name} and {used}, which differ, though its configuration says that they are the same."
            )
    return [*ignored, *(name for name, _ in copies)]


def get_model_loader(config: LoadConfig) -> ModelLoader:
    """Return the loader for a load format."""
    match config.load_format:
        case "auto" | "safetensors" | "sharded_state":
            return CheckpointLoader(is_safetensors_only=config.load_format == "safetensors")
        case "dummy":
            return DummyLoader(config.seed)


class ParameterMemory:
    """Allocates the parameters of a model built on the meta device, uninitialised, each once.

    Parameters get `dtype`, but for those of quantised weights and routers that have types of their own. Modules that share a parameter
    still share it afterwards.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._made: dict[
            nn.Parameter, nn.Parameter
        ] = {}  # by the one on the meta device, which tells whether it is shared
        self._done: set[nn.Module] = set()

    def allocate(self, module: nn.Module) -> None:
        """Allocate the parameters of this module itself, unless that was done."""
        if module in self._done:
            return
        self._done.add(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            twin = self._made.get(parameter)
            if twin is None:
                own = _dtype_of(module, name, self._dtype)
                twin = nn.Parameter(torch.empty(parameter.shape, dtype=own, device=self._device), requires_grad=False)
                self._made[parameter] = twin
            setattr(module, name, twin)

    def allocate_all(self, model: nn.Module) -> None:
        """Allocate what is left of the model, and move its buffers to the device."""
        for module in model.modules():
            self.allocate(module)
        move_buffers(model, self._device)


def materialize(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate every parameter of a model built on the meta device on `device`, uninitialised, and move its buffers there."""
    ParameterMemory(dtype, device).allocate_all(model)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what is computed and not loaded to `device`."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def finish(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Make all weights ready to multiply: those of experts together, and weights before the layers that hold them.

    ModelError names a scale that no weight can have.
    """
    _check_factors([one for one in module.modules() if isinstance(one, LinearWeight)])
    _finish(module, dtype, device)


def _check_factors(weights: list[LinearWeight]) -> None:
    """Check what is in all weights at once, because each check waits for the device."""
    loaded = [factors.reshape(-1) for weight in weights for factors in weight.factors.values()]
    if loaded and not are_factors(torch.cat(loaded)):
        for weight in weights:
            weight.check_factors()


def _finish(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    if isinstance(module, LinearWeight | PackedExperts):
        module.finish()
        return
    for child in module.children():
        _finish(child, dtype, device)
    if isinstance(module, WeightedModule):
        module.finish(dtype, device)


def _num_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the size of the parameters once they are allocated. Shared ones count once."""
    sizes = {
        id(parameter): parameter.numel() * _dtype_of(module, name, dtype).itemsize
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return sum(sizes.values())


def _dtype_of(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    own: Mapping[str, torch.dtype] = getattr(module, "own_dtypes", {})
    return own.get(name, dtype)


def clear_padding(pieces: list[WeightPiece]) -> None:
    """Zero the parameters that the checkpoint does not fill completely: rows beyond the vocabulary must give finite logits."""
    for piece in incomplete(pieces):
        piece.parameter.zero_()


def incomplete(pieces: list[WeightPiece]) -> list[WeightPiece]:
    """Return those pieces whose parameters the checkpoint perhaps does not fill completely."""
    filled: dict[nn.Parameter, int] = {}
    for piece in pieces:
        filled[piece.parameter] = filled.get(piece.parameter, 0) + (0 if piece.is_optional else piece.num_elements)
    return [piece for piece in pieces if filled[piece.parameter] < piece.parameter.numel()]
