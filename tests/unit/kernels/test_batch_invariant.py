"""With --enable-deterministic-inference a request gets the same ids and logprobs, to the bit, whatever else the server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from srt.kernels.build import cpu_library
from srt.kernels.cpu.batch_invariant import BatchInvariantKernels
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import LogprobSpec
from tests.support.checkpoints import CheckpointFactory
from tests.support.invariance import make_probes, run_trials
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.runners import make_runner

pytestmark = pytest.mark.skipif(not cpu_library.is_supported(), reason="this processor has no AVX2")
VOCABULARY = 509
CHUNKS = (7, 64, 512, 1 << 30)
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}


@pytest.fixture(scope="module", autouse=True)
def library(cpu_kernels: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("srt.kernels.cpu.batch_invariant.load_library", lambda: cpu_library.open_library(cpu_kernels))
        yield


def num_distinct(runner: ModelRunner, page_size: int, num_trials: int) -> int:
    """The largest number of different results that a probe gets in this many trials."""
    probes = make_probes(14, VOCABULARY)  # two for each way to draw
    run_trials(runner, probes, num_trials, page_size, CHUNKS)
    assert all(probe.ids for probe in probes)
    return max(probe.num_distinct for probe in probes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_request_has_one_result_in_any_company(checkpoint: CheckpointFactory, dtype: str, page_size: int) -> None:
    folder = checkpoint("qwen3", vocab_size=VOCABULARY)
    runner = make_runner(folder, page_size, dtype=dtype, enable_deterministic_inference=True)
    assert num_distinct(runner, page_size, 60) == 1


def test_windows_and_biases_do_not_matter(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen2", config=WINDOW, vocab_size=VOCABULARY)
    runner = make_runner(folder, 4, dtype="bfloat16", enable_deterministic_inference=True)
    assert num_distinct(runner, 4, 60) == 1


def test_the_check_finds_the_ordinary_mode(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3", vocab_size=VOCABULARY)
    assert num_distinct(make_runner(folder, 16, dtype="bfloat16"), 16, 60) > 1


def test_the_check_finds_a_product_that_splits_its_sum_by_the_number_of_rows(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = BatchInvariantKernels.product

    def split(
        self: BatchInvariantKernels,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if len(x) < 8 or out is not None:
            return whole(self, x, weight, bias, out)
        middle = x.shape[1] // 2
        first = whole(self, x[:, :middle], weight[:, :middle].contiguous(), bias)
        return first + whole(self, x[:, middle:], weight[:, middle:].contiguous(), None)

    folder = checkpoint("qwen3", vocab_size=VOCABULARY)
    runner = make_runner(folder, 16, dtype="float32", enable_deterministic_inference=True)
    monkeypatch.setattr(BatchInvariantKernels, "product", split)
    assert num_distinct(runner, 16, 60) > 1


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_logits_are_those_of_the_ordinary_mode_but_for_rounding(checkpoint: CheckpointFactory, family: str) -> None:
    folder = checkpoint(family, vocab_size=VOCABULARY)
    runners = [
        make_runner(folder, 16, dtype="float32", enable_deterministic_inference=is_on) for is_on in (False, True)
    ]
    results = []
    for runner in runners:
        job = Job([(7 * i) % VOCABULARY for i in range(50)], greedy(4), logprobs=LogprobSpec(True, 1))
        PlanDriver(runner, 16, chunk=20).run([job])
        results.append(job)
    plain, invariant = results
    assert plain.outputs == invariant.outputs
    for a, b in zip(plain.prompt_logprobs, invariant.prompt_logprobs, strict=True):
        assert abs(a.chosen - b.chosen).max() < 1e-4
