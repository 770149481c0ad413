"""Drafts drawn and verified by single calls of compiled code are those of separate steps, and change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srt.kernels.build import cpu_library
from srt.kernels.cpu.sequence_steps import Ints, SequenceSteps
from srt.protocol.messages import GenerateRequest, LogprobSpec, int32_array
from srt.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import CheckpointFactory
from tests.support.runners import make_runner
from tests.support.whole_engine import WholeEngine

pytestmark = pytest.mark.skipif(
    not cpu_library.is_supported(), reason="this processor has no AVX2, so PyTorch runs the steps"
)

NUM_REQUESTS, LENGTH, PAGE_SIZE = 6, 24, 4


@pytest.fixture(autouse=True)
def library(cpu_kernels: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("srt.kernels.cpu.decode_step.load_library", lambda: cpu_library.open_library(cpu_kernels))
        yield


def answers_of(folder: Path, **options: Any) -> list[list[int]]:
    """The answers to requests of several temperatures and lengths, whose prompts begin alike."""
    runner = make_runner(folder, PAGE_SIZE, chunked_prefill_size=8, **options)
    engine = WholeEngine(runner.loaded.args, runner)
    for rid in range(NUM_REQUESTS):
        given = {"temperature": 0.5 * (rid % 3), "max_new_tokens": LENGTH - rid}
        prompt = int32_array([3 + i % 7 for i in range(9 + rid)])
        choices, sampling = int32_array([0]), SamplingParams.from_dict(given).spec(LENGTH - rid, ())
        engine.submit(
            GenerateRequest(rid, str(rid), prompt, choices, [int32_array()], sampling, LogprobSpec(), seed=rid)
        )
    engine.finish()
    return [engine.answers[rid, 0].ids for rid in range(NUM_REQUESTS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_drafts_for_itself_is_right(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Each draft is the draw that the same code makes of the same tokens; so even in bfloat16 no bit may differ."""
    folder, num_tokens = checkpoint("qwen3"), list[tuple[int, int]]()
    verify = SequenceSteps.verify

    def noted(steps: SequenceSteps, slots: Ints, lengths: Ints, counts: Ints) -> Any:
        ids, told = verify(steps, slots, lengths, counts)
        num_tokens.append((int((told - 1).sum()), int((counts - 1).sum())))
        return ids, told

    monkeypatch.setattr(SequenceSteps, "verify", noted)
    options = {"dtype": dtype, "max_running_requests": 4}
    found = answers_of(
        folder,
        **options,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(folder),
        speculative_num_draft_tokens=5,
    )
    num_right, num_drafts = (sum(column) for column in zip(*num_tokens, strict=True))
    assert num_drafts > 2 * LENGTH
    assert num_right >= 0.95 * num_drafts  # prompts' ends are computed by other code for one of the two
    if dtype == "float32":
        assert found == answers_of(folder, **options)
