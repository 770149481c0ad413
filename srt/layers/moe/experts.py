"""The weights of a mixture of experts: which tensors of a checkpoint fill them, and their products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.moe.expert_ops import Choice, ExpertOps, ExpertWeights
from srt.layers.weights import WeightedModule, WeightPiece
from srt.utils.layer_spec import Experts, Routing

_MATRICES = {"gate_up_down": ("gate_proj", "up_proj", "down_proj"), "w1_w3_w2": ("w1", "w3", "w2")}
"""The names of gate, up and down, if the checkpoint has a tensor for each matrix of each expert."""


class RouterWeight(WeightedModule):
    """The router's matrix, the same on every rank, which therefore all choose the same experts."""

    def __init__(self, hidden_size: int, routing: Routing, name: str, ops: ExpertOps) -> None:
        """`name` is the router's name in the checkpoint, beside the experts."""
        super().__init__()
        self._name = name
        self._routing = routing
        self._ops = ops
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> Choice:
        return self._ops.route(x, self.weight, self._routing)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        shape = (self.weight.shape[0], self.weight.shape[1])
        name = f"{path.rpartition('.')[0]}.{self._name}.weight"
        yield WeightPiece(name, shape, self, "weight", 0, 0, shape[0], 0)


class ExpertLayers(WeightedModule):
    """The matrices of all experts. Each rank has a part of every expert's gates and ups, and the columns of `down` that read it."""

    def __init__(self, hidden_size: int, spec: Experts, tp: TensorParallel, ops: ExpertOps) -> None:
        super().__init__()
        # The configuration was checked (ModelConfig.check_tp) before any layer was built.
        assert spec.size % tp.size == 0, f"{spec.size} features of experts over {tp.size} ranks"
        self._spec = spec
        self._ops = ops
        self._size = spec.size // tp.size
        self._start = tp.rank * self._size
        num_experts = spec.routing.num_experts
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * self._size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, self._size), requires_grad=False)

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Return what this rank adds to the weighted sum of the chosen experts' results."""
        return self._ops.multiply(x, choice, ExpertWeights(self.gate_up, self.down))

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        if self._spec.layout == "input_output":
            return self._stacked_pieces(path.rpartition(".")[0])
        return self._single_pieces(path, *_MATRICES[self._spec.layout])

    def _single_pieces(self, path: str, gate: str, up: str, down: str) -> Iterator[WeightPiece]:
        """Yield the pieces of a checkpoint with a tensor for each matrix of each expert."""
        hidden_size, whole, start, size = self.down.shape[1], self._spec.size, self._start, self._size
        for index in range(self._spec.routing.num_experts):
            for name, target_start in ((gate, 0), (up, size)):
                tensor = f"{path}.{index}.{name}.weight"
                yield WeightPiece(tensor, (whole, hidden_size), self, "gate_up", 0, start, size, target_start, index)
            tensor = f"{path}.{index}.{down}.weight"
            yield WeightPiece(tensor, (hidden_size, whole), self, "down", 1, start, size, 0, index)

    def _stacked_pieces(self, path: str) -> Iterator[WeightPiece]:
        """Yield the pieces of a checkpoint with a tensor for all gates and ups, and one for all downs."""
        hidden_size, whole, start, size = self.down.shape[1], self._spec.size, self._start, self._size
        num_experts = self._spec.routing.num_experts
        gate_up, down = (num_experts, 2 * whole, hidden_size), (num_experts, hidden_size, whole)
        for index in range(num_experts):
            for first, target_start in ((start, 0), (whole + start, size)):
                tensor = f"{path}.input_linear.weight"
                yield WeightPiece(tensor, gate_up, self, "gate_up", 0, first, size, target_start, index, index)
            tensor = f"{path}.output_linear.weight"
            yield WeightPiece(tensor, down, self, "down", 1, start, size, 0, index, index)
