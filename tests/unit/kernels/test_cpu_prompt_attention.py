"""The compiled attention of prompts, for each instruction set of this processor, against dense attention in float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from srt.kernels.build import cpu_library
from srt.kernels.cpu import prompt_attention
from srt.kernels.cpu.prompt_attention import AVX2, AVX512, BFLOAT16, PromptAttention, supported_instructions
from srt.layers.attention.torch_native import TorchNativeBackend
from tests.unit.layers.attention import attention_world
from tests.unit.layers.attention.attention_world import AttentionWorld

pytestmark = pytest.mark.skipif(not cpu_library.is_supported(), reason="this processor has no AVX2, so PyTorch attends")
KINDS = [(torch.float32, AVX2), (torch.float32, AVX512)] + [(torch.bfloat16, n) for n in (AVX2, AVX512, BFLOAT16)]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2}


@pytest.fixture(params=KINDS, ids=str)
def prompts(request: pytest.FixtureRequest, library: ctypes.CDLL) -> PromptAttention:
    dtype, instructions = request.param
    if instructions not in supported_instructions(dtype, cpu_library.processor_features()):
        pytest.skip("this processor or this type has no such code")
    return PromptAttention(library, dtype, instructions)


@pytest.fixture(scope="module")
def library(cpu_kernels: Path) -> ctypes.CDLL:
    return cpu_library.open_library(cpu_kernels)


def world_of(
    prompts: PromptAttention, group: int, head_dim: int, page_size: int = 16, window: int | None = None
) -> AttentionWorld:
    backend = TorchNativeBackend(prompts)
    return AttentionWorld(backend, 2 * group, 2, head_dim, page_size, prompts.dtype, window=window)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("group", "page_size"), [(1, 1), (2, 16), (7, 5), (100, 16)])
def test_requests_grow_through_every_kind_of_step(
    prompts: PromptAttention, group: int, page_size: int, head_dim: int
) -> None:
    world = world_of(prompts, group, head_dim, page_size)
    errors = [
        world.step(extends=[(3, 15), (0, 1), (5, 150)], decodes=[]),
        world.step(extends=[(3, 2), (6, 16), (1, 1)], decodes=[5, 0]),
        world.step(extends=[(0, 100), (5, 1)], decodes=[3]),
        world.step(extends=[(6, 3), (1, 64), (0, 2)], decodes=[5]),
    ]
    assert max(errors) <= TOLERANCE[prompts.dtype]


@pytest.mark.parametrize("window", [None, 1, 7, 64, 513, 700])
def test_long_prompts_are_computed_in_pieces_of_their_keys(
    prompts: PromptAttention, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_world, "MAX_TOKENS", 2000)
    world = world_of(prompts, 3, 32, window=window)
    errors = [
        world.step(extends=[(0, 1100), (1, 2)], decodes=[]),
        world.step(extends=[(1, 513), (0, 33), (2, 512)], decodes=[]),
        world.step(extends=[(0, 600), (1, 2)], decodes=[2]),
    ]
    assert max(errors) <= TOLERANCE[prompts.dtype]


def test_heads_that_do_not_fit_into_the_memory_together_take_turns(
    prompts: PromptAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_attention, "MOST_BYTES", 40_000)
    world = world_of(prompts, 2, 64)
    errors = [world.step(extends=[(0, 150), (1, 5), (2, 6), (3, 70)], decodes=[])]
    errors.append(world.step(extends=[(0, 40), (3, 2), (1, 7)], decodes=[2]))
    assert max(errors) <= TOLERANCE[prompts.dtype]


def test_what_is_not_finite_stays_in_its_row(library: ctypes.CDLL) -> None:
    """A model that computes nonsense for one request must not harm another, and is found out by its logits."""
    world = world_of(PromptAttention(library, torch.float32, AVX2), 2, 32)
    rows = [(0, 40), (1, 30)]
    batch, fused = world.make_batch(rows, 2), world.make_qkv(rows)
    fused[17, 0] = float("nan")
    world._backend.init_forward_metadata(batch)
    out = world.attend(fused, batch)
    assert out[17].isnan().any()
    assert torch.cat((out[:17], out[18:])).isfinite().all()


def test_a_type_or_a_head_without_code_is_left_to_pytorch(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_attention, "load_library", lambda: library)
    monkeypatch.setattr(prompt_attention, "processor_features", lambda: {"avx2", "fma"})
    assert PromptAttention.load(torch.float32, torch.float32, 64) is not None
    assert PromptAttention.load(torch.float16, torch.float16, 64) is None
    assert PromptAttention.load(torch.bfloat16, torch.float8_e4m3fn, 64) is None
    assert PromptAttention.load(torch.float32, torch.float32, 72) is None
    monkeypatch.setattr(prompt_attention, "processor_features", lambda: {"avx2", "fma", "amx_bf16"})
    assert PromptAttention.load(torch.bfloat16, torch.bfloat16, 64) is None
    assert PromptAttention.load(torch.float32, torch.float32, 64) is not None


def test_the_fastest_instructions_of_the_processor_are_taken() -> None:
    wide = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert supported_instructions(torch.float32, {"avx2", "fma", "avx512f"}) == [AVX2]
    assert supported_instructions(torch.float32, wide | {"avx512_bf16"}) == [AVX2, AVX512]
    assert supported_instructions(torch.bfloat16, wide) == [AVX2, AVX512]
    assert supported_instructions(torch.bfloat16, wide | {"avx512_bf16"}) == [AVX2, AVX512, BFLOAT16]
