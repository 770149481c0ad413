"""How the products of deterministic servers are cut on Hopper, and that their kernels compile, on a machine without a GPU."""

from __future__ import annotations

import pytest

from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE, Variant
from srt.kernels.gemm.invariant_gemm import UNIT, Splits
from srt.kernels.gemm.invariant_hopper import can_serve, head_tiles, many_row_tiles, stream_tiles

PROCESSORS = 132  # of an H200, and so many clusters of each size at once
CLUSTERS = {2: 66, 3: 39, 4: 30, 5: 24, 6: 17, 8: 15}
SHARED_BYTES = 227 * 1024
# Columns of the result and inner size, of Qwen3-0.6B, 8B and 14B, Llama-3.1-8B and Qwen2.5-7B.
PLAIN = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 12288), (7168, 5120)]
PLAIN += [(5120, 5120), (5120, 17408), (4096, 14336), (3584, 3584), (3584, 18944)]
GATED = [(12288, 4096), (17408, 5120), (14336, 4096), (18944, 3584)]


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 64, 65, 100, 128, 176, 200, 256])
@pytest.mark.parametrize(("n", "k", "is_gated"), [*((*one, False) for one in PLAIN), *((*one, True) for one in GATED)])
def test_all_programs_of_few_rows_run_at_once_and_have_the_splits_of_the_product(
    n: int, k: int, is_gated: bool, num_rows: int
) -> None:
    assert can_serve(n, k, is_gated)
    tiles = stream_tiles(num_rows, n, k, is_gated, PROCESSORS, CLUSTERS.__getitem__)
    if is_gated and num_rows > 64:
        return
    assert tiles is not None
    splits = Splits.of(2 * n if is_gated else n, k)
    assert tiles.splits == splits.num and tiles.teams == 1
    blocks = k // 64
    assert [blocks * i // splits.num * 64 for i in range(splits.num)] == [
        i * splits.units * UNIT for i in range(splits.num)
    ]
    num_clusters = tiles.count(num_rows, n)
    assert num_clusters <= CLUSTERS.get(tiles.splits, PROCESSORS) and num_clusters * tiles.splits <= PROCESSORS
    assert num_rows > 64 or num_clusters * tiles.splits >= 0.7 * PROCESSORS
    assert tiles.stages >= 2 and tiles.shared_bytes + 4 * tiles.rows <= SHARED_BYTES - 1024


@pytest.mark.parametrize("num_rows", [1, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(151_936, 1024), (151_936, 4096), (128_256, 4096)])
def test_an_lm_head_leaves_few_processors_without_work(n: int, k: int, num_rows: int) -> None:
    tiles = head_tiles(num_rows, n, k, PROCESSORS)
    assert tiles is not None and tiles.splits == 1 and tiles.stages >= 4
    waves = -(-tiles.count(num_rows, n) // PROCESSORS)
    assert n >= 0.95 * waves * PROCESSORS * tiles.width
    assert tiles.shared_bytes + 4 * tiles.rows <= SHARED_BYTES - 1024


@pytest.mark.parametrize("num_rows", [257, 300, 512, 2048, 8192])
@pytest.mark.parametrize(("n", "k"), PLAIN)
def test_tiles_of_many_rows_fit_a_processor(n: int, k: int, num_rows: int) -> None:
    tiles = many_row_tiles(num_rows, n, k, PROCESSORS)
    assert tiles.is_parted == (Splits.of(n, k).num > 1) and not tiles.is_gated
    threads = 128 * tiles.warpgroups
    # A tile's sums, their totals, and 40 registers for each thread beside them
    assert (2 if tiles.is_parted else 1) * tiles.rows * tiles.width + 40 * threads + 40 * 128 <= 65_536
    assert tiles.stages >= 4 and tiles.shared_bytes <= SHARED_BYTES - 1024


def test_shapes_that_the_kernels_cannot_split_alike_are_left_to_triton() -> None:
    assert not can_serve(4096, 4096 + 32, False), "blocks have 64 columns"
    assert not can_serve(509, 4096, False), "columns are written by 8"
    assert not can_serve(3072, 1024, True), "gates and ups with splits"
    assert not can_serve(1024, 3072 + 64, False), "splits begin at multiples of 128"


def test_the_kernels_compile_for_hopper() -> None:
    few = stream_tiles(1, 4096, 4096, False, PROCESSORS, CLUSTERS.__getitem__)
    many = [many_row_tiles(rows, 4096, 4096, PROCESSORS) for rows in (512, 8192)]
    assert few is not None and many[0] != many[1]
    variants: list[Variant] = [few, *many]
    for tiles in variants:
        assert compile_source(tiles.source, tiles.constants, ARCHITECTURE).startswith(b"\x7fELF")
