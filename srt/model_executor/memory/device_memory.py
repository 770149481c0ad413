"""Whose the device's memory is: all that a worker keeps is taken inside a region with a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Tag = Literal["weights", "kv_cache", "buffers", "cuda_graph", "activations"]


class DeviceMemory:
    """Counts what each region keeps. The one seam at which memory of a kind could be given back and taken again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes: dict[Tag, int] = {}

    @contextmanager
    def region(self, tag: Tag) -> Iterator[None]:
        """What is allocated inside and still there at the end is `tag`'s. Not nested."""
        before = self._bytes_in_use(tag)
        try:
            yield
        finally:
            self.num_bytes[tag] = self.num_bytes.get(tag, 0) + self._bytes_in_use(tag) - before

    def record_activations(self, num_bytes: int) -> None:
        """Record what is kept free for the largest step."""
        self.num_bytes["activations"] = num_bytes

    def _bytes_in_use(self, tag: Tag) -> int:
        if self._device.type != "cuda":
            return 0
        if tag == "cuda_graph":
            # Graphs keep what their pool has reserved, and memory of the driver's.
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes that `work` takes at most beside what is there; it leaves nothing behind."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before
