"""LoRA adapters in linear layers: the rows of a step that have one get scale · B A x added to their product.

The weight of each layer that can be adapted is wrapped in an `AdaptedWeight`. In a step without adapters it is the weight inside, with
all its fast paths. In other steps it hides the matrix, so that no fused kernel reads past it, and multiplies by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.linear import LinearLayer
from srt.layers.quantization.weight import IntegerMatrix, LinearWeight, NumberForm, Place
from srt.layers.weights import WeightPiece

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import HostRows
    from srt.protocol.messages import Admission, PlanSection

_BEHIND_ATTENTION = (".self_attn.o_proj", ".mlp.gate_up_proj", ".mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Up:
    """The second matrix of an adapted layer, B times its scale, as this rank has it."""

    matrix: Tensor  # [outputs, rank]
    first_output: int
    """Place of its outputs in the merged layer."""
    first_low: int
    """Place of its inputs among the products with `Change.down`."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter changes of one merged layer on this rank."""

    down: Tensor  # [sum of the ranks, inputs]: the first matrices, A, of all its parts
    ups: tuple[Up, ...]

    def add_to(self, y: Tensor, x: Tensor, tokens: Tensor | None) -> None:
        """Add the change to the products `y` of the inputs `x`: of these tokens, or of all."""
        low = F.linear(x if tokens is None else x[tokens], self.down)
        for up in self.ups:
            num_outputs, rank = up.matrix.shape
            delta = F.linear(low[:, up.first_low : up.first_low + rank], up.matrix)
            part = y[:, up.first_output : up.first_output + num_outputs]
            if tokens is None:
                part.add_(delta)
            else:
                part.index_add_(0, tokens, delta)


Changes = Mapping[str, Change]
"""The changes of one adapter, by the path of the layer in the model."""


@dataclass(frozen=True, slots=True)
class _Share:
    """An adapter of the step that runs, and the tokens that have it; None: all."""

    changes: Changes
    tokens: Tensor | None


