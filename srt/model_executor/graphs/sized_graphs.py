"""Graphs of one kind of step, for several sizes. What a step of a size does is the subclass's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from srt.model_executor.graphs.cuda_graph_runner import Capture, CudaGraphRunner, Work
from srt.model_executor.graphs.decode_runner import quick_products
from srt.sampling.sampling_batch_info import SamplingKind


class SizedGraphs(ABC):
    """Captures one size at a time between steps, and chooses the graphs of a step. Without graphs its work is launched kernel by kernel."""

    name: str  # of these graphs, in the record of kernels that are compiled

    def __init__(self, sizes: Sequence[int], device: torch.device, capture: Capture | None) -> None:
        """`sizes` are the numbers of rows or tokens to capture, if `capture` is given."""
        self.sizes = tuple(sorted(sizes))
        self._device = device
        self._graphs: CudaGraphRunner | None = None
        if capture is not None and sizes:
            captured = partial(self._captured, capture)
            self._graphs = CudaGraphRunner(self.sizes, True, self.works, captured)

    @abstractmethod
    def works(self, size: int) -> Sequence[Work]:
        """Return the parts of a step of this size. They read and write memory at fixed addresses."""

    def shortened(self) -> AbstractContextManager[None]:
        """Inside, works do less, but launch all of their kernels."""
        return nullcontext()

    def _captured(self, capture: Capture, work: Work) -> Work:
        def warm_up() -> None:
            with self.shortened():
                work()

        return capture(work, warm_up)

    @abstractmethod
    def stage_padding(self, size: int) -> None:
        """Prepare a run of padding alone, which leaves the tables unchanged."""

    def parts_for(self, least: int) -> tuple[int, Sequence[Work]]:
        """Return the size to run for a step of this size, and its parts: graphs if there are any, else the work itself."""
        graphs = self._graphs
        size = None if graphs is None else graphs.size_for(least)
        if graphs is None or size is None:
            return least, self.works(least)
        return size, graphs.replays_of(size)

    def run_padding(self, size: int) -> None:
        """Run each work, shortened, without a graph, so that kernels are compiled and libraries have loaded theirs."""
        self.stage_padding(size)
        with self.shortened():
            for work in self.works(size):
                work()

    def precompile(self) -> Iterator[tuple[str, int]]:
        """Run the work of each graph, then yield its name; in the order in which graphs are captured."""
        for size in reversed(self.sizes):
            with quick_products(size, self._device):
                self.run_padding(size)
            yield self.name, size

    @property
    def num_left(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_left

    @property
    def next_size(self) -> int:
        assert self._graphs is not None, "nothing is captured here"
        return self._graphs.next_size

    @property
    def next_graph(self) -> tuple[str, int]:
        """The name of the graph to capture next."""
        return self.name, self.next_size

    @property
    def is_missing_one(self) -> bool:
        return self._graphs is not None and self._graphs.is_missing_one

    def forget_missed(self) -> None:
        if self._graphs is not None:
            self._graphs.forget_missed()

    def give_up(self, size: int) -> None:
        """Capture no more sizes, and drop this one if it was captured."""
        if self._graphs is not None:
            self._graphs.give_up(size)

    def capture_next(self) -> int:
        """Capture one more size, and return it."""
        assert self._graphs is not None, "nothing is captured here"
        size = self._graphs.next_size
        self.stage_padding(size)
        with quick_products(size, self._device):
            self._graphs.capture_one_batch_size(size)
        return size


def run_drafts(parts: Sequence[Work], num_drafts: int, kind: SamplingKind) -> None:
    """Run a step and a draw for each draft. `parts` are the first step, one that follows, and a draw of each captured kind of sampling."""
    first, following, *draws = parts
    draw = draws[min(kind, SamplingKind.ADJUSTED)]
    first()
    draw()
    for _ in range(num_drafts - 1):
        following()
        draw()
