"""Account for the device's memory: a worker allocates everything that it keeps inside a named region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Tag = Literal["weights", "kv_cache", "buffers", "cuda_graph", "activations"]


class DeviceMemory:
    """Counts the bytes that each region keeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes: dict[Tag, int] = {}

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
