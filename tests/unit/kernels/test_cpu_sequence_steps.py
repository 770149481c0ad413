"""Drafts drawn and verified by single calls of compiled code are those of separate steps, and change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.kernels.build import cpu_library
from srt.kernels.cpu.decode_step import CpuDecodeStep
from srt.kernels.cpu.sequence_steps import Ints, SequenceSteps
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import GenerateRequest, LogprobSpec, int32_array
from srt.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import CheckpointFactory
from tests.support.runners import decodes_of, make_runner
from tests.support.whole_engine import WholeEngine

pytestmark = pytest.mark.skipif(
    not cpu_library.is_supported(), reason="this processor has no AVX2, so PyTorch runs the steps"
)

NUM_REQUESTS, LENGTH, PAGE_SIZE = 6, 24, 4
WINDOW: dict[str, object] = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 1,
    "layer_types": None,
}
CLOSE = {"float32": 2e-5, "bfloat16": 4e-2}  # relative to the largest logit


@pytest.fixture(autouse=True)
def library(cpu_kernels: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("srt.kernels.cpu.decode_step.load_library", lambda: cpu_library.open_library(cpu_kernels))
        yield


def answers_of(folder: Path, **options: Any) -> list[list[int]]:
    """The answers to requests of several temperatures and lengths, whose prompts begin alike."""
    return answers_with(make_runner(folder, PAGE_SIZE, chunked_prefill_size=8, **options))


def answers_with(runner: ModelRunner) -> list[list[int]]:
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


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("family", "config"), [("qwen3", {}), ("qwen2", WINDOW)], ids=["plain", "a window"])
def test_few_tokens_of_prompts_are_computed_as_the_layers_do(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, object], dtype: str
) -> None:
    """Chunks of eight tokens and of fewer, alone and beside rows that decode."""
    folder, sizes, logits_of = checkpoint(family, config=config), set[tuple[int, bool]](), CpuDecodeStep.logits_of
    options: dict[str, Any] = {"dtype": dtype, "max_running_requests": 4}
    runner = make_runner(folder, PAGE_SIZE, chunked_prefill_size=8, **options)
    loaded = runner.loaded

    def noted(step: CpuDecodeStep, batch: ForwardBatch, slots: torch.Tensor) -> torch.Tensor:
        sizes.add((batch.num_extend_tokens, batch.num_decode_rows > 0))
        loaded.attn_backend.init_forward_metadata(batch)
        hidden = loaded.model(batch.input_ids, batch.positions, batch)
        expected = loaded.logits_processor.logits(hidden, loaded.model.lm_head)
        logits = logits_of(step, batch, slots)  # the keys and values that stay are those of the compiled code
        assert (logits.float() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()
        return logits

    monkeypatch.setattr(CpuDecodeStep, "logits_of", noted)
    answers = answers_with(runner)
    assert min(sizes)[0] < 8 == max(sizes)[0]
    assert {is_mixed for _, is_mixed in sizes} == {False, True}
    sizes.clear()
    monkeypatch.setattr(CpuDecodeStep, "few_tokens", 0)
    by_layers = answers_of(folder, **options)
    assert not sizes
    assert dtype == "bfloat16" or answers == by_layers


def test_of_a_larger_model_fewer_tokens_are_left_to_compiled_code(checkpoint: CheckpointFactory) -> None:
    """What a step reads decides it: here 0.4, 51 and 25.5 MiB."""
    steps = [
        decodes_of(make_runner(checkpoint(hidden_size=size), PAGE_SIZE, dtype=dtype)).cpu_step
        for size, dtype in ((64, "float32"), (1024, "float32"), (1024, "bfloat16"))
    ]
    assert [step and step.few_tokens for step in steps] == [32, 8, 32]
