"""Manage the graphs of a worker's steps: captures between steps, one at a time, and what happens if one fails.

Which size a step replays, and which size is worth a capture, is decided in `cuda_graph_runner.py` (`size_for` and `Misses`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from srt.distributed.errors import CollectiveError
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.graph_kernels import Graph, GraphKernels
from srt.model_executor.graphs.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from srt.model_executor.graphs.sized_graphs import SizedGraphs

if TYPE_CHECKING:
    from srt.model_executor.loaded_model import LoadedModel

logger = logging.getLogger(__name__)
GraphRunner = DecodeRunner | PiecewiseCudaGraphRunner | SizedGraphs


class StepGraphs:
    """Captures graphs between steps, one size at a time. All ranks receive the requests to capture between the same plans."""

    def __init__(
        self,
        loaded: LoadedModel,
        decodes: DecodeRunner | None = None,
        pieces: PiecewiseCudaGraphRunner | None = None,
        kernels: GraphKernels | None = None,
        adapted_pieces: PiecewiseCudaGraphRunner | None = None,
    ) -> None:
        """`decodes` runs decode steps, and `pieces` replays steps with prompts, `adapted_pieces` those in which a row has an adapter.
        Without them all steps are launched kernel by kernel."""
        self.decodes = decodes
        self.pieces = pieces
        self.adapted_pieces = adapted_pieces
        self._tp = loaded.tp
        self._pipeline = loaded.pipeline
        self._memory = loaded.memory
        self._device = loaded.device
        self._kernels = kernels or GraphKernels()
        runners = decodes, pieces, adapted_pieces
        self._runners: list[GraphRunner] = [runner for runner in runners if runner is not None]
        self._num_left = self._count_left()

    def add(self, runner: SizedGraphs) -> None:
        """Capture the graphs of this runner as well, before those of the runners that are there."""
        self._runners.insert(0, runner)
        self._num_left = self._count_left()

    def precompile_added(self) -> Iterator[Graph]:
        """Run the work of each graph of the runners that were added, then yield its name; in the order in which graphs are captured."""
        for runner in self._runners:
            if isinstance(runner, SizedGraphs):
                yield from runner.precompile()

    @property
    def num_left(self) -> int:
        """The number of sizes that `capture_next` has still to capture."""
        return self._num_left

    @property
    def is_missing_one(self) -> bool:
        """Whether recent steps lacked a graph that is worth capturing while requests run, and its kernels are compiled."""
        if not self._num_left or not any(runner.is_missing_one for runner in self._runners):
            return False
        return self._kernels.are_ready(self._next_runner.next_graph)

    def forget_missed(self) -> None:
        """Forget the graphs that steps lacked so far, because no client sent these steps."""
        for runner in self._runners:
            runner.forget_missed()

    @torch.inference_mode()
    def capture_next(self) -> int:
        """Capture one more size and return its number of rows or tokens; 0 if a rank is still compiling kernels that it needs.

        No launched work may be left. A failure on all ranks is logged as a warning and ends the captures; steps without a graph are
        launched kernel by kernel. If one rank alone fails, the others wait for it inside the capture until the watchdog ends the server.
        """
        chosen = self._next_runner
        graph, size = chosen.next_graph, chosen.next_size
        if not self._all(self._kernels.are_ready(graph)):
            return 0
        self._kernels.forget(graph)
        if not self._all(self._succeeds(chosen.capture_next, size)):
            for runner in self._runners:
                runner.give_up(size if runner is chosen else 0)
            self._kernels.give_up()
        self._num_left = self._count_left()
        return size

    def capture_all(self) -> None:
        """Capture all remaining graphs and wait for their kernels. For tests and benchmarks."""
        while self.num_left:
            self._kernels.wait(self._next_runner.next_graph)
            self.capture_next()

    @property
    def _next_runner(self) -> GraphRunner:
        """The runner to capture from next: one that recent steps lacked a graph of, else decodes before prompts."""
        left = [runner for runner in self._runners if runner.num_left]
        return next((runner for runner in left if runner.is_missing_one), left[0])

    def _all(self, holds: bool) -> bool:
        """Return whether this holds on all ranks of all stages, and of all attention groups, which must have graphs of the same sizes."""
        return bool(self._pipeline.min_int(self._tp.of_experts.min_int(int(holds))))

    def _count_left(self) -> int:
        return sum(runner.num_left for runner in self._runners)

    def _succeeds(self, capture: Callable[[], int], size: int) -> bool:
        """Run the capture and return whether it succeeded. Raises if the GPU cannot continue after a failure."""
        try:
            with self._memory.region("cuda_graph"):
                capture()
            return True
        except CollectiveError:
            raise
        except Exception as error:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            logger.warning(
                "The CUDA graph for %d rows or tokens could not be captured (%s: %s). No more graphs are captured, and steps without"
                " one are slower. If memory is short, choose a smaller --cuda-graph-max-bs or --mem-fraction-static.",
                size,
                type(error).__name__,
                error,
            )
            return False
