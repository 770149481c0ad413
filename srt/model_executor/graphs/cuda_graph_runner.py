"""Decode steps as CUDA graphs: one for the forward pass and others for sampling, for each of a few numbers of rows."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch

from srt.kernels.build.graph_fills import fill_by_kernels
from srt.kernels.build.graph_launch import launcher

Work = Callable[[], None]
NUM_WARM_UPS = 2  # what is made at first use (kernels, workspaces) must not be made inside a graph
MOST_PADDING = 1.5  # times the best size: a graph of up to so much serves while requests run, and a better one can wait
PADDED_STEPS = 200  # by as many, padded to a near graph, as much time is lost as the capture of the best one takes


class Capture(Protocol):
    """Runs work, and gives what repeats it with the same tensors."""

    def __call__(self, work: Work) -> Work: ...

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """What repeats each stretch of the work, which calls `cut` where one ends and the next begins."""


class Misses:
    """Which size is worth its capture even while requests run.

    The best one for steps that found no graph, or only a much larger one, or that were padded to a near one for long.
    """

    def __init__(self) -> None:
        self.size = 0  # 0: none is
        self._num_padded: Counter[int] = Counter()  # steps, by their best sizes

    def record(self, best: int, size: int | None) -> None:
        """A step whose best size is the first was served by the second."""
        if size == best:
            return
        self._num_padded[best] += 1
        if is_far(size, best) or self._num_padded[best] >= PADDED_STEPS:
            self.size = best

    def next_of(self, sizes: Sequence[int], captured: Container[int]) -> int:
        """What to capture next: the largest of all, then the one that was missed last, or else the largest that is left."""
        if self.size and max(sizes) in captured:
            return self.size
        return max(size for size in sizes if size not in captured)

    def record_capture(self, size: int | None) -> None:
        """The missed one is served by this now."""
        if not is_far(size, self.size):
            self.size = 0

    def forget(self) -> None:
        self.size = 0
        self._num_padded.clear()


class CudaGraphRunner:
    """Graphs are captured one size at a time, between steps; a step of fewer rows than a size is padded to it.

    Every rank sees the same steps and is asked for captures at the same places, so all capture the same sizes in the same order.
    The largest comes first: the others find room in the memory that it takes, and it serves until they are there.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        pads: bool,
        works: Callable[[int], Sequence[Work]],
        capture: Capture,
    ) -> None:
        """`works(size)` is what steps of so many rows are made of, from fixed buffers to fixed buffers: a graph each."""
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
        """The captured size that serves `num_rows` rows, noting a missed one; None: the step is launched kernel by kernel."""
        best, size = self._smallest(self.sizes, num_rows), self._smallest(self._captured, num_rows)
        if best is not None:
            self._misses.record(best, size)
        return size

    def can_run(self, size: int) -> bool:
        """Whether there are graphs of just this size."""
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
        """Capture nothing more, and forget this size if it was captured."""
        self._replays.pop(size, None)
        self._captured = sorted(self._replays)
        self.sizes = tuple(self._captured)
        self.forget_missed()

    def replays_of(self, size: int) -> Sequence[Work]:
        """What launches the graphs of this size, in the order of its works."""
        return self._replays[size]

    def _smallest(self, sizes: Sequence[int], num_rows: int) -> int | None:
        size = smallest(sizes, num_rows)
        return size if self._pads or size == num_rows else None


class GraphCapture:
    """Captures work into graphs that share one pool of memory: they are launched one after the other, on the stream that was current at
    their capture."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        (replay,) = self.pieces(lambda cut: work())
        return replay

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """What repeats each stretch of the work, which calls `cut` where one ends and the next begins."""
        graphs: list[torch.cuda.CUDAGraph] = []
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        was_collecting = gc.isenabled()
        gc.disable()  # what a collection frees must not be freed inside a graph
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARM_UPS):
                    work(lambda: None)
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
        # Other threads may use CUDA meanwhile: they are not part of the graph.
        graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")


def smallest(sizes: Sequence[int], least: int) -> int | None:
    """Of ascending sizes the first that is large enough."""
    place = bisect_left(sizes, least)
    return sizes[place] if place < len(sizes) else None


def is_far(size: int | None, best: int) -> bool:
    """Whether the best size is worth its capture at once: none is there that serves, or only a much larger one."""
    return size is None or size > MOST_PADDING * best


def sharing_sizes(sizes: Sequence[int], least: int) -> tuple[int, ...]:
    """Of these, some for steps whose rows share prefixes: to pad them costs little beside what they save."""
    return tuple(size for size in sizes if size >= least and (size & (size - 1) == 0 or size == max(sizes)))


def graph_sizes(most_rows: int) -> tuple[int, ...]:
    """Numbers of rows worth a graph: close together where they are few, since there a padded row costs the most.

    Steps of 224 rows take as long as of 240 with as many positions in all.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 209, 16), 240, *range(256, most_rows, 32), most_rows]
    return tuple(sorted({size for size in sizes if size <= most_rows}))
