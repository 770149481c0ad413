"""x Wᵀ for 5 to 64 rows of x, at the speed at which W is read: a kernel in CUDA's C++.

Triton knows neither loads that may begin before a kernel's inputs are there, nor programs that read each other's shared
memory; at these sizes that is what products wait for. Hopper only, bfloat16 only: for others `choose` has no tiles.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from srt.kernels.cuda_source import checked, compile_source, cuda, machine_code
from srt.kernels.shared_memory import SHARED_BYTES

logger = logging.getLogger(__name__)

HOPPER: Final = (9, 0)
ARCHITECTURE: Final = "sm_90a"
FEWEST_ROWS: Final = 5
MOST_ROWS: Final = 64
BLOCK_K: Final = 64
_SOURCE: Final = Path(__file__).with_name("stream_gemm.cu")
_ALIGNMENT: Final = 1024  # of blocks in shared memory
_BARRIER_BYTES: Final = 16  # of a stage
_MOST_STAGES: Final = 12
_LONG_SPLIT: Final = 2048  # of the inner dimension: shorter parts do not pay for their adding up
_LEAST_SHARE: Final = 0.72  # of the processors that work
_WIDEST: Final = 256  # rows of W that one load brings
_LONG: Final = 1 << 16  # outputs of a head, where cuBLAS is as fast


@dataclass(frozen=True, slots=True)
class StreamTiles:
    """How a product is cut, and the one variant of the kernel that does it."""

    rows: int  # of x, padding included
    warpgroups: int  # of 64 rows of W each
    splits: int  # of the inner dimension
    stages: int
    is_gated: bool = False
    has_residual: bool = False

    @property
    def width(self) -> int:
        """Columns of the result."""
        return 64 * self.warpgroups // (2 if self.is_gated else 1)

    @property
    def stage_bytes(self) -> int:
        return 2 * BLOCK_K * (64 * self.warpgroups + self.rows)

    @property
    def shared_bytes(self) -> int:
        """The ring, whose place the sums take when it has done its work."""
        sums = 4 * self.rows * (64 * self.warpgroups + 4)
        return _ALIGNMENT + max(self.stages * self.stage_bytes, sums)

    @classmethod
    def choose(
        cls,
        num_rows: int,
        n: int,
        k: int,
        is_gated: bool,
        has_residual: bool,
        num_processors: int,
        most_clusters: Callable[[int], int],
    ) -> StreamTiles | None:
        """For n columns of the result; None where cuBLAS is as fast or the shape does not fit.

        All programs run at once. `most_clusters`: so many clusters of that size do. As measured on an H200: the fewest splits that
        give most processors something to do, or twice as many of tiles twice as wide, if these are long all the same.
        """
        if not FEWEST_ROWS <= num_rows <= MOST_ROWS or k % BLOCK_K or n % 8 or n >= _LONG:
            return None
        rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MOST_ROWS
        for splits in (1, 2, 3, 4, 6, 8):
            for warpgroups in (1, 2, 3, 5):
                tiles = cls(rows, warpgroups, splits, 1, is_gated, has_residual)
                num_tiles = -(-n // tiles.width)
                if k // BLOCK_K < splits or not tiles.fill(num_tiles, num_processors, most_clusters):
                    continue
                wider = cls(rows, 2 * warpgroups, 2 * splits, 1, is_gated, has_residual)
                is_as_many = warpgroups == splits == 1 and num_tiles % 2 == 0 and k >= 2 * _LONG_SPLIT
                if is_as_many and wider.fill(num_tiles // 2, num_processors, most_clusters):
                    tiles = wider
                return tiles.with_stages(k)
        return None

    def fill(self, num_tiles: int, num_processors: int, most_clusters: Callable[[int], int]) -> bool:
        """Whether these programs can be, run at once, and leave few processors without one."""
        num_programs = num_tiles * self.splits
        is_enough = _LEAST_SHARE * num_processors <= num_programs <= num_processors
        return self.width <= _WIDEST and is_enough and (self.splits == 1 or num_tiles <= most_clusters(self.splits))

    def with_stages(self, k: int) -> StreamTiles:
        """With as long a ring as there is room and use for."""
        room = SHARED_BYTES[90] - _ALIGNMENT - _MOST_STAGES * _BARRIER_BYTES
        stages = min(room // self.stage_bytes, _MOST_STAGES, max(2, -(-k // BLOCK_K // self.splits)))
        return StreamTiles(self.rows, self.warpgroups, self.splits, stages, self.is_gated, self.has_residual)

    def source(self) -> str:
        return _SOURCE.read_text("utf-8").replace("\nMULTIPLY\n", f"\n{_multiply(self.rows)}\n")

    def constants(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "WARPGROUPS": self.warpgroups,
            "SPLITS": self.splits,
            "STAGES": self.stages,
            "GATED": int(self.is_gated),
            "HAS_RESIDUAL": int(self.has_residual),
        }


_SMALLEST: Final = StreamTiles(16, 1, 1, 2)


class StreamGemm:
    """The kernel on one device."""

    def __init__(self, device: torch.device) -> None:
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    @classmethod
    def on(cls, device: torch.device) -> StreamGemm | None:
        """None where it does not run. PyTorch for CUDA brings NVIDIA's bindings and compiler along; if they do not work, cuBLAS does."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
            return None
        try:
            with torch.cuda.device(device):
                torch.cuda.synchronize()  # PyTorch makes its context when it is first needed
                _function(_SMALLEST, torch.cuda.current_device())
        except Exception as error:
            logger.warning("Products of a few rows are left to cuBLAS: %s", str(error)[:300])
            return None
        return cls(device)

    def tiles(self, x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool, has_residual: bool) -> StreamTiles | None:
        """None where x @ weight.T is better done by others."""
        if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
            return None
        if not FEWEST_ROWS <= len(x) <= MOST_ROWS:
            return None
        n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        return _choose(len(x), n, k, is_gated, has_residual, self._num_processors, x.device.index)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, tiles: StreamTiles, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + residual, rounded once; if the tiles are gated, silu(first half of the columns) * second half."""
        num_rows, k = x.shape
        n = weight.shape[0] // (2 if tiles.is_gated else 1)
        assert num_rows <= tiles.rows and weight.shape[1] == k and tiles.has_residual == (residual is not None)
        for tensor in (x, weight, residual):
            assert tensor is None or tensor.is_contiguous(), tensor.stride()
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            _launch(tiles, x, weight, residual, out)
        return out


def _multiply(rows: int) -> str:
    """The instruction for that many rows of x, as a function: its registers have to be named one by one."""
    count = rows // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    code = (
        f"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"
        f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{names}}}, %{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n}}"
    )
    return (
        f"__device__ __forceinline__ void multiply(float (&sums)[{count}], u64 w, u64 x, int adds) {{\n"
        f'  asm volatile("{code}" : {sums} : "l"(w), "l"(x), "r"(adds));\n}}'
    )


@cache
def _choose(
    num_rows: int, n: int, k: int, is_gated: bool, has_residual: bool, num_processors: int, device: int
) -> StreamTiles | None:
    def most_clusters(size: int) -> int:
        return _most_clusters(size, device)

    return StreamTiles.choose(num_rows, n, k, is_gated, has_residual, num_processors, most_clusters)


@cache
def _function(tiles: StreamTiles, device: int) -> Any:
    """On that device, which is the current one."""
    driver, _ = cuda()
    parts = tiles.source(), tiles.constants(), ARCHITECTURE
    try:
        module = checked(driver.cuModuleLoadData(machine_code(*parts)))
    except RuntimeError:  # what was kept may be broken, or of another compiler than this driver can follow
        module = checked(driver.cuModuleLoadData(compile_source(*parts)))
    function = checked(driver.cuModuleGetFunction(module, b"stream_gemm"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, attribute, tiles.shared_bytes))
    return function


@cache
def _most_clusters(size: int, device: int) -> int:
    """So many clusters of that many programs run at once, if each program takes a whole processor."""
    driver, _ = cuda()
    tiles = StreamTiles(16, 1, size, 1).with_stages(1 << 20)
    with torch.cuda.device(device):
        return int(checked(driver.cuOccupancyMaxActiveClusters(_function(tiles, device), _config(tiles, size, 0))))


def _config(tiles: StreamTiles, num_tiles: int, stream: int) -> Any:
    driver, _ = cuda()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = tiles.splits, num_tiles, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128 * (tiles.warpgroups + 1), 1, 1
    config.sharedMemBytes, config.hStream = tiles.shared_bytes, stream
    cluster, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = tiles.splits, 1, 1
    dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [cluster, dependent], 2
    return config


def _map_of(tensor: torch.Tensor, box_rows: int) -> Any:
    return _tensor_map(tensor.data_ptr(), *tensor.shape, box_rows)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, columns: int, box_rows: int) -> Any:
    """How the device finds blocks of a matrix of bfloat16; what lies outside of it reads as zeros."""
    driver, _ = cuda()
    size, count = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [size(columns), size(rows)],
            [size(2 * columns)],
            [count(BLOCK_K), count(box_rows)],
            [count(1), count(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _launch(
    tiles: StreamTiles,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    driver, _ = cuda()
    num_rows, k = x.shape
    n = out.shape[1]
    maps = _map_of(weight, tiles.width), _map_of(x, tiles.rows)
    pointers = ctypes.c_void_p(0 if residual is None else residual.data_ptr()), ctypes.c_void_p(out.data_ptr())
    numbers = ctypes.c_int(num_rows), ctypes.c_int(n), ctypes.c_int(k // BLOCK_K)
    where = [*(int(one.getPtr()) for one in maps), *(ctypes.addressof(one) for one in (*pointers, *numbers))]
    arguments = (ctypes.c_void_p * len(where))(*where)
    config = _config(tiles, -(-n // tiles.width), torch.cuda.current_stream().cuda_stream)
    checked(driver.cuLaunchKernelEx(config, _function(tiles, x.device.index), ctypes.addressof(arguments), 0))
