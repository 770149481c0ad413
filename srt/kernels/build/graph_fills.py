"""Replace memset nodes in captured graphs by a kernel.

The driver launches a graph that is a chain of kernels in one go, whatever its length. Before some products, cuBLAS zeroes a counter by a
memset node, and each of these adds 1.5 to 2 µs to a launch (measured with an H200).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from srt.kernels.build.cuda_source import checked, cuda, machine_code

logger = logging.getLogger(__name__)

_SOURCE: Final = """
extern "C" __global__ void fill(unsigned *words, unsigned value, unsigned count) {
  unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place < count) words[place] = value;
}
"""
_NUM_THREADS: Final = 256
_WORD_BYTES: Final = 4


def fill_by_kernels(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Replace memsets in a graph captured with `keep_graph` and not yet instantiated. Those of partial words or several rows stay."""
    driver, _ = cuda()
    handle = driver.CUgraph(graph.raw_cuda_graph())
    kind = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    fills = [
        node for node in _listed(driver.cuGraphGetNodes, handle) if checked(driver.cuGraphNodeGetType(node)) == kind
    ]
    if not fills:
        return
    with torch.cuda.device(device):
        function = _function(torch.cuda.current_device())
        for node in fills if function is not None else ():
            _replace(handle, node, function)


def compile_fill(device: torch.device) -> bytes:
    """Return the kernel's machine code, which is then in the cache."""
    major, minor = torch.cuda.get_device_capability(device)
    return machine_code(_SOURCE, {}, f"sm_{major}{minor}")


def _replace(graph: Any, node: Any, function: Any) -> None:
    driver, _ = cuda()
    wanted = checked(driver.cuGraphMemsetNodeGetParams(node))
    num_bytes = wanted.width * wanted.elementSize
    if wanted.height != 1 or num_bytes % _WORD_BYTES or int(wanted.dst) % _WORD_BYTES:
        return
    before = _listed(_latest("cuGraphNodeGetDependencies"), node)
    behind = _listed(_latest("cuGraphNodeGetDependentNodes"), node)
    arguments = int(wanted.dst), _word(wanted.value, wanted.elementSize), num_bytes // _WORD_BYTES
    kernel = _kernel_node(graph, before, function, *arguments)
    checked(_latest("cuGraphAddDependencies")(graph, [kernel] * len(behind), behind, None, len(behind)))
    checked(driver.cuGraphDestroyNode(node))


def _kernel_node(graph: Any, before: list[Any], function: Any, address: int, word: int, count: int) -> Any:
    driver, _ = cuda()
    arguments = ctypes.c_void_p(address), ctypes.c_uint(word), ctypes.c_uint(count)
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    launch = driver.CUDA_KERNEL_NODE_PARAMS()
    launch.func = function
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = -(-count // _NUM_THREADS), 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = _NUM_THREADS, 1, 1
    launch.kernelParams = ctypes.addressof(addresses)
    return checked(driver.cuGraphAddKernelNode(graph, before, len(before), launch))


def _word(value: int, element_bytes: int) -> int:
    """Return a 4-byte word of elements that all have this value."""
    return int.from_bytes(
        value.to_bytes(_WORD_BYTES, "little")[:element_bytes] * (_WORD_BYTES // element_bytes), "little"
    )


def _listed(function: Callable[..., Any], of: Any) -> list[Any]:
    """Return a list of nodes: a first call of the driver's function gives their number, a second one the nodes."""
    count = checked(function(of))[-1]
    return list(checked(function(of, count))[0]) if count else []


def _latest(name: str) -> Callable[..., Any]:
    """Return the variant of a driver function that sees all dependencies, which bindings of CUDA 12 name with a suffix _v2."""
    driver, _ = cuda()
    found: Callable[..., Any] = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
    return found


@cache
def _function(device: int) -> Any:
    """Return the kernel on `device`, which must be the current one; None if it cannot be built: graphs then launch more slowly."""
    driver, _ = cuda()
    try:
        module = checked(driver.cuModuleLoadData(compile_fill(torch.device("cuda", device))))
        return checked(driver.cuModuleGetFunction(module, b"fill"))
    except Exception as error:
        logger.warning(
            "Graphs take longer to launch than they need, as memory is not filled by a kernel: %s", str(error)[:300]
        )
        return None
