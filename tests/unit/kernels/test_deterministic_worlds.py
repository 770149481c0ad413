"""Requests of a deterministic server get to the bit what they get alone, though they are preempted, resumed, and workers die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from srt.kernels.build import cpu_library
from tests.support.checkpoints import CheckpointFactory
from tests.support.real_worlds import VOCABULARY, WORLDS, RealModel
from tests.support.runners import make_runner

pytestmark = pytest.mark.skipif(not cpu_library.is_supported(), reason="this processor has no AVX2")


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
