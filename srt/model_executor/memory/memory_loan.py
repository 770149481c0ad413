"""Memory that a rank lends: while it serves nobody, what it needs only for serving goes back to the host or the device.

Addresses stay as they are, so tables of addresses, compiled steps and graphs remain valid. On a GPU weights and graphs are kept in the
host's memory meanwhile. On a CPU the kernel takes back the pages of the weights and of the KV memory, which are zero when they are used
again; the weights are then read from their folder.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from srt.layers.adapters import AdaptedWeight
from srt.layers.weights import WeightedModule
from srt.model_executor.memory.releasable_memory import ReleasablePart
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.weight_update import check_supported
from srt.model_loader.weight_update import inner_values
from srt.models.causal_lm import CausalLM
from srt.protocol.engine_work import LoadWeights, NewWeights, WeightsSource
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError, UpdateError
from srt.utils.host import available_memory_bytes

MADV_DONTNEED: Final = 4
Report = Callable[[], None]


class MemoryLoan(Protocol):
    """Owner of the decision which memory of a rank is released. All ranks of a replica make the same calls in the same order.

    `report` is called whenever there is progress.
    """

    def release(self, tags: list[str], weights: WeightsSource | None, report: Report) -> int:
        """Give back the memory of these parts, which are not released, and return its bytes. UpdateError, with nothing changed, if not."""

    def resume(self, tags: list[str], weights: WeightsSource | None, report: Report) -> None:
        """Take these parts back, which are released. UpdateError, with all of them released as before, if they cannot come back."""

    def update_weights(self, work: NewWeights, report: Report) -> str:
        """Replace the weights as `ModelRunner.update_weights` does. If they are released, this brings them back, unless it fails."""


def memory_loan(runner: ModelRunner, start: WeightsSource) -> MemoryLoan:
    """Return the loan of a rank. `start` says where the weights of the start are kept. StartError if a part could not be taken back."""
    return HostMemoryLoan(runner, start) if runner.loaded.device.type == "cpu" else DeviceMemoryLoan(runner)


class DeviceMemoryLoan:
    """The loan of a rank on a GPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tp = runner.loaded.tp
        self._memory = runner.loaded.memory

    def release(self, tags: list[str], weights: WeightsSource | None, report: Report) -> int:
        parts, error = [self._memory.parts[tag] for tag in tags], ""
        needed = sum(part.num_kept_bytes for part in parts) * self._tp.size  # all ranks are on this host
        available = self._tp.min_int(available_memory_bytes())  # of all ranks before any of them makes its copy
        try:
            if needed > available:
                raise UpdateError(
                    f"The host has {available / 1e9:.1f} GB of memory left, but a copy of {', '.join(tags)} takes {needed / 1e9:.1f} GB:"
                    " make room there, or release other parts only."
                )
            for part in parts:
                part.save(report)
        except (UpdateError, OSError, RuntimeError) as reason:
            error = str(reason) or type(reason).__name__
        if not self._agree(error):
            for part in parts:
                part.forget_copy()
            raise UpdateError(error or "Another rank could not release its memory.")
        num_bytes = 0
        for part in parts:
            num_bytes += part.unmap()
            report()
        torch.cuda.empty_cache()  # what the last steps needed
        return num_bytes

    def resume(self, tags: list[str], weights: WeightsSource | None, report: Report) -> None:
        parts = [part for tag in tags if (part := self._memory.parts[tag]).is_released]
        mapped, error = list[ReleasablePart](), ""
        try:
            self._check_free(parts)
            for part in parts:
                part.map()
                mapped.append(part)
                report()
        except (UpdateError, RuntimeError) as reason:
            error = str(reason)
        if not self._agree(error):
            for part in mapped:
                part.unmap()
            raise UpdateError(error or "Another rank could not take its memory back.")
        for part in parts:
            part.restore(report)

    def update_weights(self, work: NewWeights, report: Report) -> str:
        if not self._memory.parts["weights"].is_released:
            return self._runner.update_weights(work, report)
        self.resume(["weights"], None, report)
        try:
            return self._runner.update_weights(work, report)
        except UpdateError:
            self.release(["weights"], None, report)
            raise

    def _check_free(self, parts: list[ReleasablePart]) -> None:
        """Raise UpdateError if the device has too little memory for these parts and, if they are the last ones, for the largest step."""
        needed = sum(part.num_bytes for part in parts)
        if not any(part.is_released for part in self._memory.parts.values() if part not in parts):
            needed += self._memory.num_bytes.get("activations", 0)
        free, _ = torch.cuda.mem_get_info(self._runner.loaded.device)
        if free < needed:
            raise UpdateError(
                f"The memory is taken by others: {needed / 1e9:.1f} GB are needed, but {free / 1e9:.1f} GB of the GPU are free. Try"
                " again when they have released it."
            )

    def _agree(self, error: str) -> bool:
        return bool(self._tp.min_int(int(not error)))


class HostMemoryLoan:
    """The loan of a rank on a CPU."""

    def __init__(self, runner: ModelRunner, start: WeightsSource) -> None:
        """`start` says where the weights of the start are kept. StartError if they could not be read again."""
        self._runner = runner
        self._start = start
        try:
            check_supported(runner.loaded)  # the weights are taken back by an update
        except UpdateError as error:
            raise StartError(f"--enable-memory-saver does not fit these options: {error}") from None

    def release(self, tags: list[str], weights: WeightsSource | None, report: Report) -> int:
        source = weights or self._start
        if "weights" in tags and not source.folder:
            raise UpdateError(
                "The weights came as tensors, so no folder has them: call /update_weights_from_disk before their memory is released."
            )
        tensors: list[Tensor] = []  # none for graphs, which a CPU does not have
        if "weights" in tags:
            tensors += _weights_of(self._runner.loaded.our_model)
        if "kv_cache" in tags:
            pool = self._runner.state.token_to_kv_pool
            tensors += [*pool.k_buffer, *pool.v_buffer]
        return _forget(tensors)

    def resume(self, tags: list[str], weights: WeightsSource | None, report: Report) -> None:
        source = weights or self._start
        if "weights" in tags:
            if version_of(source.folder) != source.files:
                raise UpdateError(
                    f"The files in {source.folder} were changed, so the weights cannot be read again: put the old files back, or call"
                    " /update_weights_from_disk, which brings new weights."
                )
            self._runner.update_weights(LoadWeights(source.folder), report)

    def update_weights(self, work: NewWeights, report: Report) -> str:
        return self._runner.update_weights(work, report)  # writing to released pages brings them back


def _weights_of(model: CausalLM) -> list[Tensor]:
    """Return the tensors that an update writes: those of the modules that know their checkpoint tensors."""
    found: list[Tensor] = []

    def gather(value: Any) -> None:
        if isinstance(value, AdaptedWeight):
            value = value.inner
        if isinstance(value, Tensor):
            found.append(value.detach())
        for inside in inner_values(value).values():
            gather(inside)

    for module in model.modules():
        if isinstance(module, WeightedModule):
            gather(module)
    return found


def _forget(tensors: Iterable[Tensor]) -> int:
    """Give back the pages that lie wholly in the memory of these tensors, which is zero afterwards. Return their bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    spans = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    num_bytes = 0
    for address, size in spans.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise failed")
        num_bytes += length
    if hasattr(libc, "malloc_trim"):  # glibc keeps what reading the weights needed for a while
        libc.malloc_trim(ctypes.c_size_t(0))
    return num_bytes
