"""The Triton backend in Triton's interpreter: requests that grow through extend, mixed and decode steps."""

from __future__ import annotations

import pytest
import torch

from srt.layers.attention.triton_backend import TritonAttentionBackend
from tests.unit.layers.attention.attention_world import AttentionWorld, spec_of

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_world(
    group: int = 2,
    page_size: int = 16,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionWorld:
    spec = spec_of(group, head_dim, page_size, dtype, window, softcap=softcap, has_sinks=has_sinks)
    backend = TritonAttentionBackend(spec, torch.device("cpu"))
    return AttentionWorld(
        backend, 2 * group, 2, head_dim, page_size, dtype, window=window, softcap=softcap, has_sinks=has_sinks
    )


@pytest.mark.parametrize(
    ("group", "page_size", "dtype"),
    [
        (1, 1, torch.float32),
        (1, 16, torch.float32),
        (5, 16, torch.float32),
        (4, 1, torch.float16),
        (2, 16, torch.float16),
        (4, 1, torch.bfloat16),
        (5, 16, torch.bfloat16),
    ],
)
def test_requests_grow_through_every_kind_of_step(group: int, page_size: int, dtype: torch.dtype) -> None:
    world = make_world(group=group, page_size=page_size, dtype=dtype)
    errors = [
        world.step(extends=[(3, 15), (0, 1), (5, 33)], decodes=[]),
        world.step(extends=[(3, 2), (6, 16)], decodes=[5, 0]),
        world.step(extends=[], decodes=[6, 3, 0, 5]),
        world.step(extends=[(0, 30), (5, 1)], decodes=[3]),
        world.step(extends=[], decodes=[5]),
    ]
    assert max(errors) <= TOLERANCE[dtype]


def test_a_decode_step_that_uses_several_splits_is_right() -> None:
    world = make_world()
    assert max(world.step([(1, 190), (2, 127)], []), world.step([], [1, 2]), world.step([], [2, 1])) <= 2e-6


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_head_sizes_of_tiny_and_of_real_models_work(head_dim: int) -> None:
    world = make_world(head_dim=head_dim)
    assert max(world.step([(1, 20), (2, 3)], []), world.step([(2, 4)], [1])) <= 2e-6


def test_a_prompt_in_chunks_of_one_token_equals_one_in_one_chunk() -> None:
    world = make_world()
    assert max(world.step([(4, 1)], []) for _ in range(18)) <= 2e-6


@pytest.mark.parametrize("window", [5, 64])
def test_a_window_hides_all_but_the_last_positions(window: int) -> None:
    world = make_world(window=window)
    assert max(world.step([(1, 150), (2, 3)], []), world.step([(2, 70)], [1]), world.step([], [1, 2])) <= 2e-6


@pytest.mark.parametrize("window", [None, 20])
def test_a_cap_bends_the_scores(window: int | None) -> None:
    world = make_world(window=window, softcap=0.7)
    assert max(world.step([(1, 70), (2, 3)], []), world.step([(2, 40)], [1]), world.step([], [1, 2])) <= 2e-6


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share_of_the_weights(window: int | None) -> None:
    """The rows are long enough for several splits, of which one has the sink."""
    world = make_world(window=window, has_sinks=True)
    assert max(world.step([(1, 130), (2, 3)], []), world.step([(2, 40)], [1]), world.step([], [1, 2])) <= 2e-6
