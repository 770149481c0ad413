"""Exchange a running model's weights in place for others of the same names and shapes.

Weights that are stored as they come are read over the old ones. Those of other modules, such as quantised ones, are loaded beside the old
ones and made ready to multiply as at a start. Then they are copied over the old ones. All addresses stay the same: captured graphs and
tables of addresses remain valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.adapters import AdaptedWeight
from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.ops import LayerOps
from srt.layers.quantization.weight import LinearWeight, PlainWeight
from srt.layers.weights import WeightedModule, WeightPiece
from srt.model_loader.loader import build_whole, clear_padding, finish, materialize
from srt.model_loader.safetensors_weights import check_checkpoint
from srt.model_loader.weight_sources import WeightSource
from srt.models.causal_lm import CausalLM
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

_Part = tuple[str, WeightedModule, list[WeightPiece]]


class WeightUpdate:
    """New weights for a model that runs. `check` reads all of them and changes nothing; `write` puts them in place."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        tp: TensorParallel,
        ops: LayerOps,
        dtype: torch.dtype,
        source: WeightSource,
        *,
        is_partial: bool = False,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_partial`: the source may lack tensors of the model. `report` is called whenever there is progress."""
        self._model = model
        self._config = config
        self._tp = tp
        self._ops = ops
        self._dtype = dtype
        self._device = model.lm_head.weight.device
        self._source = source
        self._is_partial = is_partial
        self._report = report
        self._headers = source.headers

    @torch.inference_mode()
    def check(self) -> None:
        """Compare names, shapes and types, then read or load every part and forget it again. ModelError says what does not fit."""
        plain, parts = self._parts()
        self._source.check(plain, self._report)
        for part in parts:
            self._load(*part)
            _forget(part)

    @torch.inference_mode()
    def write(self) -> None:
        """Put the new weights in place of the old ones. After an error they are a mixture of both, so the process must end."""
        plain, parts = self._parts()
        self._source.copy(plain, self._device, self._report)
        for part in parts:
            for old, new in self._load(*part):
                old.copy_(new)
            _forget(part)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _parts(self) -> tuple[list[WeightPiece], list[_Part]]:
        """Return what is in the source: pieces of the running model that are stored as they come, and all other modules.

        Such a module comes without memory, with its path and the pieces of its weights.
        """
        with torch.device("meta"):
            new = CausalLM(self._config, self._tp, self._ops).eval()
        pieces = new.weight_pieces(self._headers)
        others = build_whole(self._config, self._ops).weight_pieces(self._headers) if self._tp.expert_groups > 1 else []
        ignored = [piece.name for piece in others]
        check_checkpoint(self._source.place, self._config, self._headers, pieces, ignored, is_partial=self._is_partial)
        of_owner: dict[int, list[WeightPiece]] = {}
        for piece in pieces:
            of_owner.setdefault(id(piece.owner), []).append(piece)
        paths = {id(module): path for path, module in new.named_modules()}
        plain: list[WeightPiece] = []
        parts: list[_Part] = []
        for path, module in list(new.named_modules()):
            if isinstance(module, WeightedModule):
                own = [piece for inner in module.modules() for piece in of_owner.get(id(inner), [])]
                stored = [piece for piece in own if piece.name in self._headers]
                if stored and _is_plain(module, own):
                    plain += [replace(piece, owner=self._running(paths[id(piece.owner)])) for piece in stored]
                elif stored:
                    parts.append((path, module, own))
        return plain, parts

    def _running(self, path: str) -> nn.Module:
        """Return the module at this path of the running model; of what adapters wrap, what is inside."""
        module = self._model.get_submodule(path)
        return module.inner if isinstance(module, AdaptedWeight) else module

    def _load(self, path: str, new: WeightedModule, pieces: list[WeightPiece]) -> list[tuple[Tensor, Tensor]]:
        """Load a part. Return its tensors, each behind the one of the running model that it replaces."""
        old = self._model.get_submodule(path)
        missing = [p.name for p in pieces if p.name not in self._headers and not p.is_optional]
        if missing:
            _check_plain(path, new, missing)
        materialize(new, self._dtype, self._device)
        clear_padding(pieces)
        if missing:
            for theirs, ours in _pairs(path, old, new):
                ours.copy_(theirs)
        stored = [piece for piece in pieces if piece.name in self._headers]
        self._source.copy(stored, self._device, self._report)
        finish(new, self._dtype, self._device)
        return list(_pairs(path, old, new))


def _is_plain(module: WeightedModule, pieces: list[WeightPiece]) -> bool:
    """Return whether a running module of this kind has its weights as they come from the checkpoint, but for their type."""
    inner = list(module.modules())
    weights = [one for one in inner if isinstance(one, LinearWeight | PackedExperts)]
    return (
        all(isinstance(one, PlainWeight) for one in weights)
        and all(type(one).finish is WeightedModule.finish for one in inner if isinstance(one, WeightedModule))
        and all(piece.quantise is None and not piece.is_optional for piece in pieces)
    )


def _check_plain(path: str, new: WeightedModule, missing: list[str]) -> None:
    """Raise ModelError if a part with quantised weights lacks tensors: they are quantised together."""
    if any(isinstance(one, LinearWeight | PackedExperts) and not isinstance(one, PlainWeight) for one in new.modules()):
        raise ModelError(
            f"The weights of {path} are quantised together: send {', '.join(missing[:5])} with the others."
        )


def _forget(part: _Part) -> None:
    """Free the memory of a part that is not used any more, though the model around it still refers to it."""
    for module in list(part[1].modules()):
        vars(module).clear()


def _pairs(path: str, old: Any, new: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two finished parts of a model, also those that products of quantised weights hold, that belong together.

    ModelError if the parts store their weights in different forms, as packed weights with and without zero points do.
    """
    if isinstance(old, AdaptedWeight):
        old = old.inner
    if old is new:
        return
    is_alike = isinstance(old, Tensor) == isinstance(new, Tensor) and (old is None) == (new is None)
    if isinstance(new, Tensor) and is_alike:
        is_alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    if not is_alike:
        raise ModelError(
            f"The weights of {path} would be stored in another form than now: start the server anew for them."
        )
    if isinstance(new, Tensor):
        yield old.detach(), new.detach()
    theirs, ours = inner_values(old), inner_values(new)
    for key in dict.fromkeys((*theirs, *ours)):
        yield from _pairs(path, theirs.get(key), ours.get(key))


def inner_values(value: Any) -> Mapping[Any, Any]:
    """Return what a module, a record or a collection holds, by name or number."""
    if isinstance(value, nn.Module):
        own = {k: v for k, v in vars(value).items() if not isinstance(v, dict)}
        return {**own, **dict(value.named_children()), **dict(value.named_parameters(recurse=False))}
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}
