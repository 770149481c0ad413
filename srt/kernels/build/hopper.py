"""Common code of the CUDA C++ kernels for compute capability 9.0: shared sources, tensor maps and launches."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from srt.kernels.build.cuda_source import checked, compile_source, cuda, machine_code
from srt.kernels.build.precompile import is_precompiled
from srt.kernels.build.shared_memory import SHARED_BYTES

logger = logging.getLogger(__name__)

CAPABILITY: Final = (9, 0)
ARCHITECTURE: Final = "sm_90a"
BLOCK_K: Final = 64
"""Columns in a block of either operand of a product, stored as lines of 128 bytes."""
WIDEST_LOAD: Final = 256
"""Largest number of rows that one load can bring."""
_ALIGNMENT: Final = 1024  # bytes, of blocks in shared memory
_BARRIER_BYTES: Final = 16  # per stage
_SHARED: Final = Path(__file__).with_suffix(".cuh")


Argument = torch.Tensor | ctypes.Structure | int | float | None


class Variant(Protocol):
    """A kernel with the constants for which it is compiled."""

    def __hash__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def constants(self) -> Mapping[str, int]: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def cluster(self) -> int:
        """Number of neighbouring programs that can access each other's shared memory."""


def source_of(file: Path, columns: int = 0, *shared: Path) -> str:
    """Join the common source, a function that multiplies 64 rows with `columns` columns if given, shared files, and the kernel's own."""
    return "\n".join((_read(_SHARED), _multiply(columns) if columns else "", *map(_read, shared), _read(file)))


def room_for_stages(most: int) -> int:
    """Return the bytes available for a ring of up to `most` stages."""
    return SHARED_BYTES[90] - _ALIGNMENT - most * _BARRIER_BYTES


def with_alignment(ring_bytes: int) -> int:
    """Return the bytes to request for a ring of `ring_bytes` that can be aligned for blocks."""
    return _ALIGNMENT + ring_bytes


