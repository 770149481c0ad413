"""The groups over which trainers send weights to this rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from srt.distributed.update_group import Backend, UpdateGroup, UpdateGroupError
from srt.model_executor.loaded_model import LoadedModel
from srt.model_loader.weight_copy import DTYPES
from srt.protocol.engine_work import JoinUpdateGroup, ReceiveWeights
from srt.utils.errors import UpdateError

END_MARK = bytes.fromhex("a5ff" * 4)
"""What the ends of tensors hold before they are received: as floats of 16 and 32 bits, NaNs that no computation makes."""
NO_STAGES = "Weights cannot be updated with --pp-size: restart the server with the new checkpoint."
SMALL_END_BYTES = 4  # compared where an element has one byte, because any byte may be one that was sent


class UpdateGroups:
    """Owner of this rank's groups, by name. All ranks of a replica have the same ones."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tp = loaded.tp
        self._device = loaded.device
        self._num_stages = loaded.pipeline.num_stages
        self._groups: dict[str, UpdateGroup] = {}

    def join(self, work: JoinUpdateGroup, report: Callable[[], None]) -> None:
        """Meet the trainer; UpdateError on all ranks if one of them cannot. `report` is called while others are awaited."""
        error, group = "", None
        try:
            if self._num_stages > 1:
                raise UpdateError(NO_STAGES)
            if work.name in self._groups:
                raise UpdateError(f"There is a group {work.name} already: destroy it first.")
            group = UpdateGroup(
                work.address,
                work.port,
                work.rank_offset + self._tp.rank,
                work.world_size,
                work.name,
                self._backend(work.backend),
                report=report,
            )
        except (UpdateGroupError, UpdateError) as reason:
            error = str(reason)
        if not self._tp.min_int(int(not error)):
            if group is not None:
                group.close()
            raise UpdateError(error or "Another rank could not join the group.")
        assert group is not None
        self._groups[work.name] = group

    def leave(self, name: str) -> None:
        """Close a group; UpdateError if there is none of this name."""
        if name not in self._groups:
            raise UpdateError(f"There is no group {name[:200]!r}.")
        self._groups.pop(name).close()

    def receive(self, work: ReceiveWeights, report: Callable[[], None]) -> dict[str, Tensor]:
        """Return the tensors that the trainer sends, by name. UpdateError on all ranks, which close the group, if one has not got them."""
        if work.group not in self._groups:
            raise UpdateError(f"There is no group {work.group[:200]!r}: call /init_weights_update_group first.")
        error, tensors = "", {}
        try:
            tensors = _received(self._groups[work.group], work, report)
        # RuntimeError is PyTorch's for too little memory.
        except (UpdateGroupError, UpdateError, MemoryError, RuntimeError) as reason:
            error = str(reason)
        if not self._tp.min_int(int(not error)):
            self.leave(work.group)
            error = error or "Another rank did not get the tensors."
            raise UpdateError(f"{error} The group is closed, and the weights are the old ones.")
        return tensors

    def _backend(self, asked: str) -> Backend:
        if asked == "nccl" and self._device.type == "cpu":
            raise UpdateError("The backend nccl needs GPUs: this server runs on a CPU, so use gloo.")
        return "nccl" if asked == "nccl" or (not asked and self._device.type == "cuda") else "gloo"


def _received(group: UpdateGroup, work: ReceiveWeights, report: Callable[[], None]) -> dict[str, Tensor]:
    kinds = [DTYPES[one] for one in work.dtypes]
    if not work.are_joined:
        tensors = [
            torch.empty(shape, dtype=kind, device=group.device_type)
            for shape, kind in zip(work.shapes, kinds, strict=True)
        ]
        _fill(group, tensors, kinds, report)
        return dict(zip(work.names, tensors, strict=True))
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(work.shapes, kinds, strict=True)]
    joined = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device_type)
    _fill(group, [joined], kinds[-1:], report)
    # A view of another type must begin at a multiple of its size, as all do if the types are the same.
    parts = [
        (part.clone() if part.storage_offset() % kind.itemsize else part).view(kind)
        for part, kind in zip(joined.split(sizes), kinds, strict=True)
    ]
    return {name: part.view(shape) for name, part, shape in zip(work.names, parts, work.shapes, strict=True)}


def _fill(group: UpdateGroup, tensors: list[Tensor], kinds: list[torch.dtype], report: Callable[[], None]) -> None:
    """Receive these tensors, which end with an element of these `kinds`. UpdateError if one was not filled to its end."""
    mark = torch.frombuffer(bytearray(END_MARK), dtype=torch.uint8).to(group.device_type)
    ends = [end for tensor, kind in zip(tensors, kinds, strict=True) if len(end := _end_of(tensor, kind))]
    for end in ends:
        end.copy_(mark[-len(end) :])
    group.broadcast(tensors, report)
    if any(torch.equal(end, mark[-len(end) :]) for end in ends):
        raise UpdateError("The trainer sent fewer numbers than it announced.")


def _end_of(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Return the bytes of the last element, or of several if they are small; none if the tensor has fewer."""
    data = tensor.view(-1).view(torch.uint8)
    size = kind.itemsize if kind.itemsize > 1 else SMALL_END_BYTES
    return data[-size:] if len(data) >= size else data[:0]