class StepAdapters:
    """The adapters that this rank holds, those of the slots, and those of the step that runs."""

    def __init__(self) -> None:
        self._held: dict[str, Changes] = {}  # by key; other threads add to it
        self._key_of_slot: dict[int, str] = {}
        self.shares: list[_Share] = []
        """For layers that compute all tokens of the step."""
        self.last_shares: list[_Share] = []
        """For what follows the last attention: it computes only the tokens whose output is needed."""

    def hold(self, key: str, changes: Changes) -> None:
        """Keep an adapter for rows to come. Called by any thread."""
        self._held[key] = changes

    def release(self, key: str) -> None:
        """Forget an adapter that no row has any more."""
        self._held.pop(key, None)

    def clear(self) -> None:
        """Forget the slots."""
        self._key_of_slot.clear()

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note the adapters of the slots that begin anew."""
        for admission in admissions:
            self._key_of_slot.pop(admission.slot, None)
            if admission.adapter:
                self._key_of_slot[admission.slot] = admission.adapter

    def are_in(self, section: PlanSection) -> bool:
        """Return whether a row of this step has an adapter."""
        slots = self._key_of_slot
        if not slots:
            return False
        return any(slot in slots for rows in (section.extend_slots, section.decode_slots) for slot in rows.tolist())

    @contextmanager
    def applied(self, rows: HostRows, output_tokens: Tensor | None) -> Iterator[None]:
        """Inside, layers add the changes of these rows' adapters. `output_tokens` are those whose output is needed; None: all."""
        keys = [self._key_of_slot.get(slot, "") for slot in rows.slots.tolist()]
        distinct = [key for key in dict.fromkeys(keys) if key]
        if not distinct:
            yield
            return
        counts = np.ones(len(keys), np.int64)
        counts[: len(rows.extend_lens)] = rows.extend_lens
        numbers = {key: number for number, key in enumerate(distinct)}
        of_token = np.repeat([numbers.get(key, -1) for key in keys], counts)
        self.shares = self._shares(distinct, of_token)
        of_output = of_token if output_tokens is None else of_token[output_tokens.numpy()]
        self.last_shares = self._shares(distinct, of_output)
        try:
            yield
        finally:
            self.shares, self.last_shares = [], []

    def _shares(self, keys: list[str], of_token: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[_Share]:
        shares = []
        for number, key in enumerate(keys):
            tokens = np.flatnonzero(of_token == number)
            if len(tokens):
                whole = len(tokens) == len(of_token)
                shares.append(_Share(self._held[key], None if whole else torch.from_numpy(tokens)))
        return shares


class AdaptedWeight(LinearWeight):
    """A weight, and what the adapters of the step that runs add to its products."""

    def __init__(self, inner: LinearWeight, path: str, step: StepAdapters, *, is_last: bool) -> None:
        """`path` is the layer's path in the model. `is_last`: it computes only the tokens whose output is needed."""
        super().__init__()
        self.inner = inner
        self.shape = inner.shape
        self._path = path
        self._step = step
        self._is_last = is_last

    @property
    def _is_bare(self) -> bool:
        return not self._step.shares

    @property
    def matrix(self) -> Tensor | None:
        return self.inner.matrix if self._is_bare else None

    @property
    def scaled_matrix(self) -> tuple[Tensor, Tensor] | None:
        return self.inner.scaled_matrix if self._is_bare else None

    @property
    def integer_matrix(self) -> IntegerMatrix | None:
        return self.inner.integer_matrix if self._is_bare else None

    @property
    def number_form(self) -> NumberForm | None:
        return self.inner.number_form if self._is_bare else None

    def dummy_scale(self) -> float:
        return self.inner.dummy_scale()

    def pieces(self, places: Sequence[Place]) -> Iterator[WeightPiece]:
        return self.inner.pieces(places)

    def finish(self) -> None:
        self.inner.finish()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.inner.multiply(x, bias)
        step = self._step
        for share in step.last_shares if self._is_last else step.shares:
            change = share.changes.get(self._path)
            if change is not None:
                change.add_to(y, x, share.tokens)
        return y


def adapt_layers(model: nn.Module, paths: Mapping[str, tuple[int, int]], step: StepAdapters) -> dict[str, list[Place]]:
    """Wrap the weights of the layers that adapters can change, `paths` in the checkpoint. Return what each is made of, by its path.

    Called when the model is loaded, before anything looks up addresses.
    """
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, LinearLayer)}
    last = max(_layer_number(path) for path in linears)
    found: dict[str, list[Place]] = {}
    for path, layer in linears.items():
        places = layer.places(path)
        if all(at.path in paths for at in places):
            found[path] = places
            is_last = _layer_number(path) == last and path.endswith(_BEHIND_ATTENTION)
            layer.weight = AdaptedWeight(layer.weight, path, step, is_last=is_last)
    missing = paths.keys() - {at.path for places in found.values() for at in places}
    assert not missing, f"no layer of the model is {sorted(missing)[:3]}"
    return found


def change_of(
    places: Sequence[Place],
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> Change | None:
    """Return this rank's part of the change of a layer made of `places`; None if it changes none of them.

    `matrices` are A and B times its scale, whole, by the path in the checkpoint. If outputs are split over ranks, rows of B are cut, and
    if inputs are, columns of A: the ranks' products are summed as those of the layer are.
    """
    downs: dict[str, tuple[int, Tensor]] = {}
    ups, num_low = [], 0
    for at in places:
        if at.path not in matrices:
            continue
        a, b = matrices[at.path]
        if at.path not in downs:
            downs[at.path] = num_low, (a if at.dim == 0 else a[:, at.start : at.start + at.size])
            num_low += len(a)
        rows = b[at.start : at.start + at.size] if at.dim == 0 else b
        ups.append(Up(rows.to(device, dtype).contiguous(), at.target_start, downs[at.path][0]))
    if not ups:
        return None
    down = torch.cat([part for _, part in downs.values()])
    return Change(down.to(device, dtype).contiguous(), tuple(ups))


def _layer_number(path: str) -> int:
    """Return N of a path such as model.layers.N.mlp.down_proj."""
    return int(path.split(".")[2])
