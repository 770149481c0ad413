"""The matrices of quantised experts: each is the weight of a linear layer, and a GPU has them all in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from srt.layers.moe.expert_ops import StackedMatrices
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.weight import LinearWeight, Place
from srt.layers.weights import WeightPiece
from srt.utils.model_error import ModelError


class PackedExperts(nn.Module):
    """One matrix of each expert, as the scheme of its checkpoint stores it."""

    def __init__(
        self, places: Sequence[Sequence[Place]], new_weight: Callable[[Sequence[Place]], LinearWeight]
    ) -> None:
        """`places` are the checkpoint's layers that make up the matrix of each expert."""
        super().__init__()
        self._places = places
        self.weights = nn.ModuleList([new_weight(of_expert) for of_expert in places])
        self.shape = (len(places), *self._weight(0).shape)
        self._stacked: StackedMatrices | None = None

    @property
    def stacked(self) -> StackedMatrices:
        assert self._stacked is not None, "experts are stacked on a GPU only, once they are loaded"
        return self._stacked

    def pieces(self) -> Iterator[WeightPiece]:
        """Yield the parts of the checkpoint that fill the matrices."""
        for index, places in enumerate(self._places):
            yield from self._weight(index).pieces(places)

    def finish(self) -> None:
        """Make the matrices ready to multiply: on a CPU each by itself, on a GPU together. Called once, after loading."""
        weights = [self._weight(index) for index in range(self.shape[0])]
        if not next(self.parameters()).is_cuda:
            for weight in weights:
                weight.finish()
            return
        for weight in weights:
            weight.arrange()
        self.stack()

    def restore(self) -> None:
        """Make the matrices ready when their tensors were set to those of matrices that were ready already, on a CPU."""
        for index in range(self.shape[0]):
            self._weight(index).restore()

    def stack(self) -> None:
        """Bring the numbers and the scales of all experts into one tensor each, of which each expert keeps a view."""
        weights = [self._weight(index) for index in range(self.shape[0])]
        forms = [weight.number_form for weight in weights]
        first = forms[0]
        if first is None or None in forms:
            raise ModelError(
                f"{self._places[0][0].path} and the other experts order their inputs by group (act-order), which is not"
                " supported on a GPU: choose a checkpoint without desc_act."
            )
        zeros = None
        if any(form is not None and form.zeros is not None for form in forms):
            zeros = torch.stack([_zeros_of(weight) for weight in weights])
        numbers, scales = _stack(weights, first.numbers), _stack(weights, first.scales)
        form = first.kind, numbers, scales, zeros, first.group_size, first.rounds_inputs
        self._stacked = StackedMatrices(*form)

    def multiply(self, expert: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b for one expert."""
        return self._weight(expert).multiply(x, bias)

    def _weight(self, index: int) -> LinearWeight:
        weight = self.weights[index]
        assert isinstance(weight, LinearWeight)
        return weight


def _zeros_of(weight: LinearWeight) -> Tensor:
    assert isinstance(weight, IntWeight)
    if weight.zeros is not None:
        return weight.zeros.detach()
    return torch.full(weight.scales.shape, weight.middle, dtype=torch.int16, device=weight.scales.device)


def _stack(weights: Sequence[LinearWeight], name: str) -> Tensor:
    stacked = torch.stack([getattr(weight, name).detach() for weight in weights])
    for weight, part in zip(weights, stacked, strict=True):
        setattr(weight, name, nn.Parameter(part, requires_grad=False))
    return stacked
