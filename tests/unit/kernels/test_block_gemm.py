"""How products of blocks are cut, and that their kernel compiles, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.gemm.block_gemm import BlockTiles, suits

PROCESSORS = 132  # of an H200
SHARED_BYTES = 227 * 1024
PRODUCTS = [(6144, False), (4096, False), (12288, True), (2560, False)]


@pytest.mark.parametrize("num_rows", [65, 128, 200, 256, 300, 8192])
@pytest.mark.parametrize(("n", "is_gated"), PRODUCTS)
def test_tiles_fit_a_processor(n: int, is_gated: bool, num_rows: int) -> None:
    tiles = BlockTiles.choose(num_rows, n, is_gated, PROCESSORS)
    assert tiles.stages >= 3 and tiles.shared_bytes <= SHARED_BYTES - 1024
    # Sums, the products of a block, and 40 registers for each of 256 threads beside them
    assert tiles.rows * tiles.w_rows + 128 * tiles.w_rows + 40 * 256 + 40 * 128 <= 65_536
    assert tiles.width <= 128


def test_prompts_of_any_length_are_cut_in_one_way() -> None:
    assert len({BlockTiles.choose(num_rows, 4096, False, PROCESSORS) for num_rows in range(257, 8193, 97)}) == 1


@pytest.mark.parametrize("num_rows", [65, 128, 256])
@pytest.mark.parametrize("n", [4096, 6144])
def test_products_of_few_columns_run_at_once_and_on_most_processors(n: int, num_rows: int) -> None:
    tiles = BlockTiles.choose(num_rows, n, False, PROCESSORS)
    num_tiles = -(-num_rows // tiles.rows) * -(-n // tiles.width)
    assert 64 <= num_tiles <= PROCESSORS


def test_without_a_gpu_no_weight_suits() -> None:
    assert not suits(torch.zeros(128, 128, dtype=torch.uint8), torch.ones(1, 128))


@pytest.mark.parametrize("is_gated", [False, True])
def test_it_compiles_for_hopper(is_gated: bool) -> None:
    for tiles in BlockTiles.every(is_gated):
        assert compile_source(tiles.source, tiles.constants, ARCHITECTURE).startswith(b"\x7fELF")
