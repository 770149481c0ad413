"""LoRA adapters in linear layers: the rows of a step that have one get scale · B A x added to their product.

The weight of each layer that can be adapted is wrapped in an `AdaptedWeight`. In a step without adapters it is the weight inside, with
all its fast paths. In other steps it hides the matrix, so that no fused kernel reads past it, and multiplies by itself.

`host_adapters.py` does so on a CPU, and `device_adapters.py` on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from srt.layers.linear import LinearLayer
from srt.layers.ops import Affine, LayerOps
from srt.layers.quantization.weight import (
    ChangedMatrix,
    Float8Matrix,
    IntegerMatrix,
    LinearWeight,
    NumberForm,
    Place,
)
from srt.layers.weights import WeightPiece

if TYPE_CHECKING:
    from srt.kernels.gemm.packed_matrix import PackedMatrix
    from srt.model_executor.forward_batch_info import HostRows
    from srt.protocol.messages import Admission, PlanSection

_BEHIND_ATTENTION = (".self_attn.o_proj", ".mlp.gate_up_proj", ".mlp.down_proj")

Matrices = Mapping[str, tuple[Tensor, Tensor]]
"""A and B times its scale, whole and in float32, by the path in the checkpoint."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of this rank's model that adapters can change."""

    path: str
    """In the model."""
    places: tuple[Place, ...]
    is_last: bool
    """Whether it follows the last attention, and so computes only the tokens whose output is needed."""


class StepAdapters(ABC):
    """The adapters that this rank holds, those of the slots, and those of the step that runs."""

    @property
    @abstractmethod
    def is_applied(self) -> bool:
        """Whether a row of the step that runs has an adapter."""

    @abstractmethod
    def hold(self, key: str, matrices: Matrices) -> None:
        """Keep an adapter for rows to come. Called by any thread."""

    def recall(self, key: str) -> bool:
        """Load an adapter from the copy of it in the host's memory; False if there is no copy. Any thread may call."""
        return False

    @abstractmethod
    def release(self, key: str) -> None:
        """Forget an adapter that no row has any more."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the slots."""

    @abstractmethod
    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note the adapters of the slots that begin anew."""

    @abstractmethod
    def are_in(self, section: PlanSection) -> bool:
        """Return whether a row of this step has an adapter."""

    @abstractmethod
    def applied(self, rows: HostRows, output_tokens: Tensor | None) -> AbstractContextManager[None]:
        """Inside, layers add the changes of these rows' adapters. `output_tokens` are those whose output is needed; None: all."""

    @abstractmethod
    def multiply(self, layer: AdaptedLayer, x: Tensor, affine: Affine, ops: LayerOps) -> Tensor:
        """Return the layer's own product of x, by the operations that it runs on, with the changes of its tokens' adapters."""

    def multiply_gated(self, layer: AdaptedLayer, x: Tensor, affine: Affine, ops: LayerOps) -> Tensor | None:
        """Return silu(first half) * second half of what `multiply` returns; None if the caller is to do that."""
        return None

    def changed(self, layer: AdaptedLayer, matrix: Tensor) -> ChangedMatrix | None:
        """Return the layer's matrix with what this step adds to its products, for kernels that do both; None if none can."""
        return None

    @property
    def placeholder(self) -> str | None:
        """Key of an adapter that changes nothing, for steps that compile kernels ahead; None if no kernel needs that."""
        return None

    @property
    def of_decodes(self) -> DecodeAdapters | None:
        """The adapters of decode steps in fixed buffers; None if such steps with adapters run like any other step."""
        return None

    @property
    def of_prompts(self) -> PromptAdapters | None:
        """The adapters of steps with prompts in fixed buffers; None if no graph of such steps can have adapters."""
        return None


