"""Fills in a captured graph are done by kernels, and fill what they filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from srt.kernels.build.cuda_source import checked, cuda
from srt.model_executor.graphs.cuda_graph_runner import GraphCapture

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=CUDA)


def fill(name: str, memory: torch.Tensor, offset: int, value: int, count: int) -> None:
    """As libraries do it: on the stream at hand, by the driver."""
    stream = torch.cuda.current_stream().cuda_stream
    checked(getattr(cuda()[0], name)(memory.data_ptr() + offset, value, count, stream))


def kinds_of(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], None], dict[str, int]]:
    """What repeats the work, and the nodes of its graph by what they are."""
    driver, _ = cuda()
    found: dict[str, int] = {}
    instantiate = torch.cuda.CUDAGraph.instantiate

    def look(graph: torch.cuda.CUDAGraph) -> None:
        handle = driver.CUgraph(graph.raw_cuda_graph())
        count = checked(driver.cuGraphGetNodes(handle))[-1]
        for node in checked(driver.cuGraphGetNodes(handle, count))[0]:
            kind = checked(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_")
            found[kind] = found.get(kind, 0) + 1
        instantiate(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "instantiate", look)
    return GraphCapture(CUDA)(work), found


def test_words_are_filled_by_kernels_between_those_that_write_and_read_them(
    memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = torch.zeros_like(memory)

    def work() -> None:
        fill("cuMemsetD32Async", memory, 0, 7, 1)  # first of all
        memory.add_(1)
        fill("cuMemsetD32Async", memory, 4, 0x01020304, 1000)
        fill("cuMemsetD16Async", memory, 4 * 2000, 0x0506, 20)  # behind another fill
        fill("cuMemsetD8Async", memory, 4 * 3000, 0x09, 8)
        seen.copy_(memory + 0)
        fill("cuMemsetD32Async", memory, 4 * 4000, 0xFFFFFFFF, 3)  # last of all

    replay, kinds = kinds_of(work, monkeypatch)
    assert kinds.pop("MEMCPY", 0) <= 1 and set(kinds) == {"KERNEL"}
    memory.zero_()
    seen.zero_()
    replay()
    wanted = [1] * 4096
    wanted[0] = 8
    wanted[1:1001] = [0x01020304] * 1000
    wanted[2000:2010] = [0x05060506] * 10
    wanted[3000:3002] = [0x09090909] * 2
    assert seen.tolist() == wanted
    wanted[4000:4003] = [-1] * 3
    assert memory.tolist() == wanted


def test_what_is_no_whole_words_stays_as_it_was(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        memory.add_(1)
        fill("cuMemsetD8Async", memory, 5, 0xFF, 2)

    replay, kinds = kinds_of(work, monkeypatch)
    assert kinds == {"KERNEL": 1, "MEMSET": 1}
    memory.zero_()
    replay()
    assert memory[:3].tolist() == [1, 0x00FFFF01, 1]
