"""The weights of a mixture of experts: which tensors of a checkpoint fill them, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.moe.expert_ops import Choice, ExpertOps, ExpertWeights, Router
from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.ops import LayerOps, Norm, Routed, Stream
from srt.layers.quantization.weight import Place
from srt.layers.weights import WeightedModule, WeightPiece
from srt.utils.layer_spec import Experts, Routing
from srt.utils.model_error import ModelError

_MATRICES = {"gate_up_down": ("gate_proj", "up_proj", "down_proj"), "w1_w3_w2": ("w1", "w3", "w2")}
"""The names of gate, up and down, if the checkpoint has a tensor for each matrix of each expert."""


class RouterWeight(WeightedModule):
    """The router's parameters, the same on every rank, so that all ranks choose the same experts."""

    own_dtypes: Final = {"correction": torch.float32}
    """Types of parameters that are not of the model's type."""

    def __init__(self, hidden_size: int, routing: Routing, name: str, ops: LayerOps) -> None:
        """`name` is the router's name in the checkpoint, beside the experts."""
        super().__init__()
        self._name = name
        self.mixture_path: str | None = None
        """Path of the mixture in the checkpoint, if it differs from that in the model."""
        self._routing = routing
        self._ops = ops
        self.weight = _empty(routing.num_experts, hidden_size)
        self.bias = _empty(routing.num_experts) if routing.has_bias else None
        self.correction = _empty(routing.num_experts) if routing.has_correction else None

    def forward(self, stream: Stream, norm: Norm | None = None) -> Routed:
        """Choose the experts of the normed stream's tokens, or of the stream's."""
        return self._ops.route(stream, norm, Router(self._routing, self.weight, self.bias, self.correction))

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        num_experts, hidden_size = self.weight.shape
        name = f"{self.mixture_path or path.rpartition('.')[0]}.{self._name}"
        yield WeightPiece(f"{name}.weight", (num_experts, hidden_size), self, "weight", 0, 0, num_experts, 0)
        if self.bias is not None:
            yield WeightPiece(f"{name}.bias", (num_experts,), self, "bias", 0, 0, num_experts, 0)
        if self.correction is not None:
            tensor = f"{name}.e_score_correction_bias"
            yield WeightPiece(tensor, (num_experts,), self, "correction", 0, 0, num_experts, 0)


