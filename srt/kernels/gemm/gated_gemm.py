"""silu(gates) * ups of x Wᵀ for more rows of x than `stream_gemm.py` handles, as fast as the tensor cores allow: a CUDA C++ kernel.

cuBLAS multiplies as fast, but writes gates and ups to memory, where they must be read again. Hopper only: bfloat16, or up
to 256 rows rounded to e4m3 for a weight of such numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from srt.kernels.build.arrival import ARRIVAL, Arrival, LateRows
from srt.kernels.build.hopper import (
    BLOCK_K,
    launch,
    map_of,
    most_clusters,
    room_for_stages,
    source_of,
    tensor_map,
    with_alignment,
)
from srt.kernels.build.pdl import LATE
from srt.kernels.gemm.fp8_gemm import RoundedRows, quantise_rows
from srt.kernels.gemm.packed_matrix import PackedMatrix
from srt.kernels.gemm.stream_gemm import Weighted

_SOURCE: Final = Path(__file__).with_suffix(".cu")
ROW_TILES: Final = Path(__file__).with_name("row_tiles.cuh")
"""Common code of the kernels that multiply many rows in tiles."""
_FEWEST_ROWS: Final = 65
_MOST_FITTED_ROWS: Final = 256
"""Above this, which is more than a decode step has, one variant serves all row counts, so that new prompt lengths compile nothing."""
_MOST_STAGES: Final = 8
_LEAST_SHARE: Final = 0.7  # smallest share of the multiprocessors that must have work
_LEAST_USE: Final = 0.85
"""Smallest share of useful multiplications in several waves of tiles; cuBLAS has tiles of more sizes."""
_WIDEST_ROUNDED: Final = 80  # columns of a tile twice 64 rows high, of e4m3
_LOADING: Final = 0.4  # cost of loading one row or column of a tile; multiplying one column of 128 rows costs 1


@dataclass(frozen=True, slots=True)
class GatedTiles:
    """The tiles into which a product is cut. They determine the variant of the kernel."""

    warpgroups: int
    height: int  # of each warpgroup, in units of 64 rows of x
    width: int  # columns of the result
    cluster: int = 1
    stages: int = 1
    is_rounded: bool = False  # both operands have e4m3 numbers, two in the place of one of bfloat16
    is_scaled: bool = False  # x was multiplied by a norm's weight, and the factors of its rows are still to be applied
    is_gated: bool = True  # otherwise the result is the product itself
    awaits: bool = False  # some rows of x arrive while the kernel runs
    is_parted: bool = False  # the inner dimension is cut into splits, whose sums are added; takes twice the registers

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups * self.height

    @property
    def w_rows(self) -> int:
        return self.width * (2 if self.is_gated else 1)

    @property
    def stage_bytes(self) -> int:
        return 2 * BLOCK_K * (self.rows + self.w_rows)

    @property
    def shared_bytes(self) -> int:
        return with_alignment(self.stages * self.stage_bytes)

    @property
    def name(self) -> str:
        return "gated_gemm"

    @property
    def num_threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def source(self) -> str:
        return source_of(_SOURCE, self.w_rows, ARRIVAL, ROW_TILES)

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "WARPGROUPS": self.warpgroups,
            "HEIGHT": self.height,
            "WIDTH": self.width,
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "BAND": 8,
            "SCALED": int(self.is_scaled),
            "ROUNDED": int(self.is_rounded),
            "GATED": int(self.is_gated),
            "PARTED": int(self.is_parted),
            "AWAITS": int(self.awaits),
            "MOST_SCALED": _MOST_FITTED_ROWS,
        }

    @classmethod
    def choose(cls, num_rows: int, n: int, k: int, num_processors: int) -> GatedTiles | None:
        """Return the tiles for n columns of the result; None if cuBLAS is as fast or the shape does not fit."""
        if num_rows < _FEWEST_ROWS or k % BLOCK_K or n % 8:
            return None
        if num_rows > _MOST_FITTED_ROWS:
            tiles = PROMPTS
            return tiles if tiles._use(num_rows, n, num_processors) >= _LEAST_USE else None
        enough = [one for one in cls._all() if one._count(num_rows, n) >= _LEAST_SHARE * num_processors]
        best = min(enough, key=lambda one: one.cost_of(num_rows, n, num_processors), default=None)
        if best is None:
            return None
        # On an H200 two full waves were faster than cuBLAS, three were not.
        is_full = best._use(num_rows, n, num_processors) >= _LEAST_USE
        pays = is_full and best._waves(num_rows, n, num_processors) == 2
        return best.with_stages() if pays or best.reads_once(num_rows, n, num_processors) else None

    @classmethod
    def _all(cls) -> Iterator[GatedTiles]:
        """Yield the tile shapes whose sums fit in the registers."""
        for warpgroups, height, widest in ((2, 1, 128), (3, 1, 96), (2, 2, 96)):
            yield from (cls(warpgroups, height, width) for width in range(32, widest + 1, 8))

    @property
    def _cost(self) -> float:
        """Time of a tile in arbitrary units, as measured on an H200."""
        return self.rows / 128 * self.w_rows + _LOADING * (self.rows + self.w_rows)

    def for_rounded_rows(self) -> GatedTiles:
        """Return the tiles for e4m3. Those of most sums have no registers left for the factors of columns and become half as high."""
        is_full = self.height == 2 and self.width > _WIDEST_ROUNDED
        return replace(self, height=1 if is_full else self.height, is_rounded=True).with_stages()

    def _count(self, num_rows: int, n: int) -> int:
        return -(-num_rows // self.rows) * -(-n // self.width)

    def _waves(self, num_rows: int, n: int, num_processors: int) -> int:
        return -(-self._count(num_rows, n) // num_processors)

    def reads_once(self, num_rows: int, n: int, num_processors: int) -> bool:
        """Return whether each weight is read by programs that run at the same time."""
        return self.rows >= num_rows or self._waves(num_rows, n, num_processors) == 1

    def _use(self, num_rows: int, n: int, num_processors: int) -> float:
        """Return the share of useful multiplications."""
        done = self._waves(num_rows, n, num_processors) * num_processors * self.rows * self.width
        return num_rows * n / done

    def cost_of(self, num_rows: int, n: int, num_processors: int) -> float:
        """Return the time of a product of n columns in arbitrary units."""
        return self._waves(num_rows, n, num_processors) * self._cost

    def with_stages(self) -> GatedTiles:
        """Return the tiles with as many stages as fit in shared memory."""
        room = room_for_stages(_MOST_STAGES) - 4 * _MOST_FITTED_ROWS  # the rest holds the factors of rows
        return replace(self, stages=min(_MOST_STAGES, room // self.stage_bytes))


PROMPTS: Final = GatedTiles(2, 2, 96, 2).with_stages()


class GatedGemm:
    """The gated product on one device."""

    def __init__(self, device: torch.device) -> None:
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def tiles(self, x: torch.Tensor, weight: torch.Tensor | PackedMatrix) -> GatedTiles | None:
        """Return the tiles for this product; None if other kernels are faster."""
        if x.dtype is not torch.bfloat16:
            return None
        if isinstance(weight, PackedMatrix):
            if not weight.rounds_inputs or len(x) > _MOST_FITTED_ROWS:
                return None
            sizes = len(x), weight.shape[0] // 2
            tiles = _choose(*sizes, weight.shape[1] // 2, self._num_processors)
            if tiles is None or not tiles.reads_once(*sizes, self._num_processors):
                return None
            return tiles.for_rounded_rows()
        if weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
            return None
        return _choose(len(x), weight.shape[0] // 2, weight.shape[1], self._num_processors)

    def multiply(
        self,
        x: torch.Tensor | Weighted | RoundedRows,
        weight: torch.Tensor | PackedMatrix,
        tiles: GatedTiles,
        split: int = 0,
        out: torch.Tensor | None = None,
        late: LateRows | None = None,
    ) -> torch.Tensor:
        """Return silu(x @ first half of weight.T) * (x @ second half), rounded once; x is rounded to e4m3 if the weight says so.

        Without gates return x @ weight.T. With parted tiles `split` elements of the inner dimension are one sum. The result is
        written to `out` if given. With `late` some rows of x, the last or the first ones, arrive while the kernel runs.
        """
        assert (split > 0) == tiles.is_parted and split % BLOCK_K == 0 and not (tiles.is_parted and tiles.is_gated)
        squares, parts, eps = None, 0, 0.0
        if isinstance(x, Weighted):
            assert len(x.values) <= _MOST_FITTED_ROWS
            tiles, squares, parts, eps = replace(tiles, is_scaled=True), x.squares, len(x.squares), x.eps
            x = x.values
        x_scales = w_scales = None
        if isinstance(weight, PackedMatrix):
            rounded, x_scales = x if isinstance(x, RoundedRows) else quantise_rows(x, pdl=int(LATE))
            x, w_scales, weight = rounded.view(torch.bfloat16), weight.scales, weight.numbers.view(torch.bfloat16)
        assert not isinstance(x, RoundedRows)
        x = x.contiguous()
        num_rows, k = x.shape
        n = weight.shape[0] // (2 if tiles.is_gated else 1)
        assert weight.shape[1] == k and weight.is_contiguous()
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device) if out is None else out
        assert out.shape == (num_rows, n) and out.dtype is x.dtype and out.is_contiguous(), (out.shape, out.dtype)
        arrival, first_tile, own_tiles = Arrival(), 0, 0
        if late is not None:
            own, arrival = late
            assert num_rows > _MOST_FITTED_ROWS and own.start % tiles.rows == 0, (num_rows, own)
            assert own.stop == num_rows or (own.start == 0 and own.stop % tiles.rows == 0), (num_rows, own)
            tiles = replace(tiles, awaits=True)
            first_tile, own_tiles = own.start // tiles.rows, -(-(own.stop - own.start) // tiles.rows)
        w_map = _map_of_gates(weight, n, tiles.width) if tiles.is_gated else map_of(weight, tiles.width)
        x_map = map_of(x, tiles.rows // tiles.cluster)
        num_items = -(-num_rows // tiles.rows) * -(-n // (tiles.width * tiles.cluster))
        num_clusters = min(num_items, most_clusters(tiles, x.device.index, tiles.cluster))
        with torch.cuda.device(x.device):
            sizes = num_rows, n, k // BLOCK_K, split // BLOCK_K, parts, eps
            arguments = squares, x_scales, w_scales, out, *sizes, arrival, first_tile, own_tiles
            grid = num_clusters * tiles.cluster, 1, 1
            launch(tiles, grid, (w_map, x_map), arguments, is_dependent=num_rows <= _MOST_FITTED_ROWS)
        return out


def _map_of_gates(weight: torch.Tensor, n: int, width: int) -> Any:
    """Return the tensor map whose boxes have groups of 8 rows of gates, each followed by its ups."""
    k = weight.shape[1]
    by_groups = (k, 8, 2, n // 8), (2 * k, 2 * k * n, 2 * k * 8)
    return tensor_map(weight.data_ptr(), *by_groups, (BLOCK_K, 8, 2, width // 8))


@cache
def _choose(num_rows: int, n: int, k: int, num_processors: int) -> GatedTiles | None:
    return GatedTiles.choose(num_rows, n, k, num_processors)
