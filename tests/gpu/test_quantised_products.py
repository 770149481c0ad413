"""The kernels of quantised weights at the sizes of Qwen3-8B, against float32 in PyTorch; wrong ones would be noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from srt.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from srt.kernels.gemm.block_gemm import BlockTiles, block_gemm, suits
from srt.kernels.gemm.fp8_gemm import multiply_rounded, norm_and_quantise, quantise_rows
from srt.kernels.gemm.gated_gemm import GatedGemm
from srt.kernels.gemm.gemv import GemvTiles, gemv
from srt.kernels.gemm.packed_gemm import MOST_ROWS, PackedTiles, packed_gemm
from srt.kernels.gemm.packed_matrix import E4M3, Numbers, PackedMatrix
from srt.kernels.gemm.stream_gemm import MOST_PACKED_ROWS, PLAIN, Ending, Heads, StreamGemm
from srt.layers.quantization import fp8_weight
from srt.layers.quantization.fp8_weight import rounded_groups
from srt.layers.quantization.gpu_products import MOST_TILED_ROWS_OF_4_BITS, PackedProduct
from srt.layers.quantization.int8_weight import Int8Weight, quantise_tokens
from srt.layers.quantization.int_weight import order_operands, pack_halves
from srt.layers.quantization.weight import Place
from srt.utils.quantization import WeightFormat

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = [(6144, 4096), (4096, 12288), (24576, 4096), (1000, 320)]
MOST = 5e-3


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def fp8_weight_of(n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales [groups, n], the float32 matrix that they stand for)."""
    numbers = (torch.randn(n, k, device=CUDA) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-k // group), n, device=CUDA) + 0.5) * (0.01 * k**-0.5)
    return numbers, scales, numbers.float() * scales.t().repeat_interleave(group, dim=1)[:, :k]


@pytest.mark.parametrize("num_rows", [1, 2, 16, 33, 64, 65, 500])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_few_rows_are_multiplied_by_what_the_numbers_stand_for(n: int, k: int, num_rows: int) -> None:
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    for group in (k, 128):
        numbers, scales, matrix = fp8_weight_of(n, k, group)
        product = PackedProduct(numbers, scales, None, group)
        got = product(x, bias)
        assert got is not None
        assert error_of(got, x.float() @ matrix.T + bias.float()) < MOST
        again = product(x, bias)
        assert again is not None and torch.equal(again, got)
    bits = torch.randint(16, (n, k), device=CUDA, dtype=torch.uint8)
    for group, has_zeros in ((64, True), (64, False), (k, False)):
        scales = ((torch.rand(k // group, n, device=CUDA) + 0.5) * k**-0.5).bfloat16()
        zeros = torch.randint(1, 17, scales.shape, device=CUDA, dtype=torch.int16) if has_zeros else None
        spread = (torch.full_like(scales, 8) if zeros is None else zeros.to(scales.dtype)).t()
        matrix = bits - spread.float().repeat_interleave(group, dim=1)
        matrix *= scales.t().float().repeat_interleave(group, dim=1)
        product = PackedProduct(order_operands(pack_halves(bits)), scales, zeros, group)
        got = product(x, None)
        assert (got is None) == (num_rows > MOST_TILED_ROWS_OF_4_BITS), "more rows are left to the plain path"
        assert got is None or error_of(got, x.float() @ matrix.T) < MOST
        assert torch.equal(product.dequantised(torch.float32), matrix)
        assert torch.equal(product.dequantised(torch.bfloat16), matrix.bfloat16())


def test_every_e4m3_number_is_converted_exactly() -> None:
    """A product with rows of an identity shows each weight by itself."""
    bits = torch.arange(256, device=CUDA, dtype=torch.uint8)
    bits[[127, 255]] = 0  # not numbers
    weight = bits.view(torch.float8_e4m3fn).view(2, 128).repeat(32, 1)
    ones = torch.ones(1, 64, device=CUDA)
    for first in (0, 64):
        x = torch.eye(128, device=CUDA, dtype=torch.bfloat16)[first : first + 64]
        got = packed_gemm(x, weight, ones, None, 128, tiles=PackedTiles(64, 128, 1))
        assert torch.equal(got.float(), weight.float()[:, first : first + 64].t())


@pytest.mark.parametrize("num_rows", [2, 16, 65, 100, 256, 2048])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_many_rows_are_multiplied_as_the_plain_path_does(n: int, k: int, num_rows: int) -> None:
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    for group in (k, 128):
        numbers, scales, matrix = fp8_weight_of(n, k, group)
        got = PackedProduct(numbers, scales, None, group, quantises_inputs=True)(x, bias)
        if num_rows <= MOST_ROWS and (group < k or n % 16 or k % 16):
            assert got is not None and error_of(got, x.float() @ matrix.T + bias.float()) < MOST, "inputs as they are"
            continue
        if group == k and (n % 16 or k % 16):
            assert got is None, "left to the plain path"
            continue
        assert got is not None
        if group == k:
            rounded, row_scales = fp8_weight.quantise_rows(x)
            inputs = rounded.float() * row_scales
        else:
            inputs = rounded_groups(x.float())
        assert error_of(got, inputs @ matrix.T + bias.float()) < 2 * MOST


def block_weight_of(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales [groups, n] of blocks of 128 × 128, the float32 matrix that they stand for)."""
    numbers, scales, _ = fp8_weight_of(n, k, 128)
    scales = scales[:, ::128].repeat_interleave(128, dim=1)[:, :n].contiguous()
    return numbers, scales, numbers.float() * scales.t().repeat_interleave(128, dim=1)


@pytest.mark.parametrize("num_rows", [65, 100, 128, 200, 256, 300, 2048])
@pytest.mark.parametrize(("n", "k"), [*SHAPES[:3], (640, 384), (1024, 128)])
def test_blocks_are_multiplied_by_inputs_rounded_by_128(n: int, k: int, num_rows: int) -> None:
    numbers, scales, matrix = block_weight_of(n, k)
    assert suits(numbers, scales)
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    expected = rounded_groups(x.float()) @ matrix.T
    got = block_gemm(x, numbers, scales)
    assert error_of(got, expected) < MOST
    gate, up = (10 * expected).chunk(2, dim=-1)
    activated = block_gemm(x, numbers, 10 * scales, is_gated=True)
    assert error_of(activated, torch.nn.functional.silu(gate) * up) < 2 * MOST
    for _ in range(5):
        assert torch.equal(block_gemm(x, numbers, scales), got)
        assert torch.equal(block_gemm(x, numbers, 10 * scales, is_gated=True), activated)
    assert error_of(block_gemm(x, numbers, scales.roll(128, dims=1)), expected) > 0.05, "scales of other outputs"


@pytest.mark.parametrize("is_gated", [False, True])
def test_blocks_are_cut_in_any_way(is_gated: bool) -> None:
    (numbers, scales, matrix), x = (
        block_weight_of(2560, 1152),
        torch.randn(200, 1152, device=CUDA, dtype=torch.bfloat16),
    )
    expected = rounded_groups(x.float()) @ matrix.T
    if is_gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    for tiles in BlockTiles.every(is_gated):
        assert error_of(block_gemm(x, numbers, scales, is_gated, tiles), expected) < 2 * MOST, tiles


def test_scales_that_differ_within_64_outputs_are_left_to_another_kernel() -> None:
    numbers, scales, _ = fp8_weight_of(256, 256, 128)
    assert not suits(numbers, scales)


def packed_matrix_of(n: int, k: int, form: Numbers) -> tuple[PackedMatrix, Tensor]:
    """(random numbers, the float32 matrix that they stand for)."""
    if form.bits == 8:
        numbers, scales, matrix = fp8_weight_of(n, k, form.group or k)
        return PackedMatrix(numbers, scales, None, form.group), matrix
    bits = torch.randint(16, (n, k), device=CUDA, dtype=torch.uint8)
    scales = ((torch.rand(k // form.group, n, device=CUDA) + 0.5) * (0.2 * k**-0.5)).bfloat16()
    zeros = torch.randint(1, 17, scales.shape, device=CUDA, dtype=torch.int16) if form.has_zeros else None
    middle = torch.full_like(scales, 8) if zeros is None else zeros.to(scales.dtype)
    matrix = bits - middle.t().float().repeat_interleave(form.group, dim=1)
    matrix *= scales.t().float().repeat_interleave(form.group, dim=1)
    return PackedMatrix(order_operands(pack_halves(bits)), scales, zeros, form.group), matrix


FORMS = [Numbers(8), Numbers(8, 128), Numbers(4, 128), Numbers(4, 128, True), Numbers(4, 32, True), Numbers(4, 1024)]
STREAMED = [(1024, 3072), (4096, 12288)]


@pytest.mark.parametrize("num_rows", [1, 16, 33, MOST_PACKED_ROWS])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), STREAMED)
def test_streamed_numbers_give_what_they_stand_for(hidden: int, inner: int, form: Numbers, num_rows: int) -> None:
    """Down with the residual, then gates and ups of the norm that the product before has begun."""
    gemm = StreamGemm(CUDA)
    if num_rows == 1 and form == E4M3:
        num_rows = 2  # one is for gemv
    x, residual, norm = (
        torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
        for shape in ((num_rows, inner), (num_rows, hidden), (hidden,))
    )
    down, matrix = packed_matrix_of(hidden, inner, form)
    expected = x.float() @ matrix.T
    tiles = gemm.tiles(x, down, PLAIN)
    assert tiles is not None
    assert error_of(gemm.multiply(x, down, tiles), expected) < MOST
    tiles = gemm.tiles(x, down, Ending(has_residual=True, is_weighted=True))
    assert tiles is not None
    product, weighted = gemm.multiply_weighted(x, down, tiles, residual, norm, 1e-6)
    assert error_of(product, residual.float() + expected) < MOST
    gate_up, matrix = packed_matrix_of(2 * inner, hidden, form)
    normed = torch.nn.functional.rms_norm(product.float(), (hidden,), norm.float(), 1e-6)
    gate, up = (normed @ matrix.T).chunk(2, dim=-1)
    tiles = gemm.tiles(product, gate_up, Ending(is_gated=True, is_scaled=True))
    assert tiles is not None
    activated = gemm.multiply(weighted, gate_up, tiles)
    assert error_of(activated, torch.nn.functional.silu(gate) * up) < 2 * MOST
    assert all(torch.equal(gemm.multiply(weighted, gate_up, tiles), activated) for _ in range(5))


@pytest.mark.parametrize("num_rows", [2, 17, 64, 65, 128, 176, 256])
@pytest.mark.parametrize(("hidden", "inner"), [*STREAMED, (5120, 17408)])
def test_rows_rounded_to_e4m3_are_streamed(hidden: int, inner: int, num_rows: int) -> None:
    """Down with the residual, then gates and ups, whose inputs are rounded before the factors of the norm are known."""
    stream, gated = StreamGemm(CUDA), GatedGemm(CUDA)
    x, residual, norm = (
        torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
        for shape in ((num_rows, inner), (num_rows, hidden), (hidden,))
    )
    down, matrix = packed_matrix_of(hidden, inner, Numbers(8))
    tiles = stream.tiles(x, replace(down, rounds_inputs=True), Ending(has_residual=True, is_weighted=True))
    if tiles is None:
        assert num_rows > 176 and hidden == 5120, "whose programs do not fill the device"
        return
    assert tiles.form.is_rounded
    product, weighted = stream.multiply_weighted(x, down, tiles, residual, norm, 1e-6)
    numbers, scales = quantise_rows(x)
    assert error_of(product, residual.float() + (numbers.float() * scales) @ matrix.T) < MOST
    gate_up, matrix = packed_matrix_of(2 * inner, hidden, Numbers(8))
    numbers, scales = quantise_rows(weighted.values)
    factor = torch.rsqrt(product.float().square().mean(1, keepdim=True) + 1e-6)
    gate, up = (factor * (numbers.float() * scales) @ matrix.T).chunk(2, dim=-1)
    packed = replace(gate_up, rounds_inputs=True)
    few = stream.tiles(product, packed, Ending(is_gated=True, is_scaled=True))
    many = None if few is not None else gated.tiles(product, packed)
    assert few is not None or many is not None

    def multiplied() -> Tensor:
        if few is not None:
            return stream.multiply(weighted, packed, few)
        assert many is not None
        return gated.multiply(weighted, packed, many)

    activated = multiplied()
    assert error_of(activated, torch.nn.functional.silu(gate) * up) < 2 * MOST
    assert all(torch.equal(multiplied(), activated) for _ in range(5))


@pytest.mark.parametrize("num_rows", [2, 16, MOST_PACKED_ROWS])
@pytest.mark.parametrize("form", FORMS[:4], ids=str)
def test_heads_of_streamed_numbers_are_those_of_their_matrix(form: Numbers, num_rows: int) -> None:
    gemm, hidden, heads, kv_heads = StreamGemm(CUDA), 4096, 32, 8
    weight, matrix = packed_matrix_of((heads + 2 * kv_heads) * 128, hidden, form)
    x = torch.randn(max(2, num_rows), hidden, device=CUDA, dtype=torch.bfloat16)
    angles = torch.rand(len(x), 1, 64, device=CUDA) * 6
    norms = tuple(torch.randn(128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    found = []
    for stream, w in ((x[:num_rows], weight), (x, matrix.bfloat16())):
        pools = [torch.zeros(200, kv_heads, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
        rows = len(stream)
        tiles = gemm.tiles(stream, w, Ending(head_dim=128, has_head_norm=True))
        assert tiles is not None
        where = Heads(
            heads * 128, (norms[0], norms[1]), 1e-6, angles.cos()[:rows], angles.sin()[:rows],
            torch.arange(rows, device=CUDA) + 7, pools[0], pools[1], 1.0, 1.0,
        )  # fmt: skip
        queries = gemm.multiply_heads(stream, w, tiles, where)
        found.append((queries[:num_rows], *(pool[7 : 7 + num_rows] for pool in pools)))
    for got, expected in zip(*found, strict=True):
        assert error_of(got, expected) < 2 * MOST


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100, 2048])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_integers_of_eight_bits_are_multiplied_as_the_plain_path_does(n: int, k: int, num_rows: int) -> None:
    weight = Int8Weight(WeightFormat("int8", 8, "channel", activations="token"), n, k, [Place("x", n, k, 0, 0, n)])
    weight.values.data = torch.randint(-128, 128, (n, k), device=CUDA).to(torch.int8)
    weight.scales.data = (torch.rand(n, 1, device=CUDA) + 0.5) * (0.01 * k**-0.5)
    weight.finish()
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    x[0] = 0
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    numbers, scale = quantise_tokens(x)
    expected = (numbers.float() * scale) @ weight.dequantised(torch.float32).T + bias.float()
    assert error_of(weight.multiply(x, bias), expected) < MOST


def test_inputs_are_quantised_to_the_bit_as_the_plain_path_does() -> None:
    x = torch.randn(70, 12288, device=CUDA, dtype=torch.bfloat16)
    x[3] = 0
    numbers, scales = quantise_rows(x)
    expected, expected_scales = fp8_weight.quantise_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert (numbers.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.999, "all but halfway cases"
    numbers, scales = quantise_rows(x, has_groups=True)
    assert error_of(numbers.float() * scales.repeat_interleave(128, dim=1), rounded_groups(x.float())) < 1e-3


@pytest.mark.parametrize("size", [1024, 4096, 5120])
def test_a_norm_and_its_rounding_are_those_of_two_kernels(size: int) -> None:
    x, delta = (torch.randn(130, size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(size, device=CUDA, dtype=torch.bfloat16) + 0.5
    x[3] = delta[3] = 0
    for more in (None, delta):
        rounded, total = norm_and_quantise(x, more, weight, 1e-6)
        normed, hidden = (rms_norm(x, weight, 1e-6), x) if more is None else add_rms_norm(x, more, weight, 1e-6)
        numbers, scales = quantise_rows(normed)
        assert torch.equal(total, hidden) and torch.equal(rounded.scales, scales)
        assert torch.equal(rounded.numbers.view(torch.uint8), numbers.view(torch.uint8))
        of_w, w_scales, matrix = fp8_weight_of(64, size, size)
        product = multiply_rounded(rounded, of_w, w_scales, torch.bfloat16)
        assert error_of(product, (numbers.float() * scales) @ matrix.T) < 2 * MOST
        rounded, total = norm_and_quantise(x, more, weight, 1e-6, has_groups=True)
        numbers, scales = quantise_rows(normed, has_groups=True)
        assert torch.equal(total, hidden) and torch.equal(rounded.scales, scales)
        assert torch.equal(rounded.numbers.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_row_takes_in_norm_activation_and_residual(n: int, k: int) -> None:
    numbers, scales, matrix = fp8_weight_of(n, k, k)
    x, norm = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in ((1, k), (k,)))
    tiles = GemvTiles.choose(n, k, is_gated=False, item_bytes=1)
    residual = torch.randn(1, n, device=CUDA, dtype=torch.bfloat16)
    got, _ = gemv(x, numbers, tiles, scales=scales, residual=residual)
    assert error_of(got, x.float() @ matrix.T + residual.float()) < MOST
    tiles = GemvTiles.choose(n, k, is_gated=True, item_bytes=1)
    got, _ = gemv(x, numbers, tiles, scales=scales, norm_weight=norm, eps=1e-6, is_gated=True)
    normed = torch.nn.functional.rms_norm(x.float(), (k,), norm.float(), 1e-6)
    gate, up = (normed @ matrix.T).chunk(2, dim=-1)
    assert error_of(got, torch.nn.functional.silu(gate) * up) < MOST


def test_a_product_with_scales_of_other_outputs_would_be_noticed() -> None:
    numbers, scales, matrix = fp8_weight_of(4096, 4096, 128)
    x = torch.randn(4, 4096, device=CUDA, dtype=torch.bfloat16)
    expected = x.float() @ matrix.T
    assert error_of(packed_gemm(x, numbers, scales, None, 128), expected) < MOST
    assert error_of(packed_gemm(x, numbers, scales.roll(1, 1), None, 128), expected) > 10 * MOST
    assert error_of(packed_gemm(x, numbers, scales.roll(1, 0), None, 128), expected) > 10 * MOST
