"""x Wᵀ with the order of sums of `invariant_gemm.py`, to the bit, from the kernels in CUDA C++ for Hopper, which are faster.

Both multiply by the same instruction, begin splits at the same places, and add them up in order. Few rows go to `stream_gemm`, whose
splits are the programs of a cluster; more rows to `gated_gemm`, where one program adds up all splits of its tile. Rows for which neither
has suitable tiles, and weights that `serves` refuses, go to the kernel in Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Final

import torch

from srt.kernels.build.hopper import BLOCK_K, WIDEST_LOAD, Variant, most_clusters, runs_on
from srt.kernels.gemm.gated_gemm import PROMPTS, GatedGemm, GatedTiles
from srt.kernels.gemm.invariant_gemm import UNIT, Splits, gated_product, invariant_product
from srt.kernels.gemm.stream_gemm import SMALLEST, Ending, StreamGemm, StreamTiles

_MOST_STREAMED_ROWS: Final = 256
_MOST_STREAMED_GATED_ROWS: Final = 64
_FEW_ROWS: Final = 64
_LONG: Final = 1 << 16  # outputs of an LM head, whose programs cannot all run at once
_WIDEST_OF_LONG: Final = 232
_WIDTHS: Final = (128, 160, 192)
"""Widths of tiles of many rows: sums of 128 rows, and their totals, fill the registers of two warpgroups."""
_FEWEST_STREAMED_W_ROWS: Final = 16


class HopperProducts:
    """The products of one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._gated = StreamGemm(device), GatedGemm(device)
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    @classmethod
    def on(cls, device: torch.device) -> HopperProducts | None:
        """Return the products for this device; None if these kernels do not run there."""
        variants: list[Variant] = [SMALLEST, PROMPTS]
        variants += [_many_rows(width, True) for width in _WIDTHS]  # compiled here, so that no prompt waits for it
        return cls(device) if all(runs_on(device, variant) for variant in variants) else None

    def serves(self, weight: torch.Tensor, is_gated: bool = False) -> bool:
        """Return whether products with this weight come from here, whatever the number of rows."""
        n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        return weight.dtype is torch.bfloat16 and weight.is_contiguous() and can_serve(n, k, is_gated)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T, rounded once; with gates silu(first half of the columns) * second half. `out` may be where to write it."""
        n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        tiles = _tiles(len(x), n, k, is_gated, self._num_processors, x.device.index) if len(x) else None
        if isinstance(tiles, StreamTiles):
            return self._stream.multiply(x, weight, tiles, out=out)
        if isinstance(tiles, GatedTiles):
            split = Splits.of(*weight.shape).units * UNIT if tiles.is_parted else 0
            return self._gated.multiply(x, weight, tiles, split, out)
        return gated_product(x, weight) if is_gated else invariant_product(x, weight, out=out)


def can_serve(n: int, k: int, is_gated: bool) -> bool:
    """Return whether the kernels can have the splits of such a product. A gated one has none."""
    splits, blocks = Splits.of(2 * n if is_gated else n, k), k // BLOCK_K
    starts = [blocks * split // splits.num * BLOCK_K for split in range(splits.num)]
    has_equal_splits = k % BLOCK_K == 0 and starts == [split * splits.units * UNIT for split in range(splits.num)]
    return has_equal_splits and n % 8 == 0 and not (is_gated and splits.num > 1)


@cache
def _tiles(
    num_rows: int, n: int, k: int, is_gated: bool, num_processors: int, device: int
) -> StreamTiles | GatedTiles | None:
    if n >= _LONG and num_rows <= 2 * _FEW_ROWS:
        return head_tiles(num_rows, n, k, num_processors) if num_rows <= _FEW_ROWS else None
    most = _MOST_STREAMED_GATED_ROWS if is_gated else _MOST_STREAMED_ROWS
    if num_rows <= most and n < _LONG:
        return stream_tiles(num_rows, n, k, is_gated, num_processors, partial(_clusters_at_once, device))
    if is_gated:
        return GatedTiles.choose(num_rows, n, k, num_processors)
    return many_row_tiles(num_rows, n, k, num_processors)


def stream_tiles(
    num_rows: int, n: int, k: int, is_gated: bool, num_processors: int, clusters_at_once: Callable[[int], int]
) -> StreamTiles | None:
    """Return tiles with the splits of this product, all of whose programs run at once; None if there are none."""
    splits, ending = Splits.of(2 * n if is_gated else n, k).num, Ending(is_gated=is_gated)
    most = min(num_processors, splits * clusters_at_once(splits)) if splits > 1 else num_processors

    def fits(tiles: StreamTiles) -> bool:
        return tiles.fits(num_rows, n, k) and tiles.count(num_rows, n) * splits <= most

    if num_rows > _FEW_ROWS:
        heights = {StreamTiles.padded(max(-(-num_rows // parts), _FEW_ROWS)) for parts in (1, 2, 3, 4)}
        wide = (StreamTiles(*shape, splits, 1, ending) for shape in product(heights, (64, 96, 128, 192)))
        tiles = min(filter(fits, wide), key=lambda one: one.cost(n, k), default=None)
    else:
        widths = range(ending.columns(_FEWEST_STREAMED_W_ROWS), WIDEST_LOAD + 1, 8)
        narrow = (StreamTiles(StreamTiles.padded(num_rows), width, splits, 1, ending) for width in widths)
        tiles = next(filter(fits, narrow), None)
    return None if tiles is None else tiles.with_stages(k)


def head_tiles(num_rows: int, n: int, k: int, num_processors: int) -> StreamTiles | None:
    """Return tiles for an LM head: as wide as may be, with work for all multiprocessors in the last wave, too."""
    if Splits.of(n, k).num > 1:
        return None
    wide = (StreamTiles(StreamTiles.padded(num_rows), width, 1, 1) for width in range(_WIDEST_OF_LONG, 120, -8))
    tiles = min(
        (one for one in wide if one.fits(num_rows, n, k)),
        key=lambda one: -(-one.count(num_rows, n) // num_processors) * one.width,
        default=None,
    )
    return None if tiles is None else tiles.with_stages(k)


def many_row_tiles(num_rows: int, n: int, k: int, num_processors: int) -> GatedTiles:
    """Return the tiles that take the shortest time by the number of their waves."""
    shapes = (_many_rows(width, Splits.of(n, k).num > 1) for width in _WIDTHS)
    return min(shapes, key=lambda one: one.cost_of(num_rows, n, num_processors))


def _many_rows(width: int, is_parted: bool) -> GatedTiles:
    return GatedTiles(2, 1 if is_parted else 2, width, 2, is_gated=False, is_parted=is_parted).with_stages()


def _clusters_at_once(device: int, size: int) -> int:
    return most_clusters(SMALLEST.with_stages(1 << 20), device, size)
