"""The Triton backend in Triton's interpreter: requests that grow through extend, mixed and decode steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srt.layers.attention import triton_backend
from srt.layers.attention.base import Reading
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


def test_rows_are_attended_from_their_projection_only_if_none_reads_what_another_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are rows of one request: the keys of the first are read by the others. One row reads no others."""
    backend: Any = TritonAttentionBackend(spec_of(8, 128, 16, torch.bfloat16, None), torch.device("cpu"))
    backend._is_wide = True
    pool = SimpleNamespace(max_pages=4, page_size=16)
    batch: Any = SimpleNamespace(
        req_to_token_pool=pool, num_extend_rows=0, num_decode_rows=2, req_pool_indices=0, seq_lens=0, locations_of=int
    )
    layer: Any = SimpleNamespace(num_heads=8, num_kv_heads=1, head_dim=128, layer_id=0, scale=1.0, window=None)
    monkeypatch.setattr(triton_backend, "_paged_kv", lambda layer, batch: None)
    monkeypatch.setattr(triton_backend, "wide_decode", lambda qkv, *rest: qkv)

    def is_attended(num_rows: int) -> bool:
        qkv = torch.zeros(num_rows, 10 * 128)
        return backend.decode_packed(qkv, None, 0.0, qkv, qkv, layer, batch) is not None

    backend.begin_decodes(batch, Reading.BY_ROW)
    assert is_attended(1) and is_attended(2) and is_attended(8) and not is_attended(9)
    backend.plan_decode(batch)
    assert is_attended(1) and not is_attended(2)
