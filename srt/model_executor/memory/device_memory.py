"""Account for the device's memory: a worker allocates everything that it keeps inside a named region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from srt.model_executor.memory.releasable_memory import ReleasablePart, TorchPool

Tag = Literal["weights", "kv_cache", "buffers", "cuda_graph", "activations"]


class DeviceMemory:
    """Counts the bytes that each region keeps, and knows the parts of the memory that can be released."""

    def __init__(self, device: torch.device, parts: Mapping[str, ReleasablePart] | None = None) -> None:
        """`parts`, by tag, are those that can be released: on a GPU with --enable-memory-saver."""
        self._device = device
        self.num_bytes: dict[Tag, int] = {}
        self.parts = dict(parts or {})
        self._pools = {tag: TorchPool(part) for tag, part in self.parts.items()}

    def releasable(self, tag: Tag) -> AbstractContextManager[None]:
        """Let what this thread allocates inside the block be memory that can be released with `tag`, if any can be."""
        return self._pools[tag].used() if tag in self._pools else nullcontext()

    def graph_pool(self) -> Any:
        """Return the handle of a memory pool for graphs."""
        return self._pools["cuda_graph"].handle() if self._pools else torch.cuda.graph_pool_handle()

    @contextmanager
    def region(self, tag: Tag) -> Iterator[None]:
        """Count the memory that is allocated inside the block and still held at its end as `tag`'s. Must not be nested."""
        before = self._bytes_in_use(tag)
        try:
            yield
        finally:
            self.num_bytes[tag] = self.num_bytes.get(tag, 0) + self._bytes_in_use(tag) - before

    def record_activations(self, num_bytes: int) -> None:
        """Record the number of bytes that are kept free for the largest step."""
        self.num_bytes["activations"] = num_bytes

    def _bytes_in_use(self, tag: Tag) -> int:
        if self._device.type != "cuda":
            return 0
        if tag == "cuda_graph":
            # Graphs keep the memory reserved by their pool, and some that the driver allocates.
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, work: Callable[[], None]) -> int:
        """Return the largest number of bytes that `work` adds to the allocated memory while it runs. It must free all of them."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before
