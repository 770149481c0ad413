"""LoRA adapters of a step on a CPU: the rows of each are multiplied one adapter after the other, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.layers.adapters import AdaptedLayer, Matrices, StepAdapters
from srt.layers.ops import Affine, LayerOps
from srt.layers.quantization.weight import Place

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import HostRows
    from srt.protocol.messages import Admission, PlanSection


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


class HostAdapters(StepAdapters):
    """Keeps the matrices of each adapter by itself, and for each step the tokens of each."""

    def __init__(self, layers: Mapping[str, AdaptedLayer], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._held: dict[str, Changes] = {}  # by key; other threads add to it
        self._key_of_slot: dict[int, str] = {}
        self._shares: list[_Share] = []  # of layers that compute all tokens of the step
        self._last_shares: list[_Share] = []  # of what follows the last attention

    @property
    def is_applied(self) -> bool:
        return bool(self._shares)

    def hold(self, key: str, matrices: Matrices) -> None:
        self._held[key] = {
            path: change
            for path, layer in self._layers.items()
            if (change := change_of(layer.places, matrices, self._dtype, self._device)) is not None
        }

    def release(self, key: str) -> None:
        self._held.pop(key, None)

    def clear(self) -> None:
        self._key_of_slot.clear()

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._key_of_slot.pop(admission.slot, None)
            if admission.adapter:
                self._key_of_slot[admission.slot] = admission.adapter

    def are_in(self, section: PlanSection) -> bool:
        slots = self._key_of_slot
        if not slots:
            return False
        return any(slot in slots for rows in (section.extend_slots, section.decode_slots) for slot in rows.tolist())

    @contextmanager
    def applied(self, rows: HostRows, output_tokens: Tensor | None) -> Iterator[None]:
        keys = [self._key_of_slot.get(slot, "") for slot in rows.slots.tolist()]
        distinct = [key for key in dict.fromkeys(keys) if key]
        if not distinct:
            yield
            return
        counts = np.ones(len(keys), np.int64)
        counts[: len(rows.extend_lens)] = rows.extend_lens
        numbers = {key: number for number, key in enumerate(distinct)}
        of_token = np.repeat([numbers.get(key, -1) for key in keys], counts)
        self._shares = self._shares_of(distinct, of_token)
        of_output = of_token if output_tokens is None else of_token[output_tokens.numpy()]
        self._last_shares = self._shares_of(distinct, of_output)
        try:
            yield
        finally:
            self._shares, self._last_shares = [], []

    def multiply(self, layer: AdaptedLayer, x: Tensor, affine: Affine, ops: LayerOps) -> Tensor:
        y = ops.linear(x, affine)
        for share in self._last_shares if layer.is_last else self._shares:
            change = share.changes.get(layer.path)
            if change is not None:
                change.add_to(y, x, share.tokens)
        return y

    def _shares_of(self, keys: list[str], of_token: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[_Share]:
        shares = []
        for number, key in enumerate(keys):
            tokens = np.flatnonzero(of_token == number)
            if len(tokens):
                whole = len(tokens) == len(of_token)
                shares.append(_Share(self._held[key], None if whole else torch.from_numpy(tokens)))
        return shares


def change_of(
    places: Sequence[Place],
    matrices: Matrices,
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