class ExpertLayers(WeightedModule):
    """The matrices of a rank's experts: of all, or of those of its group of ranks (--ep-size).

    Each rank of a group has a part of every expert's gates and ups, and the columns of `down` that read it.
    """

    def __init__(self, hidden_size: int, spec: Experts, tp: TensorParallel, ops: ExpertOps) -> None:
        super().__init__()
        # The configuration was checked (ModelConfig.check_tp) before any layer was built.
        group, place = divmod(tp.rank, tp.size // tp.expert_groups)
        num_sharing, num_all = tp.size // tp.expert_groups, spec.routing.num_experts
        assert spec.size % num_sharing == 0, f"{spec.size} features of experts over {num_sharing} ranks"
        assert num_all % tp.expert_groups == 0, f"{num_all} experts over {tp.expert_groups} groups"
        self._spec = spec
        num_experts = num_all // tp.expert_groups
        self._experts = range(group * num_experts, (group + 1) * num_experts)
        self.stacked_path: str | None = None
        """Path of the experts in the checkpoint, if it stacks all gates and ups, and all downs, whatever the family's layout says."""
        self._ops = ops
        self._size = spec.size // num_sharing
        self._start = place * self._size
        self._hidden_size = hidden_size
        self.gate_up: nn.Parameter | PackedExperts = _empty(num_experts, 2 * self._size, hidden_size)
        self.down: nn.Parameter | PackedExperts = _empty(num_experts, hidden_size, self._size)
        self.gate_up_bias = _empty(num_experts, 2 * self._size) if spec.bias else None
        self.down_bias = _empty(num_experts, hidden_size) if spec.bias else None
        self._adds_bias = place == 0  # the ranks' results are added, so one of a group adds it
        self.load: Tensor
        # On the CPU even while the model is built on the meta device, because it is not read from a checkpoint.
        self.register_buffer("load", torch.zeros(num_all + 2, dtype=torch.int64, device="cpu"), persistent=False)

    def forward(self, x: Tensor, choice: Choice, weights: ExpertWeights | None = None) -> Tensor:
        """Return what this rank adds to the weighted sum of the chosen experts' results. `weights`: its own, with a shared expert."""
        return self._ops.multiply(x, choice, self.matrices if weights is None else weights)

    @property
    def matrices(self) -> ExpertWeights:
        """What the operations read."""
        biases = self.gate_up_bias, self.down_bias if self._adds_bias else None
        numbers = self._experts.start, self._spec.routing.num_experts
        return ExpertWeights(self.gate_up, self.down, *biases, self._spec.limit, self.load, *numbers)

    def places(self, path: str) -> tuple[list[list[Place]], list[list[Place]]]:
        """Return the checkpoint's layers that make up each expert's gates and ups, and its downs, if these are not plain matrices."""
        count, whole, hidden_size = self._spec.routing.num_experts, self._spec.size, self._hidden_size
        start, size, experts = self._start, self._size, self._experts
        match self._spec.layout:
            case "input_output":
                parent = path.rpartition(".")[0]
                return [
                    [
                        Place(f"{parent}.input_linear", 2 * whole, hidden_size, 0, first, size, at, (index, count))
                        for first, at in ((start, 0), (whole + start, size))
                    ]
                    for index in experts
                ], [
                    [Place(f"{parent}.output_linear", hidden_size, whole, 1, start, size, 0, (index, count))]
                    for index in experts
                ]
            case "transposed":
                both = (2 * whole, hidden_size, 0, 2 * start, 2 * size, 0)
                down = (hidden_size, whole, 1, start, size, 0)
                return [
                    [Place(f"{path}.gate_up_proj", *both, (index, count), takes_turns=True)] for index in experts
                ], [[Place(f"{path}.down_proj", *down, (index, count))] for index in experts]
            case named:
                gate, up, down_name = _MATRICES[named]
                return [
                    [
                        Place(f"{path}.{index}.{name}", whole, hidden_size, 0, start, size, at)
                        for name, at in ((gate, 0), (up, size))
                    ]
                    for index in experts
                ], [[Place(f"{path}.{index}.{down_name}", hidden_size, whole, 1, start, size)] for index in experts]

    def pack(self, gate_up: PackedExperts, down: PackedExperts) -> None:
        """Store the matrices in the form of a quantised checkpoint. Called before anything is allocated."""
        del self.gate_up, self.down
        self.gate_up, self.down = gate_up, down

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        if isinstance(self.gate_up, PackedExperts) and isinstance(self.down, PackedExperts):
            if self.stacked_path is not None:
                raise ModelError(
                    f"The checkpoint stacks the experts of {self.stacked_path} in one tensor, which is supported without"
                    " quantisation only: leave --quantization out, or choose a checkpoint with a tensor for each expert."
                )
            yield from self.gate_up.pieces()
            yield from self.down.pieces()
            yield from self._bias_pieces(path)
            return
        yield from self._plain_pieces(path)

    @property
    def can_be_stacked(self) -> bool:
        """Whether the family's checkpoints name each expert's matrices, which transformers 5 can stack when it saves a model."""
        return self._spec.layout in _MATRICES

    def _plain_pieces(self, path: str) -> Iterator[WeightPiece]:
        if self.stacked_path is not None:
            return self._stacked_pieces(f"{self.stacked_path}.gate_up_proj", f"{self.stacked_path}.down_proj")
        match self._spec.layout:
            case "input_output":
                parent = path.rpartition(".")[0]
                return self._stacked_pieces(f"{parent}.input_linear.weight", f"{parent}.output_linear.weight")
            case "transposed":
                return self._transposed_pieces(path)
            case named:
                return self._single_pieces(path, *_MATRICES[named])

    def _single_pieces(self, path: str, gate: str, up: str, down: str) -> Iterator[WeightPiece]:
        """Yield the pieces of a checkpoint with a tensor for each matrix of each expert."""
        hidden_size, whole, start, size = self._hidden_size, self._spec.size, self._start, self._size
        for own, index in enumerate(self._experts):
            for name, target_start in ((gate, 0), (up, size)):
                tensor = f"{path}.{index}.{name}.weight"
                yield WeightPiece(tensor, (whole, hidden_size), self, "gate_up", 0, start, size, target_start, own)
            tensor = f"{path}.{index}.{down}.weight"
            yield WeightPiece(tensor, (hidden_size, whole), self, "down", 1, start, size, 0, own)

    def _stacked_pieces(self, gate_up_name: str, down_name: str) -> Iterator[WeightPiece]:
        """Yield the pieces of a checkpoint with a tensor for all gates and ups, and one for all downs."""
        hidden_size, whole, start, size = self._hidden_size, self._spec.size, self._start, self._size
        num_experts = self._spec.routing.num_experts
        gate_up, down = (num_experts, 2 * whole, hidden_size), (num_experts, hidden_size, whole)
        for at in enumerate(self._experts):
            for first, target_start in ((start, 0), (whole + start, size)):
                yield WeightPiece(gate_up_name, gate_up, self, "gate_up", 0, first, size, target_start, *at)
            yield WeightPiece(down_name, down, self, "down", 1, start, size, 0, *at)

    def _transposed_pieces(self, path: str) -> Iterator[WeightPiece]:
        """Yield the pieces of gpt-oss: both tensors have inputs as rows, and gates and ups take turns among the outputs."""
        hidden_size, whole, start, size = self._hidden_size, self._spec.size, self._start, self._size
        num_experts = self._spec.routing.num_experts
        gate_up, down = (num_experts, hidden_size, 2 * whole), (num_experts, whole, hidden_size)
        for at in enumerate(self._experts):
            for turn in (0, 1):
                place = (0, 2 * start + turn, size, turn * size, *at)
                yield WeightPiece(f"{path}.gate_up_proj", gate_up, self, "gate_up", *place, step=2, is_transposed=True)
            yield WeightPiece(f"{path}.down_proj", down, self, "down", 1, start, size, 0, *at, is_transposed=True)
        yield from self._bias_pieces(path)

    def _bias_pieces(self, path: str) -> Iterator[WeightPiece]:
        """Yield the pieces of gpt-oss' biases, among which those of gates and ups take turns."""
        hidden_size, whole, start, size = self._hidden_size, self._spec.size, self._start, self._size
        num_experts = self._spec.routing.num_experts
        for at in enumerate(self._experts):
            if self.gate_up_bias is not None:
                for turn in (0, 1):
                    place = (0, 2 * start + turn, size, turn * size, *at)
                    shape = (num_experts, 2 * whole)
                    yield WeightPiece(f"{path}.gate_up_proj_bias", shape, self, "gate_up_bias", *place, step=2)
            if self.down_bias is not None:
                shape = (num_experts, hidden_size)
                yield WeightPiece(f"{path}.down_proj_bias", shape, self, "down_bias", 0, 0, hidden_size, 0, *at)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
