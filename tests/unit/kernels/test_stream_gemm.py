"""How streamed products are cut, and that their kernel compiles, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from srt.kernels.build import cuda_source
from srt.kernels.build.cuda_source import compile_source, machine_code
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.gemm.packed_matrix import ROUNDED, Numbers
from srt.kernels.gemm.stream_gemm import (
    FEWEST_ROWS,
    MOST_GATED_ROWS,
    MOST_PACKED_ROWS,
    MOST_PLAIN_ROWS,
    MOST_ROWS,
    MOST_ROWS_OF_FEW_WEIGHTS,
    MOST_ROWS_OF_LONG,
    PLAIN,
    Ending,
    StreamTiles,
)
from srt.model_executor.graphs.cuda_graph_runner import graph_sizes
from srt.model_executor.startup.warm_up import BATCHES
from tests.support.hopper_code import instructions_of, reads_under_way_at_arrivals

PROCESSORS = 132  # of an H200, and so many clusters of each size at once
CLUSTERS = {2: 66, 3: 39, 4: 30, 5: 24, 6: 17, 8: 15}
SHARED_BYTES = 227 * 1024
HEADS = Ending(is_scaled=True, head_dim=128, has_head_norm=True)
ONTO = Ending(has_residual=True, is_weighted=True)
GATED = Ending(is_gated=True, is_scaled=True)
# Columns of the result, inner size, and what becomes of it; of Qwen3-0.6B, 8B and 14B.
PROJECTIONS = [
    *((4096, 1024, HEADS), (1024, 2048, ONTO), (3072, 1024, GATED), (1024, 3072, ONTO)),
    *((6144, 4096, HEADS), (4096, 4096, ONTO), (12288, 4096, GATED), (4096, 12288, ONTO)),
    *((7168, 5120, HEADS), (5120, 5120, ONTO), (17408, 5120, GATED), (5120, 17408, ONTO)),
]


def choose(num_rows: int, n: int, k: int, ending: Ending = PLAIN) -> StreamTiles | None:
    return StreamTiles.choose(num_rows, n, k, ending, PROCESSORS, CLUSTERS.__getitem__)


@pytest.mark.parametrize("num_rows", [FEWEST_ROWS, 16, 17, 33, 64, 65, 96, 97, 100, 128, 150, MOST_ROWS, 256])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_all_programs_of_a_product_run_at_once_and_many_processors_have_one(
    projection: tuple[int, int, Ending], num_rows: int
) -> None:
    n, k, ending = projection
    tiles = choose(num_rows, *projection)
    most, gated = (MOST_ROWS_OF_FEW_WEIGHTS, MOST_PLAIN_ROWS) if n * k <= 1 << 22 else (MOST_ROWS, MOST_GATED_ROWS)
    if (n, k) == (4096, 12_288):
        most = MOST_ROWS_OF_LONG
    if num_rows > (gated if ending.is_gated else most):
        assert tiles is None
        return
    assert tiles is not None
    num_tiles = -(-n // tiles.width) * -(-num_rows // tiles.rows)
    least = 0.45 if n * k <= 1 << 22 and k <= 2048 else 0.7
    assert least * PROCESSORS < num_tiles * tiles.splits <= PROCESSORS
    assert tiles.splits == 1 or num_tiles <= CLUSTERS[tiles.splits]
    assert tiles.stages >= 2 and tiles.shared_bytes + 4 * tiles.rows <= SHARED_BYTES - 1024
    assert tiles.splits <= k // 64
    # The last warpgroup multiplies 64 rows of W, whatever there are, and reads within the program's memory; or x has all 64 rows.
    last_stage = (tiles.stages - 1) * tiles.stage_bytes
    read = tiles.w_rows if tiles.share else 64 * tiles.warpgroups
    assert last_stage + 128 * max(read, tiles.w_rows + tiles.rows) <= tiles.shared_bytes - 1024
    if tiles.share:
        assert tiles.rows == 64 and tiles.share % 8 == 0
        assert tiles.w_rows <= tiles.share * tiles.warpgroups < 1.1 * tiles.w_rows
    assert 64 <= tiles.w_rows <= 64 * tiles.warpgroups and tiles.stage_bytes % 1024 == 0
    assert tiles.width % (16 if ending.is_weighted else 8) == 0
    is_large = num_rows > 64 and n * k > 1 << 22
    padded = -(-num_rows // tiles.rows) * tiles.rows
    assert not is_large or padded < num_rows + 16, "power is short there, and few rows are multiplied for nothing"
    assert not ending.head_dim or (tiles.width % 128 == 0 and n % tiles.width == 0)


FORMS = [Numbers(8), Numbers(8, 128), Numbers(4, 128), Numbers(4, 32, has_zeros=True)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 33, MOST_PACKED_ROWS])
def test_packed_numbers_have_stages_and_registers_in_every_projection(num_rows: int, form: Numbers) -> None:
    for n, k, ending in PROJECTIONS:
        tiles = StreamTiles.choose_packed(num_rows, n, k, ending, form, PROCESSORS, CLUSTERS.__getitem__)
        assert tiles is not None and tiles.fits(num_rows, n, k)
        assert tiles.rows >= num_rows and tiles.share == 0 and tiles.splits <= k // form.stage_k
        assert tiles.stages >= 2 and tiles.shared_bytes + 4 * tiles.rows + 16 * tiles.stages <= SHARED_BYTES
        assert tiles.stage_bytes % 1024 == 0 and tiles.width % (16 if ending.is_weighted else 8) == 0
        # The last warpgroup reads and converts 64 rows of W, whatever there are, within the program's memory.
        last_stage = (tiles.stages - 1) * tiles.stage_bytes
        assert last_stage + 128 * 64 * tiles.warpgroups <= tiles.shared_bytes - 1024
        assert not ending.head_dim or (tiles.width % 128 == 0 and n % tiles.width == 0)
        num_blocks = -(-k // form.stage_k // tiles.splits)
        has_stages = tiles.stages > 2 * tiles.teams or tiles.teams <= num_blocks == tiles.stages
        assert tiles.num_threads <= 1024 and (tiles.teams == 1 or has_stages), "a team holds two stages"
        assert num_rows > 1 or tiles.warpgroups * tiles.teams > 1, "four warps would convert too slowly"


def test_groups_that_a_stage_would_cut_are_not_streamed() -> None:
    assert Numbers(4, 128).suits(4096) and Numbers(4, 512).suits(4096) and Numbers(8).suits(4096)
    assert not Numbers(4, 128).suits(4096 + 128), "a stage has 256 numbers"
    assert not Numbers(4, 96).suits(3 * 4096), "which are no whole groups"
    assert not Numbers(4, 16).suits(4096), "nor are 16 columns of one chunk in two groups"


def test_tiles_have_registers_for_their_sums() -> None:
    gated = StreamTiles(96, 136, 1, 4, GATED)
    assert gated.warpgroups == 5 and gated.fits(96, 17_408, 5120)
    assert not replace(gated, rows=112).fits(112, 17_408, 5120)
    plain = StreamTiles(192, 192, 1, 4)
    assert plain.warpgroups == 3 and plain.fits(192, 4096, 4096)
    assert not replace(plain, rows=208).fits(208, 4096, 4096)


def test_the_instruction_takes_x_as_its_rows_where_those_of_w_are_no_whole_64s() -> None:
    shares = [
        (tiles.w_rows, tiles.share) for projection in PROJECTIONS if (tiles := choose(64, *projection)) is not None
    ]
    assert [pair for pair in shares if pair[1]] == [(80, 40), (272, 56), (80, 40)], "of 14B"
    few = choose(32, 17_408, 5120, GATED)
    assert few is not None and few.w_rows == 272 and few.share == 0, "32 rows of x would be half of 64"


def test_a_load_brings_no_more_than_256_rows_of_weights() -> None:
    widths = [tiles.width for n in range(1024, 32_768, 64) if (tiles := choose(64, n, 5120)) is not None]
    assert 64 < max(widths) <= 256


def test_what_others_do_as_fast_or_the_kernel_cannot_is_left_alone() -> None:
    assert choose(FEWEST_ROWS - 1, 4096, 4096) is None
    assert choose(MOST_PLAIN_ROWS, 4096, 4096) is not None
    assert choose(MOST_PLAIN_ROWS + 1, 4096, 4096) is None, "nothing is taken in"
    assert choose(MOST_ROWS, 4096, 4096, ONTO) is not None
    assert choose(MOST_ROWS + 1, 4096, 4096, ONTO) is None
    assert choose(MOST_ROWS_OF_LONG, 4096, 12_288, ONTO) is not None
    assert choose(MOST_ROWS + 1, 5120, 17_408, ONTO) is None, "108 programs do not fill the device"
    assert choose(MOST_ROWS + 1, 2560, 9728, ONTO) is None, "nor are weights read more than once"
    assert choose(MOST_ROWS_OF_FEW_WEIGHTS, 1024, 2048, ONTO) is not None
    assert choose(MOST_ROWS_OF_FEW_WEIGHTS + 1, 1024, 2048, ONTO) is None
    assert choose(16, 4096, 4096 + 32) is None, "the inner size is cut into 64"
    assert choose(16, 4096 + 32, 4096, ONTO) is None, "squares are of 64 columns"
    assert choose(16, 6144 + 64, 4096, HEADS) is None, "half a head would be left"
    assert choose(16, 6144, 4096, replace(HEADS, head_dim=256)) is None, "a warp holds no more than 128"
    assert choose(16, 151_936, 4096) is None, "a head has work for all processors as it is"
    assert choose(16, 384, 192) is None, "too small to have work for them"


@pytest.mark.full
def test_every_variant_for_these_models_compiles_for_hopper_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    others = [(3072, 2048, Ending(head_dim=64)), (6144, 4096, replace(HEADS, is_fp8=True))]
    pairs = product(BATCHES, [*PROJECTIONS, *others])
    chosen = {choose(num_rows, *projection) for num_rows, projection in pairs} - {None}

    def codes() -> list[bytes]:
        return [machine_code(tiles.source, tiles.constants, ARCHITECTURE) for tiles in chosen if tiles is not None]

    for (n, k, ending), merged in zip(PROJECTIONS[4:8], (3, 1, 2, 1), strict=True):
        for num_rows, rank in ((8, 64), (32, 16), (64, 16)):
            adapted = choose(num_rows, n, k, replace(ending, rank=rank, low=rank * merged))
            assert adapted is not None and adapted.added is not None
            assert adapted.added.is_ahead == (num_rows <= 32) and adapted.added.num_bytes < 47 << 10
            beside = adapted.added.num_bytes + 4 * adapted.rows + 16 * adapted.stages
            assert adapted.shared_bytes + beside <= SHARED_BYTES
            chosen.add(adapted)
    for form, (n, k, ending) in zip(FORMS, PROJECTIONS[4:8], strict=True):
        chosen.add(StreamTiles.choose_packed(40, n, k, ending, form, PROCESSORS, CLUSTERS.__getitem__))
    rounded = choose(128, 4096, 12288 // 2, ONTO)
    assert rounded is not None
    chosen.add(replace(rounded, form=ROUNDED))
    compiled = codes()
    assert all(code.startswith(b"\x7fELF") for code in compiled)
    assert all(reads_under_way_at_arrivals(instructions_of(code, tmp_path)) == [] for code in compiled)
    assert len(list((tmp_path / "kernels").glob("*.cubin"))) == len(chosen)
    monkeypatch.setattr(cuda_source, "compile_source", None)
    assert codes() == compiled


def test_the_batches_that_are_precompiled_need_all_variants_that_graphs_do() -> None:
    def variants(sizes: Iterable[int]) -> set[StreamTiles | None]:
        return {choose(size, *projection) for size in sizes for projection in PROJECTIONS}

    assert variants(graph_sizes(256)) == variants(BATCHES) | {None}


def test_what_does_not_compile_is_said_with_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)cannot be compiled.*expected a"):
        compile_source("int main(", {"ROWS": 16}, ARCHITECTURE)
