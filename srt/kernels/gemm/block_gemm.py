"""x Wᵀ of e4m3 numbers with a scale for each 128 inputs, for more rows of x than `stream_gemm.py` handles: a CUDA C++ kernel.

Inputs are rounded by each 128 of a row. A tensor core sums up the products of 128 inputs, and the sum is scaled in registers. If W
has gates and ups, the result is their activation. Hopper only. 64 outputs that begin at a multiple of 64 must have the same scales, as
they have in checkpoints with blocks of 128 × 128; `fp8_gemm.py` has a kernel for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import torch

from srt.kernels.build.hopper import (
    BLOCK_K,
    launch,
    map_of,
    room_for_stages,
    runs_on,
    source_of,
    tensor_map,
    with_alignment,
)
from srt.kernels.build.pdl import LATE
from srt.kernels.gemm.fp8_gemm import GROUP, RoundedRows, quantise_rows
from srt.kernels.gemm.gated_gemm import ROW_TILES

UNIT: Final = 64
"""Outputs that share scales."""
_SOURCE: Final = Path(__file__).with_suffix(".cu")
_FEWEST_ROWS: Final = 65
_MOST_FITTED_ROWS: Final = 256
"""Above this, which is more than a decode step has, one variant serves all row counts, so that new prompt lengths compile nothing."""
_MOST_STAGES: Final = 8
_MULTIPLIED: Final = 32  # rows of x times rows of W that a multiprocessor multiplies with 128 columns per cycle
_SCALING: Final = 300
"""Cycles for each 128 columns that are not spent multiplying, by the times of 32 products on an H200."""


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """The tiles into which a product is cut. They determine the variant of the kernel."""

    height: int  # of each of two warpgroups, in units of 64 rows of x
    w_rows: int  # of W in a tile
    is_gated: bool = False
    stages: int = 1

    @property
    def rows(self) -> int:
        return 128 * self.height

    @property
    def width(self) -> int:
        """Number of columns of the result."""
        return self.w_rows // 2 if self.is_gated else self.w_rows

    @property
    def stage_bytes(self) -> int:
        return 2 * BLOCK_K * (self.rows + self.w_rows)

    @property
    def scale_bytes(self) -> int:
        """Shared memory for the scales of a stage."""
        return 4 * self.rows + 16 * (2 if self.is_gated else self.w_rows // UNIT)

    @property
    def shared_bytes(self) -> int:
        return with_alignment(self.stages * (self.stage_bytes + self.scale_bytes))

    @property
    def name(self) -> str:
        return "block_gemm"

    @property
    def num_threads(self) -> int:
        return 128 * 3

    @property
    def cluster(self) -> int:
        """Number of programs that hand each other shares of x: with 2 or 4 a product takes up to 60 % longer (measured on an H200)."""
        return 1

    @property
    def source(self) -> str:
        return source_of(_SOURCE, self.w_rows, ROW_TILES)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "WARPGROUPS": 2,
            "HEIGHT": self.height,
            "W_ROWS": self.w_rows,
            "GATED": int(self.is_gated),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "BAND": 8,
        }

    @classmethod
    def choose(cls, num_rows: int, n: int, is_gated: bool, num_processors: int) -> BlockTiles:
        """Return the tiles with the shortest estimated time for n columns of the result."""
        if num_rows > _MOST_FITTED_ROWS:
            return cls(2, 128, is_gated)._with_stages()
        return min(cls.every(is_gated), key=lambda one: one._cost(num_rows, n, num_processors))

    @classmethod
    def every(cls, is_gated: bool) -> Iterator[BlockTiles]:
        for height in (1, 2):
            yield from (cls(height, w_rows, is_gated)._with_stages() for w_rows in (128, 64))

    def _cost(self, num_rows: int, n: int, num_processors: int) -> float:
        """Return the estimated cycles for each 128 inputs."""
        items = -(-num_rows // self.rows) * -(-n // self.width)
        return -(-items // num_processors) * (self.rows * self.w_rows / _MULTIPLIED + _SCALING)

    def _with_stages(self) -> BlockTiles:
        return replace(
            self, stages=min(_MOST_STAGES, room_for_stages(_MOST_STAGES) // (self.stage_bytes + self.scale_bytes))
        )


SMALLEST: Final = BlockTiles(1, 64)._with_stages()


def suits(weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether the kernel reads e4m3 numbers [outputs, inputs] with scales [groups of 128 inputs, outputs]. Waits for the device."""
    n, k = weight.shape
    if n % (2 * UNIT) or k % GROUP or len(scales) != k // GROUP or not runs_on(weight.device, SMALLEST):
        return False
    by_unit = scales.view(len(scales), n // UNIT, UNIT)
    return bool((by_unit == by_unit[:, :, :1]).all())


def takes(x: torch.Tensor) -> bool:
    """Return whether x has a type and a number of rows for which the kernel is the fastest."""
    return x.dtype is torch.bfloat16 and len(x) >= _FEWEST_ROWS


def block_gemm(
    x: torch.Tensor | RoundedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    is_gated: bool = False,
    tiles: BlockTiles | None = None,
) -> torch.Tensor:
    """Return x Wᵀ, or silu(x @ first half of W.T) * (x @ second half), with each 128 inputs of a row rounded by themselves.

    `weight` and `scales` are such that `suits` returns True.
    """
    given = x.numbers if isinstance(x, RoundedRows) else x
    (num_rows, k), n, device = given.shape, len(weight) // (2 if is_gated else 1), given.device
    is_dependent = num_rows <= _MOST_FITTED_ROWS
    if not isinstance(x, RoundedRows):
        x = RoundedRows(*quantise_rows(x, has_groups=True, by_group=True, pdl=int(LATE) if is_dependent else 0))
    if tiles is None:
        tiles = _choose(num_rows, n, is_gated, _num_processors(device))
    assert weight.shape[1] == k and weight.is_contiguous() and scales.is_contiguous()
    out = torch.empty((num_rows, n), dtype=torch.bfloat16, device=device)
    rows, w_rows = x.numbers.view(torch.bfloat16), weight.view(torch.bfloat16)
    if is_gated:
        pairs = k // 2  # items of the map have 16 bits
        by_groups = (pairs, 8, 2, n // 8), (2 * pairs, 2 * pairs * n, 2 * pairs * 8)
        w_map = tensor_map(weight.data_ptr(), *by_groups, (BLOCK_K, 8, 2, tiles.width // 8))
    else:
        w_map = map_of(w_rows, tiles.w_rows)
    x_map = map_of(rows, tiles.rows)
    num_items = -(-num_rows // tiles.rows) * -(-n // tiles.width)
    with torch.cuda.device(device):
        arguments = x.scales, scales, out, num_rows, n, k // GROUP, x.scales.stride(1)
        grid = min(num_items, _num_processors(device)), 1, 1
        launch(tiles, grid, (w_map, x_map), arguments, is_dependent=is_dependent)
    return out


@cache
def _choose(num_rows: int, n: int, is_gated: bool, num_processors: int) -> BlockTiles:
    return BlockTiles.choose(num_rows, n, is_gated, num_processors)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