class DecodeAdapters(ABC):
    """Applies adapters in decode steps whose slots are known on the device only, so that graphs can be captured of them."""

    @abstractmethod
    def applied_to_slots(self, row_slots: Tensor) -> AbstractContextManager[None]:
        """Inside, layers add the changes of the adapters of these slots, one token each. `row_slots` [rows] int64."""


class PromptAdapters(ABC):
    """Applies adapters in steps whose tokens' adapters are known on the device only, so that graphs can be captured of them."""

    @property
    @abstractmethod
    def none(self) -> int:
        """The number that stands for no adapter."""

    @property
    @abstractmethod
    def numbers(self) -> Tensor:
        """The number of each token's adapter in the step that runs, in the order of its tokens, on the device, int32."""

    @abstractmethod
    def applied_to_tokens(self, numbers: Tensor, output_tokens: Tensor | None) -> AbstractContextManager[None]:
        """Inside, layers add the changes of the adapters with these numbers, one for each token.

        `output_tokens` are those whose output is needed; None: all.
        """


class AdaptedWeight(LinearWeight):
    """A weight, and what the adapters of the step that runs add to its products."""

    def __init__(self, inner: LinearWeight, layer: AdaptedLayer, step: StepAdapters, ops: LayerOps) -> None:
        super().__init__()
        self.inner = inner
        self.shape = inner.shape
        self._layer = layer
        self._step = step
        self._ops = ops

    @property
    def _is_bare(self) -> bool:
        return not self._step.is_applied

    @property
    def matrix(self) -> Tensor | None:
        return self.inner.matrix if self._is_bare else None

    @property
    def changed(self) -> ChangedMatrix | None:
        matrix = self.inner.matrix
        return None if matrix is None or self._is_bare else self._step.changed(self._layer, matrix)

    @property
    def scaled_matrix(self) -> tuple[Tensor, Tensor] | None:
        return self.inner.scaled_matrix if self._is_bare else None

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        return self.inner.packed_matrix if self._is_bare else None

    @property
    def integer_matrix(self) -> IntegerMatrix | None:
        return self.inner.integer_matrix if self._is_bare else None

    @property
    def float8_matrix(self) -> Float8Matrix | None:
        return self.inner.float8_matrix if self._is_bare else None

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
        if self._is_bare:
            return self.inner.multiply(x, bias)
        return self._step.multiply(self._layer, x, Affine(self.inner, bias), self._ops)

    def multiply_gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._is_bare:
            return self.inner.multiply_gated(x, bias)
        return self._step.multiply_gated(self._layer, x, Affine(self.inner, bias), self._ops)


def adapted_layers(model: nn.Module, paths: Collection[str], modules: Collection[str]) -> dict[str, AdaptedLayer]:
    """Return the layers that adapters can change, by their path in the model.

    `paths` are those in the checkpoint. Of these, adapters change layers with one of the names `modules`.
    """
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, LinearLayer)}
    last = max(_layer_number(path) for path in linears)
    found: dict[str, AdaptedLayer] = {}
    seen: set[str] = set()
    for path, layer in linears.items():
        places = layer.places(path)
        if not all(at.path in paths for at in places):
            continue
        seen |= {at.path for at in places}
        if any(at.path.rpartition(".")[2] in modules for at in places):
            is_last = _layer_number(path) == last and path.endswith(_BEHIND_ATTENTION)
            found[path] = AdaptedLayer(path, tuple(places), is_last)
    assert seen >= set(paths), f"no layer of the model is {sorted(set(paths) - seen)[:3]}"
    return found


def adapt_layers(model: nn.Module, layers: Mapping[str, AdaptedLayer], step: StepAdapters) -> None:
    """Wrap the weights of these layers. Called when the model is loaded, before anything looks up addresses."""
    for path, layer in layers.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, LinearLayer)
        linear.weight = AdaptedWeight(linear.weight, layer, step, linear.ops)


def _layer_number(path: str) -> int:
    """Return N of a path such as model.layers.N.mlp.down_proj."""
    return int(path.split(".")[2])
