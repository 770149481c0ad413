"""The Triton backend: right in Triton's interpreter, refused by name where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srt.kernels.attention.decode_attention import MAX_SPLITS, DecodeTiles, most_splits
from srt.kernels.build.shared_memory import SHARED_BYTES
from srt.layers.attention.triton_backend import TritonAttentionBackend
from srt.utils.errors import StartError
from tests.unit.kernels.interpreted import run_interpreted
from tests.unit.layers.attention.attention_world import AttentionWorld, spec_of


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("subject", ["triton_backend", "runner_on_triton"])
def test_in_the_interpreter_it_equals_dense_attention_and_transformers(subject: str) -> None:
    run_interpreted(Path(__file__).with_name(f"interpreted_{subject}.py"))


def test_a_cpu_without_the_interpreter_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartError, match="--attention-backend triton needs a CUDA device"):
        TritonAttentionBackend(spec_of(2, 64, 16, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_programs", "max_context", "expected"),
    [(8, 32768, MAX_SPLITS), (64, 32768, 8), (512, 32768, 1), (4096, 32768, 1), (8, 1024, 16), (8, 100, 2)],
)
def test_splits_fill_the_device_and_no_more_than_the_context_can_use(
    num_programs: int, max_context: int, expected: int
) -> None:
    assert most_splits(num_programs, max_context, num_processors=132) == expected


def test_tiles_of_decodes_fit_every_gpu_and_the_context() -> None:
    for shared in SHARED_BYTES.values():
        for num_programs in range(1, 2100, 7):
            for max_context in (64, 1000, 40_960):
                tiles = DecodeTiles.choose(torch.bfloat16, 128, num_programs, max_context, 132, shared)
                assert 1 <= tiles.num_splits <= most_splits(num_programs, max_context, 132)
                held = (tiles.num_stages - 1) * tiles.block_n * 2 * 128 * 2
                assert held <= shared, (tiles, shared)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("group", "page_size"), [(1, 1), (2, 16), (4, 1), (5, 16)])
def test_on_a_gpu_requests_grow_through_every_kind_of_step(
    group: int, page_size: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    device = torch.device("cuda")
    backend = TritonAttentionBackend(spec_of(group, head_dim, page_size, dtype), device)
    world = AttentionWorld(backend, 2 * group, 2, head_dim, page_size, dtype, device)
    errors = [
        world.step(extends=[(3, 15), (0, 1), (5, 150)], decodes=[]),
        world.step(extends=[(3, 2), (6, 16)], decodes=[5, 0]),
        world.step(extends=[], decodes=[6, 3, 0, 5]),
        world.step(extends=[(0, 100), (5, 1)], decodes=[3]),
        world.step(extends=[], decodes=[5, 0]),
    ]
    assert max(errors) <= tolerance
