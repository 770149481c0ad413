"""Streamed products that take in what LoRA adapters add, at the sizes of real models, against PyTorch in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.kernels.elementwise.silu_and_mul import silu_and_mul
from srt.kernels.gemm.stream_arguments import Added
from srt.kernels.gemm.stream_gemm import PLAIN, Ending, Heads, StreamGemm, StreamTiles, Weighted
from srt.kernels.lora.products import AdapterTokens, StackedAdapters, expand, expand_gated, shrink
from srt.kernels.lora.shared_shrink import SharedShrink
from srt.layers.ops import Rotation, rotate
from tests.gpu.test_kernels_at_real_sizes import CUDA, EPS, among_others, assert_near, normed, randn

pytestmark = pytest.mark.gpu

ADAPTERS = 8
ROWS = [2, 5, 16, 17, 24, 32, 33, 64]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


class Layer:
    """A weight with adapters, rows that have some of them or none, and what their products should be."""

    def __init__(self, num_rows: int, num_inputs: int, part_sizes: tuple[int, ...], rank: int = 16) -> None:
        self.weight = randn(sum(part_sizes), num_inputs) * num_inputs**-0.5
        down = randn(ADAPTERS, rank * len(part_sizes), num_inputs) * num_inputs**-0.5
        self._stacked = StackedAdapters(down, randn(ADAPTERS, sum(part_sizes), rank) / 4, part_sizes)
        self._numbers = torch.randint(ADAPTERS + 1, (num_rows,), device=CUDA, dtype=torch.int32)
        self._numbers[0], self._numbers[1] = ADAPTERS, 3
        self._tokens = AdapterTokens.sort(self._numbers, ADAPTERS, has_shared_shrink=True)

    def ending(self, ending: Ending) -> Ending:
        return replace(ending, rank=self._stacked.rank, low=self._stacked.down.shape[1])

    def added(self, x: Tensor) -> Added:
        first, *rest = self._stacked.part_sizes
        low = shrink(x, self._stacked, self._tokens)
        return Added(low, self._stacked.up, self._numbers, (first, first + sum(rest[:1])))

    @property
    def without_adapter(self) -> Tensor:
        return self._numbers == ADAPTERS

    def after_linear(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight.T
        expand(shrink(x, self._stacked, self._tokens), self._stacked, self._tokens, y)
        return y

    def activated(self, x: Tensor) -> Tensor:
        return expand_gated(shrink(x, self._stacked, self._tokens), self._stacked, self._tokens, x @ self.weight.T)

    def expected(self, x: Tensor) -> Tensor:
        y: Tensor = x.float() @ self.weight.float().T
        rank = self._stacked.rank
        for row, number in enumerate(self._numbers.tolist()):
            if number == ADAPTERS:
                continue
            low = self._stacked.down[number].float() @ x[row].float()
            lows = low.split(rank)
            ups = self._stacked.up[number].float().split(self._stacked.part_sizes)
            y[row] += torch.cat([up @ one for up, one in zip(ups, lows, strict=True)])
        return y


def tiles_of(gemm: StreamGemm, x: Tensor, layer: Layer, ending: Ending) -> StreamTiles:
    tiles = gemm.tiles(x, layer.weight, layer.ending(ending))
    assert tiles is not None
    return tiles


def scaled(x: Tensor) -> tuple[Weighted, Tensor]:
    """The rows as the product before leaves them, and what they stand for."""
    weight = randn(x.shape[1])
    squares = x.float().square().unflatten(1, (-1, 64)).sum(2).T.contiguous()
    return Weighted(x * weight, squares, weight, EPS), normed(x, weight)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("hidden_size", "inner_size", "rank"), [(1024, 3072, 16), (4096, 12288, 16), (4096, 12288, 32)]
)
def test_what_adapters_add_is_in_gates_and_in_sums(num_rows: int, hidden_size: int, inner_size: int, rank: int) -> None:
    gemm = StreamGemm(CUDA)
    x = among_others(randn(num_rows, hidden_size))
    gate_up, down = (
        Layer(num_rows, hidden_size, (inner_size, inner_size), rank),
        Layer(num_rows, inner_size, (hidden_size,), rank),
    )
    gate, up = gate_up.expected(x).chunk(2, dim=-1)
    tiles = tiles_of(gemm, x, gate_up, Ending(is_gated=True))
    activated = gemm.multiply(x, gate_up.weight, tiles, added=gate_up.added(x))
    assert_near(activated, F.silu(gate) * up)
    again = gemm.multiply(x, gate_up.weight, tiles, added=gate_up.added(x))
    assert torch.equal(again, activated)

    weighted, rows = scaled(x)
    gate, up = gate_up.expected(rows).chunk(2, dim=-1)
    tiles = tiles_of(gemm, x, gate_up, Ending(is_gated=True, is_scaled=True))
    assert_near(gemm.multiply(weighted, gate_up.weight, tiles, added=gate_up.added(weighted.values)), F.silu(gate) * up)

    residual, norm_weight = randn(num_rows, hidden_size), randn(hidden_size)
    tiles = tiles_of(gemm, activated, down, Ending(has_residual=True, is_weighted=True))
    where = residual, norm_weight, EPS, down.added(activated)
    product, follows = gemm.multiply_weighted(activated, down.weight, tiles, *where)
    assert_near(product, residual.float() + down.expected(activated))
    assert_near(follows.values, product.float() * norm_weight.float())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_what_adapters_add_is_in_heads(num_rows: int, is_scaled: bool) -> None:
    gemm, num_locations, heads, kv_heads, head_dim = StreamGemm(CUDA), 1000, 32, 8, 128
    x = among_others(randn(num_rows, 4096))
    layer = Layer(num_rows, 4096, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
    angles = torch.rand(num_rows, 1, head_dim // 2, device=CUDA) * 6
    rotation, weights = Rotation(angles.cos(), angles.sin()), (randn(head_dim), randn(head_dim))
    pools = [randn(num_locations, kv_heads, head_dim) for _ in range(2)]
    locations = torch.randperm(num_locations, device=CUDA)[:num_rows]
    weighted, rows = scaled(x)
    if not is_scaled:
        rows = x.float()
    multiplied: Tensor | Weighted = weighted if is_scaled else x
    tiles = tiles_of(gemm, x, layer, Ending(is_scaled=is_scaled, head_dim=head_dim, has_head_norm=True))
    where = Heads(heads * head_dim, weights, EPS, rotation.cos, rotation.sin, locations, pools[0], pools[1], 1.0, 1.0)
    added = layer.added(weighted.values if is_scaled else x)
    queries = gemm.multiply_heads(multiplied, layer.weight, tiles, where, added)
    packed = layer.expected(rows).unflatten(1, (-1, head_dim))
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=1)
    assert_near(queries, rotate(normed(q, weights[0]), rotation).flatten(1))
    assert_near(pools[0][locations], rotate(normed(k, weights[1]), rotation))
    assert_near(pools[1][locations], v)


@pytest.mark.parametrize("num_rows", [2, 32])
def test_what_adapters_add_is_in_plain_products_of_merged_layers(num_rows: int) -> None:
    gemm, x = StreamGemm(CUDA), among_others(randn(num_rows, 4096))
    layer = Layer(num_rows, 4096, (4096, 1024, 1024))
    tiles = tiles_of(gemm, x, layer, PLAIN)
    assert_near(gemm.multiply(x, layer.weight, tiles, added=layer.added(x)), layer.expected(x))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 28, 32])
@pytest.mark.parametrize("num_adapters", [1, 3, 64])
@pytest.mark.parametrize(("num_inputs", "num_parts", "rank"), [(4096, 3, 16), (12288, 1, 16), (1024, 2, 64)])
def test_rows_of_an_adapter_share_its_first_matrix(
    num_rows: int, num_adapters: int, num_inputs: int, num_parts: int, rank: int
) -> None:
    """Adapters lie apart in memory, and rows may be part of longer ones. Few adapters have more than 8 rows."""
    x, low = among_others(randn(num_rows, num_inputs)), num_parts * rank
    down = randn(num_adapters, low * num_inputs + 64)[:, : low * num_inputs].unflatten(1, (low, num_inputs))
    numbers = torch.randint(num_adapters + 1, (num_rows,), device=CUDA, dtype=torch.int32)
    variant = SharedShrink.choose(low, num_inputs)
    assert variant is not None
    got = variant.multiply(x, down, numbers)
    is_adapted = numbers < num_adapters
    own = down[numbers[is_adapted].long()].float()
    expected = torch.einsum("tlk,tk->tl", own, x[is_adapted].float())
    torch.testing.assert_close(got.sum(0)[is_adapted], expected, rtol=1e-3, atol=1e-3 * num_inputs**0.5)
    again = variant.multiply(x, down, numbers)
    assert torch.equal(again[:, is_adapted], got[:, is_adapted])
    none = torch.full_like(numbers, num_adapters)
    variant.multiply(x, down, none)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("num_rows", "rank"), [(40, 16), (300, 16), (1100, 16), (300, 128)])
def test_tiles_of_prompts_get_what_adapters_add(num_rows: int, rank: int) -> None:
    """Heads, and gates and ups, which go on to their activation."""
    x = randn(num_rows, 4096)
    heads, gate_up = Layer(num_rows, 4096, (4096, 1024, 1024), rank), Layer(num_rows, 4096, (3000, 3000), rank)
    assert_near(heads.after_linear(x), heads.expected(x))
    gate, up = gate_up.expected(x).chunk(2, dim=-1)
    activated = gate_up.activated(x)
    assert_near(activated, F.silu(gate) * up, 1e-2)
    plain = silu_and_mul(x @ gate_up.weight.T)
    assert torch.equal(activated[gate_up.without_adapter], plain[gate_up.without_adapter])