def runs_on(device: torch.device, variant: Variant) -> bool:
    """Return whether this kernel can be built and loaded for the device.

    NVIDIA's bindings and compiler come with PyTorch for CUDA; if they fail, a warning is logged.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes PyTorch create its context, which it does at first use
            function(variant, torch.cuda.current_device())
    except Exception as error:
        logger.warning("There is no %s here, and others do its work: %s", variant.name, str(error)[:300])
        return False
    return True


@cache
def function(variant: Variant, device: int) -> Any:
    """Return the kernel loaded on `device`, which must be the current one. Compile it if it was never compiled."""
    driver, _ = cuda()
    parts = variant.source, variant.constants, ARCHITECTURE
    try:
        module = checked(driver.cuModuleLoadData(machine_code(*parts)))
    except RuntimeError:  # the cached code may be damaged, or from a newer compiler than this driver supports
        module = checked(driver.cuModuleLoadData(compile_source(*parts)))
    loaded = checked(driver.cuModuleGetFunction(module, variant.name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(loaded, attribute, variant.shared_bytes))
    return loaded


@cache
def most_clusters(variant: Variant, device: int, size: int) -> int:
    """Return the number of clusters of `size` programs of this kernel that can run at once."""
    driver, _ = cuda()
    with torch.cuda.device(device):
        config = _config(variant, size, (size, 1, 1), 0, is_dependent=False)
        return int(checked(driver.cuOccupancyMaxActiveClusters(function(variant, device), config)))


_ITEMS: Final = {2: "BFLOAT16", 4: "FLOAT32"}


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    item_bytes: int = 2,
    is_swizzled: bool = True,
) -> Any:
    """Return a tensor map, with which the device loads boxes of bfloat16, innermost dimension first; elements outside read as zero.

    Elements of four bytes are loaded as float32. Boxes are stored in the swizzle pattern of operands, or as they are.

    Strides are in bytes, from the second dimension on. The L2 cache fetches the lines of a block one by one: fetching two at a time
    costs attention 4 %, and does not speed up products (measured on an H200).
    """
    driver, _ = cuda()
    size, count = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_ITEMS[item_bytes]}"),
            len(shape),
            address,
            [size(number) for number in shape],
            [size(number) for number in strides],
            [count(number) for number in box],
            [count(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{'128B' if is_swizzled else 'NONE'}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def map_of(matrix: torch.Tensor, box_rows: int) -> Any:
    """Return the tensor map for blocks of `box_rows` rows of a contiguous matrix."""
    rows, columns = matrix.shape
    return tensor_map(matrix.data_ptr(), (columns, rows), (2 * columns,), (BLOCK_K, box_rows))


def box_map(matrix: torch.Tensor, box_rows: int, box_columns: int) -> Any:
    """Return the tensor map for boxes of a contiguous matrix of two or four bytes an element, which are stored as they are."""
    rows, columns = matrix.shape
    size = matrix.itemsize
    shape, box = (columns, rows), (box_columns, box_rows)
    return tensor_map(matrix.data_ptr(), shape, (size * columns,), box, size, is_swizzled=False)


def launch(
    variant: Variant,
    grid: tuple[int, int, int],
    maps: Sequence[Any],
    arguments: Sequence[Argument],
    is_dependent: bool = False,
) -> None:
    """Launch the kernel with the tensor maps, then the arguments. A dependent kernel may start before the previous one has ended."""
    if is_precompiled(variant, lambda: machine_code(variant.source, variant.constants, ARCHITECTURE)):
        return
    driver, _ = cuda()
    values = [_value(argument) for argument in arguments]
    where = [*(int(one.getPtr()) for one in maps), *map(ctypes.addressof, values)]
    addresses = (ctypes.c_void_p * len(where))(*where)
    device = torch.cuda.current_device()
    config = _config(variant, variant.cluster, grid, torch.cuda.current_stream().cuda_stream, is_dependent)
    checked(driver.cuLaunchKernelEx(config, function(variant, device), ctypes.addressof(addresses), 0))


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _value(argument: Argument) -> ctypes.Structure | ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    match argument:
        case ctypes.Structure():
            return argument
        case int():
            return ctypes.c_int(argument)
        case float():
            return ctypes.c_float(argument)
        case _:
            return ctypes.c_void_p(pointer(argument))


@lru_cache(maxsize=4096)
def _config(variant: Variant, size: int, grid: tuple[int, int, int], stream: int, is_dependent: bool) -> Any:
    driver, _ = cuda()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = variant.num_threads, 1, 1
    config.sharedMemBytes, config.hStream = variant.shared_bytes, stream
    cluster, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
    dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    attributes = [cluster, dependent] if is_dependent else [cluster]
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _read(path: Path) -> str:
    return path.read_text("utf-8")


def _multiply(columns: int) -> str:
    """Return the multiply instructions as functions: of bfloat16 with rows in shared memory or registers of the lanes, and of e4m3.

    They are generated because the instruction's registers must be named one by one.
    """
    in_registers = [f'"r"(rows[{i}])' for i in range(4)]
    in_memory = ['"l"(rows)']
    from_memory = _multiply_by(columns, "u64 rows", in_memory, ", 0, 0")
    of_e4m3 = _multiply_by(columns, "u64 rows", in_memory, "", "e4m3")
    of_registers = _multiply_by(columns, "const u32 (&rows)[4]", in_registers, ", 0")
    return "\n".join((from_memory, of_registers, of_e4m3))


def _multiply_by(columns: int, parameter: str, rows: Sequence[str], ending: str, dtype: str = "bf16") -> str:
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    operand = ", ".join(f"%{count + i}" for i in range(len(rows)))
    operand = f"{{{operand}}}" if len(rows) > 1 else operand
    after, inner = count + len(rows), 16 if dtype == "bf16" else 32
    name = "multiply" if dtype == "bf16" else f"multiply_{dtype}"
    code = (
        f"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{after + 1}, 0;\\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{inner}.f32.{dtype}.{dtype} "
        f"{{{names}}}, {operand}, %{after}, adds, 1, 1{ending};\\n}}"
    )
    return (
        f"__device__ __forceinline__ void {name}(float (&sums)[{count}], {parameter}, u64 columns, int adds) {{\n"
        f'  asm volatile("{code}" : {sums} : {", ".join(rows)}, "l"(columns), "r"(adds));\n}}'
    )
