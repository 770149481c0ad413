"""x Wᵀ for 5 to 64 rows of x, at the speed at which W is read: a kernel in CUDA's C++.

Triton knows neither loads that may begin before a kernel's inputs are there, nor programs that read each other's shared
memory; at these sizes that is what products wait for. Hopper only, bfloat16 only: for others `choose` has no tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

from srt.kernels.hopper import (
    BLOCK_K,
    WIDEST_LOAD,
    launch,
    map_of,
    most_clusters,
    room_for_stages,
    source_of,
    with_alignment,
)

FEWEST_ROWS: Final = 5
MOST_ROWS: Final = 64
_MOST_STAGES: Final = 12
_LONG_SPLIT: Final = 2048  # of the inner dimension: shorter parts do not pay for their adding up
_LEAST_SHARE: Final = 0.72  # of the processors that work
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
        return with_alignment(max(self.stages * self.stage_bytes, sums))

    @property
    def name(self) -> str:
        return "stream_gemm"

    @property
    def num_threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def cluster(self) -> int:
        return self.splits

    @classmethod
    def choose(
        cls,
        num_rows: int,
        n: int,
        k: int,
        is_gated: bool,
        has_residual: bool,
        num_processors: int,
        clusters_at_once: Callable[[int], int],
    ) -> StreamTiles | None:
        """For n columns of the result; None where cuBLAS is as fast or the shape does not fit.

        All programs run at once. `clusters_at_once`: so many clusters of that size do. As measured on an H200: the fewest splits that
        give most processors something to do, or twice as many of tiles twice as wide, if these are long all the same.
        """
        if not FEWEST_ROWS <= num_rows <= MOST_ROWS or k % BLOCK_K or n % 8 or n >= _LONG:
            return None
        rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MOST_ROWS
        for splits in (1, 2, 3, 4, 6, 8):
            for warpgroups in (1, 2, 3, 5):
                tiles = cls(rows, warpgroups, splits, 1, is_gated, has_residual)
                num_tiles = -(-n // tiles.width)
                if k // BLOCK_K < splits or not tiles.fill(num_tiles, num_processors, clusters_at_once):
                    continue
                wider = cls(rows, 2 * warpgroups, 2 * splits, 1, is_gated, has_residual)
                is_as_many = warpgroups == splits == 1 and num_tiles % 2 == 0 and k >= 2 * _LONG_SPLIT
                if is_as_many and wider.fill(num_tiles // 2, num_processors, clusters_at_once):
                    tiles = wider
                return tiles.with_stages(k)
        return None

    def fill(self, num_tiles: int, num_processors: int, clusters_at_once: Callable[[int], int]) -> bool:
        """Whether these programs can be, run at once, and leave few processors without one."""
        num_programs = num_tiles * self.splits
        is_enough = _LEAST_SHARE * num_processors <= num_programs <= num_processors
        return (
            self.width <= WIDEST_LOAD and is_enough and (self.splits == 1 or num_tiles <= clusters_at_once(self.splits))
        )

    def with_stages(self, k: int) -> StreamTiles:
        """With as long a ring as there is room and use for."""
        blocks = -(-k // BLOCK_K // self.splits)
        stages = min(room_for_stages(_MOST_STAGES) // self.stage_bytes, _MOST_STAGES, max(2, blocks))
        return replace(self, stages=stages)

    @property
    def source(self) -> str:
        return source_of(self.name, self.rows)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "ROWS": self.rows,
            "WARPGROUPS": self.warpgroups,
            "SPLITS": self.splits,
            "STAGES": self.stages,
            "GATED": int(self.is_gated),
            "HAS_RESIDUAL": int(self.has_residual),
        }


SMALLEST: Final = StreamTiles(16, 1, 1, 2)


class StreamGemm:
    """The kernel on one device."""

    def __init__(self, device: torch.device) -> None:
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

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
        maps = map_of(weight, tiles.width), map_of(x, tiles.rows)
        grid = tiles.splits, -(-n // tiles.width)
        with torch.cuda.device(x.device):
            launch(tiles, grid, maps, (residual, out), (num_rows, n, k // BLOCK_K), is_dependent=True)
        return out


@cache
def _choose(
    num_rows: int, n: int, k: int, is_gated: bool, has_residual: bool, num_processors: int, device: int
) -> StreamTiles | None:
    def clusters_at_once(size: int) -> int:
        return most_clusters(StreamTiles(16, 1, size, 1).with_stages(1 << 20), device)

    return StreamTiles.choose(num_rows, n, k, is_gated, has_residual, num_processors, clusters_at_once)
