"""Capture decode steps as CUDA graphs. Each of a few numbers of rows has a graph of the forward pass and one per kind of sampling."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from srt.kernels.build.graph_fills import fill_by_kernels
from srt.kernels.build.graph_launch import launcher

Work = Callable[[], None]
NUM_WARM_UPS = (
    1  # runs before a capture: kernels and workspaces created at first use must not be created inside a graph
)
MOST_PADDING = 1.5  # a graph of up to this many times the best size is good enough while requests run
PADDED_STEPS = 200  # this many steps padded to a near graph lose as much time as capturing the best one takes


class Capture(Protocol):
    """Runs work and returns a function that repeats it on the same tensors."""

    def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
        """Capture `work`. `warm_up` runs before, and must use each kernel that the work uses; by default it is the work itself."""

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """Capture `work` in pieces, and return a function that repeats each. The work calls `cut` between two pieces."""


class Misses:
    """Finds the size that is worth a capture even while requests run.

    It is the best size for steps that found no graph, or only a much larger one, or that have long been padded to a near one.
    """

    def __init__(self) -> None:
        self.size = 0  # 0: no size is worth it
        self._num_padded: Counter[int] = Counter()  # best size -> steps that another size served

    def record(self, best: int, size: int | None) -> None:
        """Record that a step whose best size is `best` was served by `size`; None: by no graph."""
        if size == best:
            return
        self._num_padded[best] += 1
        if is_far(size, best) or self._num_padded[best] >= PADDED_STEPS:
            self.size = best

    def next_of(self, sizes: Sequence[int], captured: Container[int]) -> int:
        """Return the size to capture next: first the largest of all, then the one missed last, else the largest that is left."""
        if self.size and max(sizes) in captured:
            return self.size
        return max(size for size in sizes if size not in captured)

    def record_capture(self, size: int | None) -> None:
        """Record that steps of the missed size are now served by `size`."""
        if not is_far(size, self.size):
            self.size = 0

    def forget(self) -> None:
        self.size = 0
        self._num_padded.clear()


class CudaGraphRunner:
    """Graphs for a list of sizes, captured one size at a time between steps. A step with fewer rows than a size is padded to it.

    Every rank sees the same steps and receives the capture requests between the same steps, so all capture the same sizes in the same
    order. The largest is captured first: the others reuse its memory, and it serves all steps until they exist.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        pads: bool,
        works: Callable[[int], Sequence[Work]],
        capture: Callable[[Work], Work],
    ) -> None:
        """`works(size)` returns the parts of a step of `size` rows. `capture` makes a graph of each; they read and write fixed buffers."""
        self.sizes = tuple(sorted(sizes))
        self._pads = pads
        self._works = works
        self._capture = capture
        self._replays: dict[int, list[Work]] = {}
        self._captured: list[int] = []  # ascending
        self._misses = Misses()

    @property
    def num_left(self) -> int:
        return len(self.sizes) - len(self._captured)

    def size_for(self, num_rows: int) -> int | None:
        """Return the captured size for `num_rows` rows, and record a miss. None: the step must be launched kernel by kernel."""
        best, size = self._smallest(self.sizes, num_rows), self._smallest(self._captured, num_rows)
        if best is not None:
            self._misses.record(best, size)
        return size

    def can_run(self, size: int) -> bool:
        """Return whether graphs of exactly this size exist."""
        return size in self._replays

    @property
    def next_size(self) -> int:
        assert self.num_left, "all sizes are captured"
        return self._misses.next_of(self.sizes, self._replays)

    @property
    def is_missing_one(self) -> bool:
        return self._misses.size > 0

    def forget_missed(self) -> None:
        self._misses.forget()

    def capture_one_batch_size(self, size: int) -> None:
        self._replays[size] = [self._capture(work) for work in self._works(size)]
        self._captured = sorted(self._replays)
        self._misses.record_capture(self._smallest(self._captured, self._misses.size))

    def give_up(self, size: int) -> None:
        """Capture no more sizes, and drop this one if it was captured."""
        self._replays.pop(size, None)
        self._captured = sorted(self._replays)
        self.sizes = tuple(self._captured)
        self.forget_missed()

    def replays_of(self, size: int) -> Sequence[Work]:
        """Return functions that launch the graphs of this size, in the order of its works."""
        return self._replays[size]

    def _smallest(self, sizes: Sequence[int], num_rows: int) -> int | None:
        size = smallest(sizes, num_rows)
        return size if self._pads or size == num_rows else None


class GraphCapture:
    """Captures work into graphs that share one memory pool. They must be launched one after the other, on the stream that was current
    when they were captured."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        """`pool` is the handle of the memory pool; by default a new one."""
        self._stream = torch.cuda.Stream(device)
        self._pool = pool or torch.cuda.graph_pool_handle()

    def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
        (replay,) = self.pieces(lambda cut: work(), warm_up)
        return replay

    def pieces(self, work: Callable[[Work], None], warm_up: Work | None = None) -> list[Work]:
        """Capture `work` in pieces, and return a function that repeats each. The work calls `cut` between two pieces."""
        warm_up = warm_up or partial(work, lambda: None)
        graphs: list[torch.cuda.CUDAGraph] = []
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        was_collecting = gc.isenabled()
        gc.disable()  # a collection would free memory inside the capture
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARM_UPS):
                    warm_up()
                self._stream.synchronize()
                self._begin(graphs)
                try:
                    work(lambda: self._cut(graphs))
                finally:
                    graphs[-1].capture_end()
        finally:
            if was_collecting:
                gc.enable()
        current.wait_stream(self._stream)
        for graph in graphs:
            fill_by_kernels(graph, self._stream.device)
            graph.instantiate()
        return [launcher(graph, current) for graph in graphs]

    def _cut(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs[-1].capture_end()
        self._begin(graphs)

    def _begin(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        # "thread_local": other threads may use CUDA meanwhile without becoming part of the graph.
        graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")


def smallest(sizes: Sequence[int], least: int) -> int | None:
    """Return the first of the ascending `sizes` that is at least `least`; None if there is none."""
    place = bisect_left(sizes, least)
    return sizes[place] if place < len(sizes) else None


def is_far(size: int | None, best: int) -> bool:
    """Return whether `size` is None or so much larger than `best` that `best` should be captured at once."""
    return size is None or size > MOST_PADDING * best


def sharing_sizes(sizes: Sequence[int], least: int) -> tuple[int, ...]:
    """Return the sizes to capture for steps whose rows share prefixes. Few suffice: padding costs little compared to what sharing saves."""
    return tuple(size for size in sizes if size >= least and (size & (size - 1) == 0 or size == max(sizes)))


def graph_sizes(most_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture. Small ones are close together, because there a padded row costs the most.

    224 is left out: steps of 224 rows take as long as steps of 240 rows with the same total number of positions.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 209, 16), 240, *range(256, most_rows, 32), most_rows]
    return tuple(sorted({size for size in sizes if size <= most_rows}))
