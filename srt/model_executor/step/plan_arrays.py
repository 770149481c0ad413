"""Everything of a plan that the device needs, and its staging: all arrays travel in a single copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import LogprobArrays
from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool
from srt.model_executor.forward_batch_info import RowArrays
from srt.sampling.logit_adjustments import AdjustmentArrays
from srt.sampling.sampling_batch_info import DrawArrays, SamplingArrays

A = TypeVar("A")
HostArray = NDArray[Any]
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


@dataclass(frozen=True, slots=True)
class PlanArrays(Generic[A]):
    """A plan's changes to the tables, and its rows, as numpy arrays or as tensors. All int64."""

    admitted_slots: A
    admitted_lens: A  # positions that are cached
    admitted_draws: DrawArrays[A]
    adjustments: AdjustmentArrays[A]  # of the admitted requests that have any, or whose slots had some before
    id_slots: A  # known ids of the admitted, one entry each
    id_positions: A
    ids: A
    page_groups: A  # of new pages, one entry each; empty if there is one group
    page_slots: A
    page_columns: A
    pages: A
    rows: RowArrays[A]
    sample_rows: A  # [R]
    sample_tokens: A  # [R]: index of the row's last token
    sampling: SamplingArrays[A]
    prompt_logprobs: LogprobArrays[A]
    output_logprobs: LogprobArrays[A]


@dataclass(frozen=True, slots=True)
class SamplingStep(Generic[A]):
    """Sampling parameters that are not in the tables, for rows that need more than these."""

    sampling: SamplingArrays[A]
    output_logprobs: LogprobArrays[A]


def write_tables(plan: PlanArrays[torch.Tensor], tables: ReqToTokenPool) -> None:
    """Write a plan's changes to the tables: admitted requests, their sampling parameters, and new pages."""
    if len(plan.admitted_slots):
        tables.write_tokens(plan.id_slots, plan.id_positions, plan.ids)
        draws = plan.admitted_draws
        values = (draws.temperatures, draws.seeds, draws.top_ks, draws.top_ps, draws.min_ps)
        tables.admit(plan.admitted_slots, plan.admitted_lens, DrawTables(*values))
    if len(plan.adjustments.slots):
        tables.adjustments.admit(plan.adjustments)
    if len(plan.pages):
        tables.write_pages(plan.page_slots, plan.page_columns, plan.pages, plan.page_groups)


class Staging:
    """Copies arrays to the device in stream order, without waiting for it.

    Uses a ring of pinned buffers, one for each plan in flight and one more. A buffer is reused when its copy is done. On a CPU nothing is
    copied, because tensors share the arrays' memory.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        self._device = device
        self._buffers: list[_PinnedBuffer] = []
        if device.type != "cpu":
            self._buffers = [_PinnedBuffer() for _ in range(window + 1)]
        self._next = 0

    def copy(self, arrays: PlanArrays[HostArray]) -> PlanArrays[torch.Tensor]:
        staged: PlanArrays[torch.Tensor] = self._copy(arrays)
        return staged

    def copy_sampling(self, arrays: SamplingStep[HostArray]) -> SamplingStep[torch.Tensor]:
        staged: SamplingStep[torch.Tensor] = self._copy(arrays)
        return staged

    def _copy(self, arrays: Any) -> Any:
        leaves = list(_leaves(arrays))
        if self._buffers:
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % len(self._buffers)
            tensors = buffer.copy(leaves, self._device)
        else:
            tensors = [torch.from_numpy(leaf) for leaf in leaves]
        return _rebuild(arrays, iter(tensors))


class _PinnedBuffer:
    """A pinned buffer, and the event recorded after its latest copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
        self._copied = torch.cuda.Event()

    def copy(self, arrays: list[HostArray], device: torch.device) -> list[torch.Tensor]:
        """Copy all arrays at once. Those of one type are stored together, the widest type first, so that all are aligned."""
        self._copied.synchronize()
        order = sorted(range(len(arrays)), key=lambda index: (-arrays[index].itemsize, arrays[index].dtype.char))
        size = sum(array.nbytes for array in arrays)
        if size > len(self._memory):
            self._memory = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        host = self._memory.numpy()
        begin = 0
        for index in order:
            array = arrays[index]
            if array.nbytes:
                host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                begin += array.nbytes
        # New device memory each time: the allocator reuses it in stream order.
        packed = self._memory[:size].to(device, non_blocking=True)
        self._copied.record()
        return _cut(packed, arrays, order)


def _cut(packed: torch.Tensor, arrays: list[HostArray], order: list[int]) -> list[torch.Tensor]:
    """Split `packed`, which holds the arrays in this order, into tensors."""
    tensors: dict[int, torch.Tensor] = {}
    begin = 0
    for dtype, run in itertools.groupby(order, key=lambda index: arrays[index].dtype):
        members = list(run)
        sizes = [arrays[index].size for index in members]
        end = begin + sum(sizes) * dtype.itemsize
        parts = packed[begin:end].view(_DTYPES[dtype]).split_with_sizes(sizes)
        tensors |= zip(members, parts, strict=True)
        begin = end
    return [
        tensors[index] if array.ndim == 1 else tensors[index].view(array.shape) for index, array in enumerate(arrays)
    ]


def _leaves(node: Any) -> Iterator[HostArray]:
    for name in type(node).__match_args__:
        value = getattr(node, name)
        if isinstance(value, np.ndarray):
            yield value
        else:
            yield from _leaves(value)


def _rebuild(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a copy of the tree with tensors in place of arrays."""
    values = (getattr(node, name) for name in type(node).__match_args__)
    return type(node)(*[next(tensors) if isinstance(v, np.ndarray) else _rebuild(v, tensors) for v in values])
