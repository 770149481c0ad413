"""Map tensors of a checkpoint to the parameters of a library's model, by the names and conversions that the library declares."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.weights import WeightPiece
from srt.models.library.parallel import Cut
from srt.utils.model_error import ModelError


@dataclass(frozen=True, slots=True)
class NumberPiece(WeightPiece):
    """A tensor without dimensions."""

    @property
    def num_elements(self) -> int:
        return 1

    def target(self) -> Tensor:
        return self.parameter.detach().view(1)


class NamedWeights:
    """The parameters of a library's model under their names in it. Create it before the model is taken apart or split."""

    def __init__(self, library: Any, tp: TensorParallel) -> None:
        for path, module in list(library.named_modules()):
            _turn_stored_buffers_into_parameters(library, path, module)
        self._library = library
        self._prefix: str = library.base_model_prefix
        self._owners: dict[str, tuple[nn.Module, str]] = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in library.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        self._cuts: dict[int, Cut] = {}
        self._tp = tp
        _keep_in_float32(library, self._owners)
        self._names = [name for name, _ in library.named_parameters()]  # each tied parameter once

    def cut(self, cuts: dict[int, Cut]) -> None:
        """Read only this rank's part of the parameters that have a cut. They are found by their ids, until they are allocated."""
        self._cuts = cuts

    def pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of every parameter: of the tensors `stored` in a checkpoint, or by the library's own names."""
        if stored is None:
            return [piece for name in self._names for piece in self._whole(name, name)]
        return list(self._stored_pieces(stored))

    def unused(self, stored: Collection[str], others: str = "$^") -> tuple[list[str], list[tuple[str, str]]]:
        """Return the stored tensors that the library ignores, and pairs of which the second is used, and the first must be a copy.

        The library ignores those that its model names, and those whose names match `others`.
        """
        ignored = [*(self._library._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", others]
        names = [name for name in stored if any(re.search(pattern, name) for pattern in ignored)]
        sources = _Conversions(self._library, self._owners, self._prefix).sources(stored)
        copies = [
            (sources[name][0].names[0], sources[used][0].names[0])
            for used in self._names
            for name in self._owners
            if name != used and {name, used} <= sources.keys() and self._parameter(name) is self._parameter(used)
        ]
        return names, copies

    def _stored_pieces(self, stored: Collection[str]) -> Iterator[WeightPiece]:
        sources = _Conversions(self._library, self._owners, self._prefix).sources(stored)
        for name in self._names:
            found = sources.get(name) or self._of_twin(name, sources)
            if not found:
                yield from self._whole(name, name)  # the check of the checkpoint reports that it is missing
            elif not found[0].are_experts:
                yield from self._whole(found[0].names[0], name)
            else:
                yield from self._experts(name, found)

    def _of_twin(self, name: str, sources: dict[str, list[_Source]]) -> list[_Source]:
        """Return the sources of a parameter under another name of it."""
        parameter = self._parameter(name)
        twins = (other for other in sources if other in self._owners and self._parameter(other) is parameter)
        return next((sources[twin] for twin in twins), [])

    def _parameter(self, name: str) -> nn.Parameter:
        owner, attribute = self._owners[name]
        parameter = getattr(owner, attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def _whole(self, source: str, name: str) -> Iterator[WeightPiece]:
        """Yield the pieces of a parameter that one tensor fills, which is cut like the parameter: those of each matrix of a stack."""
        owner, attribute = self._owners[name]
        parameter = self._parameter(name)
        if not parameter.ndim:
            yield NumberPiece(source, (), owner, attribute, 0, 0, 1, 0)
            return
        cut = self._cuts.get(id(parameter))
        shape = self._stored_shape(parameter, cut)
        dim, ranges = self._ranges(shape[-2:], cut)
        for index in range(shape[0]) if parameter.ndim == 3 else (None,):
            for start, size, target in ranges:
                yield WeightPiece(source, shape, owner, attribute, dim, start, size, target, index, index)

    def _experts(self, name: str, parts: list[_Source]) -> Iterator[WeightPiece]:
        """Yield a piece for each expert and part. Parts lie one after the other along the rows of an expert."""
        owner, attribute = self._owners[name]
        parameter = self._parameter(name)
        cut = self._cuts.get(id(parameter))
        num_experts, num_rows, *rest = self._stored_shape(parameter, cut)
        if cut is not None and cut.num_parts != len(parts):
            raise ModelError(
                f"The checkpoint stores {name} in {len(parts)} parts, which cannot be split over ranks: use --tp 1."
            )
        shape = (num_rows // len(parts), *rest)
        dim, ((start, size, _),) = self._ranges(shape, None if cut is None else Cut(cut.dim))
        for number, part in enumerate(parts):
            if len(part.names) != num_experts:
                raise ModelError(
                    f"The checkpoint has {len(part.names)} tensors like {part.names[0]}, not {num_experts}."
                )
            for expert, source in enumerate(part.names):
                yield WeightPiece(source, shape, owner, attribute, dim, start, size, number * size, expert)

    def _stored_shape(self, parameter: nn.Parameter, cut: Cut | None) -> tuple[int, ...]:
        """Return the shape that the parameter has before it is cut."""
        shape = list(parameter.shape)
        if cut is not None:
            shape[-cut.dim] *= self._tp.size
        return tuple(shape)

    def _ranges(self, shape: tuple[int, ...], cut: Cut | None) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the dimension along which a matrix or vector is cut, and this rank's ranges: begin, size, begin in the parameter."""
        if cut is None:
            return 0, [(0, shape[0], 0)]
        dim = len(shape) - cut.dim
        part = shape[dim] // cut.num_parts
        size = part // self._tp.size
        return dim, [(number * part + self._tp.rank * size, size, number * size) for number in range(cut.num_parts)]


@dataclass(slots=True)
class _Source:
    """Stored tensors that make a parameter, or a part of one: a single tensor, or one for each expert."""

    names: list[str]
    are_experts: bool = False


class _Conversions:
    """The library's renamings and conversions of a checkpoint's tensors."""

    def __init__(self, library: Any, owners: Collection[str], prefix: str) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        steps = get_model_conversion_mapping(library) or []
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._owners = dict.fromkeys(owners, True)
        self._prefix = prefix

    def sources(self, stored: Collection[str]) -> dict[str, list[_Source]]:
        """Return for each parameter the tensors that make it, in the order in which they are joined."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        found: dict[str, dict[str | None, list[str]]] = {}
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._owners)
            found.setdefault(target, {}).setdefault(pattern, []).append(name)
        return {target: self._ordered(target, parts) for target, parts in found.items()}

    def _ordered(self, target: str, parts: dict[str | None, list[str]]) -> list[_Source]:
        if None in parts:
            return [_Source(parts[None])]
        converter = next(one for one in self._converters if set(parts) <= set(one.source_patterns))
        kinds = [type(operation).__name__ for operation in converter.operations]
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            raise ModelError(
                f"The checkpoint stores {target} in another form ({', '.join(kinds)} of {parts[min(parts, key=str)][0]}), which is not"
                " supported: save it anew with save_pretrained of the library transformers."
            )
        return [_Source(parts[one], are_experts=True) for one in converter.source_patterns if one in parts]


def _keep_in_float32(library: Any, owners: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Let loaders allocate in float32 what the library keeps in it whatever the model's type, such as a router's bias."""
    kept = library._keep_in_fp32_modules_strict or ()
    for name, (module, attribute) in owners.items():
        if any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in kept):
            own: dict[str, torch.dtype] = {**getattr(module, "own_dtypes", {}), attribute: torch.float32}
            module.own_dtypes = own  # type: ignore[assignment]  # loaders ask modules for it


def _turn_stored_buffers_into_parameters(library: Any, path: str, module: nn.Module) -> None:
    """Let loaders fill the buffers that checkpoints hold, such as a router's bias, like any other weight."""
    stored = library.state_dict().keys() if module._buffers else ()
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and (f"{path}.{name}" if path else name) in stored:
            del module._buffers[name]
            module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
