"""What launches a graph says so when it could not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from srt.kernels.build import graph_launch


def launched_with(status: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """By a driver that answers so; the graphs and streams that it was given."""
    given: list[tuple[int, int]] = []

    def launch(graph: int, stream: int) -> int:
        given.append((graph, stream))
        return status

    monkeypatch.setattr(graph_launch, "_driver", lambda: SimpleNamespace(cuGraphLaunch=launch))
    graph: Any = SimpleNamespace(raw_cuda_graph_exec=lambda: 5)
    stream: Any = SimpleNamespace(cuda_stream=7)
    graph_launch.launcher(graph, stream)()
    return given


def test_a_graph_is_launched_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_with(0, monkeypatch) == [(5, 7)]


def test_a_launch_that_fails_raises_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="it knows the names of CUDA's errors")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        launched_with(700, monkeypatch)
