"""Kernels of graphs that are not captured yet, while threads compile them."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from srt.layers.attention.base import Reading

if TYPE_CHECKING:
    from srt.kernels.build.precompile import Compilers

Graph = tuple[Reading, int] | int
"""A graph's name: how decodes are read and how many rows there are, or a number of tokens."""


class GraphKernels:
    """Says of each graph whether its kernels are compiled. Of a graph that was not precompiled it knows none, so it is ready."""

    def __init__(self) -> None:
        self._compilers: Compilers | None = None  # when they are dropped, they begin nothing more
        self._kernels: dict[Graph, frozenset[Future[Any]]] = {}

    def begin(self, compilers: Compilers) -> None:
        """Keep the threads that compile what later steps need."""
        self._compilers = compilers

    def add(self, graph: Graph, kernels: frozenset[Future[Any]]) -> None:
        self._kernels[graph] = kernels

    def are_ready(self, graph: Graph) -> bool:
        """Whether the graph's kernels lie compiled in the caches, or failed to be, as far as they were precompiled."""
        return all(kernel.done() for kernel in self._kernels.get(graph, ()))

    def wait(self, graph: Graph) -> None:
        """Wait until the graph's kernels are ready."""
        wait(self._kernels.get(graph, ()))

    def forget(self, graph: Graph) -> None:
        """Let go of a graph that is captured now."""
        self._kernels.pop(graph, None)

    def give_up(self) -> None:
        """Compile nothing more: no graph will be captured any more."""
        self._kernels.clear()
        self._compilers = None
