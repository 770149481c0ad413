"""How gated products are cut, and that their kernel compiles, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.gemm.gated_gemm import GatedTiles

PROCESSORS = 132  # of an H200
SHARED_BYTES = 227 * 1024
MLPS = [(3072, 1024), (12288, 4096), (17408, 5120)]  # of Qwen3-0.6B, 8B and 14B: columns of the result, inner size


def choose(num_rows: int, n: int, k: int) -> GatedTiles | None:
    return GatedTiles.choose(num_rows, n, k, PROCESSORS)


@pytest.mark.parametrize("num_rows", [65, 96, 128, 129, 192, 200, 256, 512, 8192])
@pytest.mark.parametrize(("n", "k"), MLPS[1:])
def test_tiles_fit_a_processor_and_most_of_what_they_multiply_is_needed(n: int, k: int, num_rows: int) -> None:
    tiles = choose(num_rows, n, k)
    if tiles is None:
        assert n == 17_408 and 192 < num_rows <= 256, "in three waves of two tiles' height"
        return
    assert tiles.stages >= 3 and tiles.shared_bytes <= SHARED_BYTES - 1024
    # A tile's sums, and 40 registers for each thread beside them
    threads = 128 * tiles.warpgroups
    assert tiles.rows * 2 * tiles.width + 40 * threads + 40 * 128 <= 65_536
    num_tiles = -(-num_rows // tiles.rows) * -(-n // tiles.width)
    waves = -(-num_tiles // PROCESSORS)
    padded = -(-num_rows // tiles.rows) * tiles.rows
    assert padded * n >= 0.85 * waves * PROCESSORS * tiles.rows * tiles.width
    assert num_rows <= tiles.rows or num_rows > 256, "rows of W are read once"


def test_tiles_of_most_sums_become_half_as_high_for_e4m3() -> None:
    full, wide = choose(256, 12288, 2048), choose(128, 12288, 2048)
    assert full is not None and wide is not None
    assert (full.height, full.for_rounded_rows().height) == (2, 1)
    assert full.for_rounded_rows().shared_bytes <= SHARED_BYTES - 1024
    assert wide.for_rounded_rows() == replace(wide, is_rounded=True)


@pytest.mark.parametrize(("num_rows", "rows"), [(192, 192), (224, None), (225, 128), (256, 128)])
def test_llamas_product_has_two_waves_where_these_are_full(num_rows: int, rows: int | None) -> None:
    tiles = choose(num_rows, 14336, 4096)
    assert (None if tiles is None else tiles.rows) == rows


def test_prompts_of_any_length_are_cut_in_one_way() -> None:
    assert len({choose(num_rows, 12288, 4096) for num_rows in range(257, 8193)} - {None}) == 1


def test_what_cublas_does_as_fast_or_the_kernel_cannot_is_left_alone() -> None:
    assert choose(64, 12288, 4096) is None
    assert choose(128, 12288, 4096 + 32) is None, "the inner size is cut into 64"
    assert choose(128, 12288 + 4, 4096) is None, "columns are written by 8"
    assert choose(128, 384, 192) is None, "too small to have work for most processors"
    assert choose(300, 12288, 4096) is None, "two tiles high, the second nearly empty"


@pytest.mark.parametrize("num_rows", [65, 192, 256, 8192])
def test_it_compiles_for_hopper_with_tiles_of_every_height(num_rows: int) -> None:
    tiles = choose(num_rows, 12288, 4096)
    assert tiles is not None
    tiles = replace(tiles, is_scaled=num_rows <= 256)
    assert compile_source(tiles.source, tiles.constants, ARCHITECTURE).startswith(b"\x7fELF")
    if num_rows == 8192:
        awaiting = replace(tiles, awaits=True)
        assert compile_source(awaiting.source, awaiting.constants, ARCHITECTURE).startswith(b"\x7fELF")
    if num_rows == 192:
        rounded = replace(tiles, is_rounded=True)
        assert compile_source(rounded.source, rounded.constants, ARCHITECTURE).startswith(b"\x7fELF")
