"""Requests of a deterministic server get to the bit what they get alone, though they are preempted, resumed, and workers die."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from srt.kernels.build import cpu_library
from tests.scheduler.settings import Settings
from tests.support.checkpoints import CheckpointFactory
from tests.support.real_worlds import RealModel
from tests.support.runners import make_runner

pytestmark = pytest.mark.skipif(not cpu_library.is_supported(), reason="this processor has no AVX2")
VOCABULARY: Final = 509
CROWDED: Final = Settings(
    page_size=4,
    num_pages=45,
    num_slots=12,
    max_request_tokens=100,
    chunk=7,
    conservativeness=0.01,
    num_requests=24,
    longest_prompt=60,
    longest_answer=20,
    vocab_size=VOCABULARY,
    arrival_gap=0.002,
    abort_share=0.1,
    num_deaths=3,
    num_retracts=1,
)
WORLDS: Final = (
    CROWDED,
    replace(CROWDED, page_size=1, num_pages=250, chunk=64, policy="lpm"),
    replace(CROWDED, page_size=16, num_pages=12, chunk=-1, window=1),
    replace(CROWDED, page_size=16, num_pages=10, chunk=512, num_slots=24, policy="priority"),
)


@pytest.fixture(scope="module", autouse=True)
def library(cpu_kernels: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("srt.kernels.cpu.batch_invariant.load_library", lambda: cpu_library.open_library(cpu_kernels))
        yield


def model(checkpoint: CheckpointFactory, dtype: str, page_size: int, *, is_deterministic: bool = True) -> RealModel:
    folder = checkpoint("qwen3", vocab_size=VOCABULARY)
    alone, worker = (
        make_runner(folder, page_size, dtype=dtype, enable_deterministic_inference=is_deterministic) for _ in range(2)
    )
    return RealModel(alone, worker, page_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_preemptions_and_deaths_change_no_bit(checkpoint: CheckpointFactory, dtype: str, number: int) -> None:
    real = model(checkpoint, dtype, WORLDS[number].page_size)
    real.run(0, WORLDS[number])
    assert real.num_compared > 300
    assert min(real.statistics[name] for name in ("preemptions", "deaths", "prefix hits")) > 0, real.statistics


def test_the_check_finds_the_ordinary_mode(checkpoint: CheckpointFactory) -> None:
    real = model(checkpoint, "bfloat16", WORLDS[0].page_size, is_deterministic=False)
    with pytest.raises(AssertionError, match="than alone"):
        real.run(0, WORLDS[0])
