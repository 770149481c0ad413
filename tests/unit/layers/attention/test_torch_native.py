"""The plain PyTorch backend against dense attention in float64, over memory that is NaN wherever nothing was written."""

from __future__ import annotations

import pytest
import torch

from srt.layers.attention import torch_native
from srt.layers.attention.torch_native import TorchNativeBackend
from tests.unit.layers.attention.attention_world import AttentionWorld


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("head_dim", [6, 16, 80])
@pytest.mark.parametrize(("group", "page_size"), [(1, 1), (2, 16), (4, 1), (5, 7)])
def test_requests_grow_through_every_kind_of_step(
    group: int, page_size: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    world = AttentionWorld(TorchNativeBackend(), 2 * group, 2, head_dim, page_size, dtype)
    errors = [
        world.step(extends=[(3, 15), (0, 1), (5, 150)], decodes=[]),
        world.step(extends=[(1, 1), (2, 1)], decodes=[]),
        world.step(extends=[(3, 2), (6, 16), (1, 1)], decodes=[5, 0]),
        world.step(extends=[], decodes=[6, 3, 0, 5]),
        world.step(extends=[(0, 100), (5, 1)], decodes=[3]),
        world.step(extends=[], decodes=[5]),
        world.step(extends=[], decodes=[0, 6]),
    ]
    assert max(errors) <= tolerance


def test_a_long_chunk_behind_a_prefix_is_masked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "MASKED_QUERIES", 16)
    world = AttentionWorld(TorchNativeBackend(), 4, 2, 16, 16, torch.float32)
    world.step(extends=[(0, 33), (1, 1)], decodes=[])
    assert world.step(extends=[(0, 75), (2, 40)], decodes=[1]) <= 2e-6


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    world = AttentionWorld(backend := TorchNativeBackend(), 4, 2, 16, 16, torch.float32)
    world.step(extends=[(0, 190), (1, 5), (2, 60), (3, 100)], decodes=[])
    assert world.step(extends=[], decodes=[0, 1, 2, 3]) <= 2e-6
    assert [(g.num_rows, g.length) for g in backend._decodes[None]] == [(2, 61), (1, 101), (1, 191)]


@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_a_window_hides_all_but_the_last_positions(window: int) -> None:
    world = AttentionWorld(TorchNativeBackend(), 4, 2, 16, 16, torch.float32, window=window)
    errors = [
        world.step(extends=[(0, 33), (1, 1), (2, 90)], decodes=[]),
        world.step(extends=[(0, 75), (3, 40)], decodes=[1, 2]),
        world.step(extends=[(3, 1)], decodes=[0, 1, 2]),
        world.step(extends=[], decodes=[0, 3, 1]),
    ]
    assert max(errors) <= 2e-6


@pytest.mark.parametrize("window", [None, 20])
def test_a_cap_bends_the_scores(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "MASKED_QUERIES", 16)
    world = AttentionWorld(TorchNativeBackend(), 4, 2, 16, 16, torch.float32, window=window, softcap=0.7)
    errors = [
        world.step(extends=[(0, 33), (1, 1), (2, 90)], decodes=[]),
        world.step(extends=[(0, 75), (3, 40)], decodes=[1, 2]),
        world.step(extends=[(3, 1)], decodes=[0, 1, 2]),
    ]
    assert max(errors) <= 2e-6


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share_of_the_weights(window: int | None) -> None:
    world = AttentionWorld(TorchNativeBackend(), 4, 2, 16, 16, torch.float32, window=window, has_sinks=True)
    errors = [
        world.step(extends=[(0, 33), (1, 1), (2, 90)], decodes=[]),
        world.step(extends=[(0, 75), (3, 40)], decodes=[1, 2]),
        world.step(extends=[], decodes=[0, 1, 2]),
    ]
    assert max(errors) <= 2e-6


def test_a_memory_of_fp8_costs_no_more_than_its_rounding() -> None:
    world = AttentionWorld(TorchNativeBackend(), 4, 2, 16, 16, torch.float32, kv_dtype=torch.float8_e4m3fn)
    errors = [world.step([(0, 33), (1, 1)], []), world.step([(0, 5)], [1]), world.step([], [0, 1])]
    assert 1e-3 <= max(errors) <= 0.15
