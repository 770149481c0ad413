"""Streamed products that take in what LoRA adapters add, at the sizes of real models, against PyTorch in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from srt.kernels.gemm.stream_arguments import Added
from srt.kernels.gemm.stream_gemm import PLAIN, Ending, Heads, StreamGemm, StreamTiles, Weighted
from srt.kernels.lora import products
from srt.kernels.lora.products import AdapterTokens, StackedAdapters, shrink
from srt.layers import device_adapters
from srt.layers.device_adapters import DeviceAdapters
from srt.layers.ops import Rotation, rotate
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.executed_step import DecodeOutput
from srt.model_executor.step.step_planner import DecodeStep
from tests.gpu.test_kernels_at_real_sizes import CUDA, EPS, among_others, assert_near, normed, randn
from tests.support.adapter_cases import SPECS, load
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.random_adapter import write_adapter
from tests.support.runners import make_runner

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
        self._tokens = AdapterTokens.sort(self._numbers, ADAPTERS)

    def ending(self, ending: Ending) -> Ending:
        return replace(ending, rank=self._stacked.rank, low=self._stacked.down.shape[1])

    def added(self, x: Tensor) -> Added:
        first, *rest = self._stacked.part_sizes
        low = shrink(x, self._stacked, self._tokens)
        return Added(low, self._stacked.up, self._numbers, (first, first + sum(rest[:1])))

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


@pytest.mark.parametrize("num_rows", [5, 24])
def test_decodes_have_the_logits_that_separate_kernels_give_them(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Layers of Qwen3-0.6B's shape, rows with adapters for all layers and for some, and without."""
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    folder = checkpoint("qwen3", **shape, num_layers=2, tied=False)
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras_per_batch": 4,
        "disable_cuda_graph": True,
    }
    runner = make_runner(folder, 16, device=CUDA, dtype="bfloat16", **options)
    for name, spec in SPECS.items():
        write_adapter(tmp_path / name, folder, spec)
        load(runner, tmp_path, name)
    apart: list[int] = []  # rows of products whose adapters are added by another kernel
    expand = products.expand

    def noted(low: Tensor, stacked: StackedAdapters, tokens: AdapterTokens, y: Tensor) -> None:
        apart.append(len(y))
        expand(low, stacked, tokens, y)

    monkeypatch.setattr(device_adapters, "expand", noted)
    together = first_logits(runner, num_rows, apart)
    assert not apart
    with monkeypatch.context() as patch:
        patch.setattr(DeviceAdapters, "changed", lambda *_: None)
        separate = first_logits(runner, num_rows, apart)
    assert len(apart) == 2 * 4
    assert_near(together, separate, 0.02)


def first_logits(runner: ModelRunner, num_rows: int, apart: list[int]) -> Tensor:
    """The logits of the first decodes, behind prompts of more tokens than are taken together."""
    runner.reset()
    found: list[Tensor] = []
    forward, rng = runner.forward_decode, np.random.default_rng(0)

    def noted(step: DecodeStep) -> DecodeOutput:
        if not found:
            apart.clear()
        output = forward(step)
        found.append(output.logits.clone())
        return output

    runner.forward_decode = noted  # type: ignore[method-assign]
    names = ["", *SPECS]
    jobs = [Job(token_ids(rng, 40, 512), greedy(2), adapter=names[row % 4]) for row in range(num_rows)]
    PlanDriver(runner, 16).run(jobs)
    runner.forward_decode = forward  # type: ignore[method-assign]
    return found[0].float()
