"""Track which kernels of graphs that are not captured yet are still being compiled by threads."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from srt.layers.attention.base import Reading

if TYPE_CHECKING:
    from srt.kernels.build.precompile import Compilers

Graph = tuple[Reading | str, int] | int
"""A graph's name: for decode steps the reading and the number of rows, for steps with prompts the number of tokens, for those of
`SizedGraphs`, and for prompts with adapters, their name and the size."""


class GraphKernels:
    """Knows for each graph whether its kernels are compiled. A graph that was not precompiled counts as ready."""

    def __init__(self) -> None:
        self._compilers: Compilers | None = None  # dropping them cancels the compilations that have not begun
        self._kernels: dict[Graph, frozenset[Future[Any]]] = {}

    def begin(self, compilers: Compilers) -> None:
        """Keep the threads that compile what later steps need."""
        self._compilers = compilers

    def add(self, graph: Graph, kernels: frozenset[Future[Any]]) -> None:
        self._kernels[graph] = kernels

    def are_ready(self, graph: Graph) -> bool:
        """Return whether the compilation of each of the graph's kernels has ended, with success or without."""
        return all(kernel.done() for kernel in self._kernels.get(graph, ()))

    def wait(self, graph: Graph) -> None:
        """Wait until the graph's kernels are ready."""
        wait(self._kernels.get(graph, ()))

    def forget(self, graph: Graph) -> None:
        """Forget a graph, because it is captured now."""
        self._kernels.pop(graph, None)

    def give_up(self) -> None:
        """Compile no more kernels, because no more graphs will be captured."""
        self._kernels.clear()
        self._compilers = None
