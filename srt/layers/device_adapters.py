"""LoRA adapters of a step on a GPU: kernels multiply each token with its own adapter's matrices. Importing this module imports Triton.

The matrices of all adapters are in memory that is allocated once, so that graphs may hold its address. An adapter's number is its place
there. Smaller ranks are padded with zeros. Adapters that were loaded once are kept in the host's memory as the
device has them, so that they are loaded again by a copy alone.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srt.kernels.build.cuda_source import checked, cuda
from srt.kernels.build.hopper import runs_on
from srt.kernels.build.pdl import has_pdl, pdl_for
from srt.kernels.gemm.stream_arguments import Added
from srt.kernels.lora.products import AdapterTokens, StackedAdapters, adapted_gemv, expand, expand_gated, shrink
from srt.kernels.lora.shared_shrink import SMALLEST
from srt.layers.adapters import AdaptedLayer, DecodeAdapters, Matrices, PromptAdapters, StepAdapters
from srt.layers.ops import Affine, LayerOps
from srt.layers.quantization.weight import ChangedMatrix
from srt.utils.model_error import ModelError

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import HostRows
    from srt.protocol.messages import Admission, PlanSection

LEAST_RANK: Final = 16
"""Ranks are padded to this, the least that a matrix product takes, or to the next power of two."""
_PLACEHOLDER: Final = "none"


class _Part(NamedTuple):
    """One layer of the checkpoint within a merged layer."""

    path: str
    inputs: slice
    outputs: slice
    """Of the layer in the checkpoint."""
    target: slice
    """Outputs in the merged layer."""


class DeviceAdapters(StepAdapters, DecodeAdapters, PromptAdapters):
    """Keeps `num_adapters` adapters of up to `rank` in the device's memory."""

    def __init__(
        self,
        layers: Mapping[str, AdaptedLayer],
        num_adapters: int,
        rank: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        copy_bytes: int = 0,
    ) -> None:
        """`copy_bytes` of the host's memory may be taken for copies of adapters."""
        self._num_adapters = num_adapters
        self._device = device
        self._parts = {path: _parts_of(layer) for path, layer in layers.items()}
        padded = max(LEAST_RANK, 1 << (rank - 1).bit_length())
        sizes = {path: _sizes_of(parts, padded) for path, parts in self._parts.items()}
        # All matrices of an adapter, one after the other, so that one copy brings them.
        self._matrices = torch.zeros(
            (num_adapters, sum(down + up for down, up in sizes.values())), dtype=dtype, device=device
        )
        self._stacked, place = dict[str, StackedAdapters](), 0
        for path, (down, up) in sizes.items():
            matrices = self._matrices[:, place : place + down], self._matrices[:, place + down : place + down + up]
            self._stacked[path] = _stack(self._parts[path], padded, *matrices)
            place += down + up
        self._copies = HostCopies(self._matrices[0].nbytes, copy_bytes, device)
        self._numbers = {_PLACEHOLDER: 0}  # by key, of adapters that are loaded
        self._free: deque[tuple[int, torch.cuda.Event | None]] = deque((n, None) for n in range(num_adapters))
        self._lock = threading.Lock()  # other threads load
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Of each slot, and of the slot for padding, the number of its adapter; the number of adapters stands for none.
        self._number_of_slot = np.full(num_slots + 1, num_adapters, np.int32)
        self._slots = torch.full((num_slots + 1,), num_adapters, dtype=torch.int32, device=device)
        self._tokens: AdapterTokens | None = None
        self._last_tokens: AdapterTokens | None = None
        self._has_pdl = has_pdl(device)
        self._has_shared_shrink = dtype is torch.bfloat16 and runs_on(device, SMALLEST)

    @property
    def placeholder(self) -> str:
        return _PLACEHOLDER

    @property
    def of_decodes(self) -> DecodeAdapters:
        return self

    @property
    def of_prompts(self) -> PromptAdapters:
        return self

    @property
    def is_applied(self) -> bool:
        return self._tokens is not None

    @property
    def none(self) -> int:
        return self._num_adapters

    @property
    def numbers(self) -> Tensor:
        assert self._tokens is not None, "no step with adapters runs"
        return self._tokens.numbers

    def hold(self, key: str, matrices: Matrices) -> None:
        """Copy an adapter to the device beside the steps that run, and wait until it is there. ModelError if there is no place."""
        copy = self._copies.new()
        try:
            with torch.inference_mode():
                for path, (down, up) in self._views(copy).items():
                    _write(down, up, self._parts[path], self._stacked[path].rank, matrices)
            self._send(key, copy)
        except BaseException:
            self._copies.give_back(copy)
            raise
        self._copies.keep(key, copy)

    def recall(self, key: str) -> bool:
        copy = self._copies.pop(key)
        if copy is None:
            return False
        try:
            self._send(key, copy)
        finally:
            self._copies.keep(key, copy)
        return True

    def _send(self, key: str, copy: Tensor) -> None:
        with self._lock:
            if not self._free:  # adapters that took too long to load do not count any more, and are still here
                raise ModelError("The memory for adapters is taken by others that take long to load. Try again later.")
            number, released = self._free.popleft()
        try:
            with nullcontext() if self._side is None else torch.cuda.stream(self._side), torch.inference_mode():
                if self._side is not None and released is not None:
                    self._side.wait_event(released)  # steps that were launched before may still read what was there
                self._matrices[number].copy_(copy.view(self._matrices.dtype), non_blocking=True)
                if self._side is not None:
                    self._side.synchronize()
        except BaseException:
            with self._lock:
                self._free.append((number, released))
            raise
        self._numbers[key] = number

    def _views(self, copy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the matrices of each layer in a copy of an adapter."""
        views, place = dict[str, tuple[Tensor, Tensor]](), 0
        for path, stacked in self._stacked.items():
            found = []
            for whole in (stacked.down[0], stacked.up[0]):
                found.append(copy[place : place + whole.nbytes].view(whole.dtype).view(whole.shape))
                place += whole.nbytes
            views[path] = found[0], found[1]
        return views

    def release(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is None:
            return
        event = None
        if self._side is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._free.append((number, event))

    def clear(self) -> None:
        if (self._number_of_slot != self._num_adapters).any():
            self._number_of_slot[:] = self._num_adapters
            self._send_slots()

    def admit(self, admissions: Sequence[Admission]) -> None:
        is_changed = False
        for admission in admissions:
            number = self._numbers[admission.adapter] if admission.adapter else self._num_adapters
            if self._number_of_slot[admission.slot] != number:
                self._number_of_slot[admission.slot] = number
                is_changed = True
        if is_changed:
            self._send_slots()

    def are_in(self, section: PlanSection) -> bool:
        numbers, none = self._number_of_slot, self._num_adapters
        return any(len(rows) and numbers[rows].min() < none for rows in (section.extend_slots, section.decode_slots))

    @contextmanager
    def applied(self, rows: HostRows, output_tokens: Tensor | None) -> Iterator[None]:
        counts = np.ones(len(rows.slots), np.int64)
        counts[: len(rows.extend_lens)] = rows.extend_lens
        of_row = self._number_of_slot[rows.slots]
        if (of_row == self._num_adapters).all():
            yield
            return
        numbers = self._pinned(np.repeat(of_row, counts)).to(self._device, non_blocking=True)
        with self.applied_to_tokens(numbers, output_tokens):
            yield

    def stacked(self, path: str) -> StackedAdapters:
        """Return the matrices of all adapters for a layer, by its path in the model."""
        return self._stacked[path]

    def numbers_of(self, row_slots: Tensor) -> Tensor:
        """Return the numbers of the slots' adapters; the number of adapters stands for none."""
        return self._slots[row_slots]

    @contextmanager
    def applied_to_slots(self, row_slots: Tensor) -> Iterator[None]:
        numbers = self.numbers_of(row_slots)
        with self._applied_to(numbers, numbers):
            yield

    def applied_to_tokens(self, numbers: Tensor, output_tokens: Tensor | None) -> AbstractContextManager[None]:
        return self._applied_to(numbers, numbers if output_tokens is None else numbers[output_tokens])

    def multiply(self, layer: AdaptedLayer, x: Tensor, affine: Affine, ops: LayerOps) -> Tensor:
        if not len(x):
            return ops.linear(x, affine)
        tokens, stacked = self._tokens_of(layer, x), self._stacked[layer.path]
        if len(x) == 1 and affine.matrix is not None:
            y = adapted_gemv(x, affine.matrix, affine.bias, stacked, tokens)
            if y is not None:
                return y
        low = shrink(x, stacked, tokens)
        y = ops.linear(x, affine)
        expand(low, stacked, tokens, y)
        return y

    def multiply_gated(self, layer: AdaptedLayer, x: Tensor, affine: Affine, ops: LayerOps) -> Tensor | None:
        tokens, stacked = self._tokens_of(layer, x), self._stacked[layer.path]
        if tokens.tiles is None:
            return None
        low = shrink(x, stacked, tokens)
        return expand_gated(low, stacked, tokens, ops.linear(x, affine))

    def changed(self, layer: AdaptedLayer, matrix: Tensor) -> ChangedMatrix | None:
        stacked = self._stacked[layer.path]
        first, *rest = stacked.part_sizes
        firsts = first, first + sum(rest[:1])
        if any(place % 4 for place in firsts):
            return None

        def added(x: Tensor) -> Added:
            tokens = self._tokens_of(layer, x)
            return Added(shrink(x, stacked, tokens), stacked.up, tokens.numbers, firsts)

        return ChangedMatrix(matrix, stacked.rank, stacked.down.shape[1], added)

    def _tokens_of(self, layer: AdaptedLayer, x: Tensor) -> AdapterTokens:
        """Return the adapters of the rows x: of all tokens, or behind the last attention of those whose output is needed.

        Kernels are compiled ahead by models that end with an earlier layer than the last.
        """
        tokens, last = self._tokens, self._last_tokens
        assert tokens is not None and last is not None, "no step with adapters runs"
        found = last if layer.is_last or len(x) != len(tokens.numbers) else tokens
        rows = len(x), len(tokens.numbers), len(last.numbers)
        assert len(x) == len(found.numbers), (
            f"{layer.path} got {rows[0]} rows in a step of {rows[1]}, the last {rows[2]}"
        )
        return found

    @contextmanager
    def _applied_to(self, numbers: Tensor, last_numbers: Tensor) -> Iterator[None]:
        self._tokens = self._sort(numbers)
        self._last_tokens = self._tokens if last_numbers is numbers else self._sort(last_numbers)
        try:
            yield
        finally:
            self._tokens = self._last_tokens = None

    def _sort(self, numbers: Tensor) -> AdapterTokens:
        pdl = pdl_for(len(numbers)) if self._has_pdl else 0
        return AdapterTokens.sort(numbers, self._num_adapters, pdl, self._has_shared_shrink)

    def _send_slots(self) -> None:
        self._slots.copy_(self._pinned(self._number_of_slot), non_blocking=True)

    def _pinned(self, values: NDArray[np.int32]) -> Tensor:
        """Return a copy in pinned memory: sending an unpinned one might wait for the device."""
        copy = torch.from_numpy(values.copy())
        return copy.pin_memory() if self._device.type == "cuda" else copy


def _parts_of(layer: AdaptedLayer) -> list[_Part]:
    """Return the parts of a merged layer, each with matrices of its own."""
    if layer.places[0].dim == 1:
        (at,) = layer.places
        outputs = slice(0, at.num_outputs)
        return [_Part(at.path, slice(at.start, at.start + at.size), outputs, outputs)]
    parts: list[_Part] = []
    for at in layer.places:
        outputs, target = slice(at.start, at.start + at.size), slice(at.target_start, at.target_start + at.size)
        parts.append(_Part(at.path, slice(0, at.num_inputs), outputs, target))
    return parts


def _sizes_of(parts: Sequence[_Part], rank: int) -> tuple[int, int]:
    """Return how many numbers the two matrices of an adapter for a merged layer have."""
    inputs = parts[0].inputs
    return rank * len(parts) * (inputs.stop - inputs.start), rank * sum(_num_outputs(part) for part in parts)


def _num_outputs(part: _Part) -> int:
    return int(part.target.stop - part.target.start)


def _stack(parts: Sequence[_Part], rank: int, down: Tensor, up: Tensor) -> StackedAdapters:
    """Return the matrices of all adapters for a merged layer, given as their numbers [adapters, numbers]."""
    sizes = tuple(_num_outputs(part) for part in parts)
    return StackedAdapters(down.unflatten(1, (rank * len(parts), -1)), up.unflatten(1, (sum(sizes), rank)), sizes)


def _write(down: Tensor, up: Tensor, parts: Sequence[_Part], rank: int, matrices: Matrices) -> None:
    """Write this rank's part of an adapter: rows of B if outputs are split over ranks, columns of A if inputs are."""
    down.zero_()
    up.zero_()
    for place, part in enumerate(parts):
        if part.path in matrices:
            a, b = matrices[part.path]
            first = place * rank
            down[first : first + len(a)] = a[:, part.inputs]
            up[part.target, : b.shape[1]] = b[part.outputs]


class HostCopies:
    """Copies of adapters in the host's memory, pinned if there is a GPU. Those used longest ago make room. Any thread may call."""

    def __init__(self, num_bytes: int, most_bytes: int, device: torch.device) -> None:
        """A copy has `num_bytes`, and all together, but for those that are being made, `most_bytes`."""
        self._num_bytes = num_bytes
        self._most = most_bytes // max(1, num_bytes)
        self._device = device
        self._copies: OrderedDict[str, Tensor] = OrderedDict()
        self._unused: list[Tensor] = []
        self._lock = threading.Lock()
        self._pinned: list[Tensor] = []
        # Before the memory is freed: CUDA would take what is allocated there next for pinned.
        weakref.finalize(self, _unpin, self._pinned, device).atexit = False

    def new(self) -> Tensor:
        """Return memory for a copy: that of another one if there are as many as there may be."""
        with self._lock:
            if self._unused:
                return self._unused.pop()
            if self._copies and len(self._copies) >= self._most:
                return self._copies.popitem(last=False)[1]
        # In pages of its own, because pages are what is pinned; not by PyTorch, which would round the size up to a power of two.
        pages = mmap.mmap(-1, max(1, self._num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copy = torch.frombuffer(pages, dtype=torch.uint8)
        if self._device.type == "cuda":
            # Where no more memory can be pinned, unpinned memory is copied too, only slower.
            with torch.cuda.device(self._device), suppress(RuntimeError):
                checked(cuda()[0].cuMemHostRegister(copy.data_ptr(), copy.nbytes, 0))
                self._pinned.append(copy)
        return copy

    def pop(self, key: str) -> Tensor | None:
        """Take out the copy of this adapter, so that no other thread gets it before `keep`; None if there is none."""
        with self._lock:
            return self._copies.pop(key, None)

    def keep(self, key: str, copy: Tensor) -> None:
        """Keep a copy, as the one used last, or its memory if there are as many as there may be."""
        with self._lock:
            if len(self._copies) < self._most:
                self._copies[key] = copy
            else:
                self._unused.append(copy)

    def give_back(self, copy: Tensor) -> None:
        """Take the memory of a copy that was not made."""
        with self._lock:
            self._unused.append(copy)


def _unpin(copies: list[Tensor], device: torch.device) -> None:
    for copy in copies:
        with torch.cuda.device(device), suppress(RuntimeError):
            checked(cuda()[0].cuMemHostUnregister(copy.data_ptr()))
    copies.clear()
