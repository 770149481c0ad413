"""The kernels of quantised weights in Triton's interpreter, against the plain path of the weights in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from srt.kernels.gemm.fp8_gemm import quantise_rows
from srt.kernels.gemm.gemv import GemvTiles, gemv
from srt.kernels.gemm.packed_gemm import PackedTiles, dequantise, packed_gemm
from srt.layers.quantization.fp8_weight import token_scales
from srt.layers.quantization.gpu_products import MOST_TILED_ROWS_OF_4_BITS, PackedProduct
from srt.layers.quantization.int_weight import order_operands, pack_halves


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def assert_near(got: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < most, float(error)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [128, 320])
def test_weights_of_e4m3_numbers_are_multiplied_exactly(group: int, splits: int) -> None:
    """All 254 finite numbers occur, the smallest ones included."""
    n, k = 72, 320
    bits = torch.arange(n * k).remainder(127) + 128 * torch.randint(2, (n * k,))
    weight = bits.to(torch.uint8).view(torch.float8_e4m3fn).view(n, k)
    scales = torch.rand(-(-k // group), n) + 0.5
    x, bias, residual = torch.randn(5, k), torch.randn(n), torch.randn(5, n)
    spread = scales.t().repeat_interleave(group, dim=1)[:, :k]
    expected = x @ (weight.float() * spread).T
    tiles = PackedTiles(16, 64, splits)
    assert_near(packed_gemm(x, weight, scales, None, group, tiles=tiles), expected)
    many = x.repeat(5, 1)  # of which a tile has 16
    assert_near(packed_gemm(many, weight, scales, None, group, tiles=tiles), expected.repeat(5, 1))
    added = packed_gemm(x, weight, scales, None, group, bias=bias, residual=residual, tiles=tiles)
    assert_near(added, expected + bias + residual)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("group", "splits"), [(32, 1), (64, 2), (192, 3)])
def test_weights_of_four_bits_are_multiplied_exactly(group: int, splits: int, has_zeros: bool) -> None:
    n, k = 40, 192
    numbers = torch.randint(16, (n, k), dtype=torch.uint8)
    scales = torch.rand(k // group, n) + 0.5
    zeros = torch.randint(1, 17, (k // group, n), dtype=torch.int16) if has_zeros else None
    spread = (torch.full_like(scales, 8) if zeros is None else zeros.float()).t().repeat_interleave(group, dim=1)
    weight = (numbers - spread) * scales.t().repeat_interleave(group, dim=1)
    x = torch.randn(7, k)
    tiles, packed = PackedTiles(16, group & -group, splits), order_operands(pack_halves(numbers))
    assert_near(packed_gemm(x, packed, scales, zeros, group, tiles=tiles), x @ weight.T)
    assert torch.equal(dequantise(packed, scales, zeros, group, torch.float32), weight)


def test_more_rows_are_multiplied_with_a_matrix_that_is_made_once() -> None:
    """With 4 bits from 129 rows on; e4m3 numbers are still multiplied as they are."""
    n, k, most = 32, 64, MOST_TILED_ROWS_OF_4_BITS
    numbers, scales = torch.randint(16, (n, k), dtype=torch.uint8), (torch.rand(2, n) + 0.5).bfloat16()
    product = PackedProduct(order_operands(pack_halves(numbers)), scales, None, 32)
    weight = (numbers.float() - 8) * scales.float().t().repeat_interleave(32, dim=1)
    assert torch.equal(product.dequantised(torch.float32), weight)
    x = torch.randn(most + 1, k).bfloat16()
    few = product(x[:most], None)
    assert few is not None and product(x, None) is None
    assert_near(few, x[:most].float() @ weight.T, 1e-2)
    e4m3 = torch.randn(n, k).to(torch.float8_e4m3fn)
    assert PackedProduct(e4m3, torch.ones(1, n), None, k)(x, None) is not None


def test_one_row_of_e4m3_numbers_is_scaled_before_the_activation() -> None:
    numbers = torch.randn(2 * 24, 96).to(torch.float8_e4m3fn)
    scales, x = torch.rand(1, 48) + 0.5, torch.randn(1, 96)
    tiles = GemvTiles(block_n=8, block_k=64, num_warps=4)
    got, _ = gemv(x, numbers, tiles, scales=scales, is_gated=True)
    gate, up = (x @ (numbers.float() * scales.t()).T).chunk(2, dim=-1)
    assert_near(got, torch.nn.functional.silu(gate) * up)


def test_inputs_are_quantised_by_token_by_group_and_by_a_given_scale() -> None:
    """The interpreter cuts off what a GPU rounds, so the numbers are near rather than equal."""
    x = torch.randn(6, 300)
    x[2] = 0
    numbers, scales = quantise_rows(x)
    torch.testing.assert_close(scales, token_scales(x))
    assert_near(numbers.float() * scales, x, 0.08)
    numbers, scales = quantise_rows(x, has_groups=True)
    padded = torch.nn.functional.pad(x, (0, 84)).view(6, 3, 128)
    torch.testing.assert_close(scales, token_scales(padded).view(6, 3))
    assert_near(numbers.float() * scales.repeat_interleave(128, dim=1)[:, :300], x, 0.08)
    fixed = torch.tensor([0.01])
    numbers, scales = quantise_rows(x, scale=fixed)
    assert torch.equal(scales, torch.full((6, 1), 0.01))
    assert_near(numbers.float() * 0.01, x, 0.08)
