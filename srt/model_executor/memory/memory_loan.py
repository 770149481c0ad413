"""Memory that a rank lends: while it serves nobody, what it needs only for serving goes back to the host.

Addresses stay as they are, so tables of addresses and compiled steps remain valid. On a CPU the kernel takes back the pages of the weights
and of the KV memory, which are zero when they are used again; the weights are then read from their folder.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor

from srt.layers.adapters import AdaptedWeight
from srt.layers.weights import WeightedModule
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.weight_update import check_supported
from srt.model_loader.weight_update import inner_values
from srt.models.causal_lm import CausalLM
from srt.protocol.engine_work import LoadWeights, WeightsSource
from srt.utils.checkpoint import version_of
from srt.utils.errors import StartError, UpdateError

MADV_DONTNEED: Final = 4


class MemoryLoan:
    """Owner of the decision which memory of a rank is released. All ranks of a replica make the same calls in the same order."""

    def __init__(self, runner: ModelRunner, start: WeightsSource) -> None:
        """`start` says where the weights of the start are kept. StartError if a part could not be taken back later."""
        loaded = runner.loaded
        self._runner = runner
        self._start = start
        if loaded.device.type != "cpu":
            raise StartError("--enable-memory-saver serves on CPUs only so far: leave it out, or use --device cpu.")
        if loaded.args.speculative_algorithm is not None:
            raise StartError(
                "--enable-memory-saver does not support --speculative-algorithm: leave one of the two out."
            )
        try:
            check_supported(loaded)  # the weights are taken back by an update
        except UpdateError as error:
            raise StartError(f"--enable-memory-saver does not fit these options: {error}") from None

    def release(self, tags: list[str], weights: WeightsSource | None) -> int:
        """Give back the memory of these parts and return its bytes. UpdateError if the weights are kept in no folder."""
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

    def resume(self, tags: list[str], weights: WeightsSource | None, report: Callable[[], None]) -> None:
        """Take these parts back. UpdateError, with the weights released as before, if they cannot be read again."""
        source = weights or self._start
        if "weights" in tags:
            if version_of(source.folder) != source.files:
                raise UpdateError(
                    f"The files in {source.folder} were changed, so the weights cannot be read again: put the old files back, or call"
                    " /update_weights_from_disk, which brings new weights."
                )
            self._runner.update_weights(LoadWeights(source.folder), report)


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
