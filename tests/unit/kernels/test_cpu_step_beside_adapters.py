"""On a server with LoRA adapters, steps in which no row has one run the compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.kernels.build import cpu_library
from srt.lora.adapter_files import content_hash
from srt.lora.resource import AdapterContent
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.random_adapter import AdapterSpec, write_adapter
from tests.support.runners import decodes_of, make_runner

NUM_TOKENS = 6
PROMPTS = [[20, 30, 40], [50, 60]]


def jobs(*adapters: str) -> list[Job]:
    return [Job(prompt, greedy(NUM_TOKENS), adapter=name) for prompt, name in zip(PROMPTS, adapters, strict=True)]


def test_steps_without_adapters_run_the_compiled_code(
    qwen3_checkpoint: Path, cpu_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.kernels.cpu.decode_step.load_library", lambda: cpu_library.open_library(cpu_kernels))
    write_adapter(tmp_path, qwen3_checkpoint, AdapterSpec())
    runner, plain = (make_runner(qwen3_checkpoint, 16, enable_lora=it, dtype="float32") for it in (True, False))
    assert runner.loaded.adapters is not None
    runner.loaded.adapters.load("key", AdapterContent(str(tmp_path), content_hash(tmp_path)))
    step = decodes_of(runner).cpu_step
    assert step is not None
    num_compiled = 0
    logits_into = step.logits_into

    def count(*args: Any) -> None:
        nonlocal num_compiled
        num_compiled += 1
        logits_into(*args)

    monkeypatch.setattr(step, "logits_into", count)
    alone, beside, others = jobs("", ""), jobs("key", ""), jobs("", "")
    PlanDriver(runner, 16).run(alone)
    assert num_compiled == NUM_TOKENS - 1
    runner.reset()
    PlanDriver(runner, 16).run(beside)
    assert num_compiled == NUM_TOKENS - 1
    # The same slots, of which one has had an adapter.
    runner.reset()
    PlanDriver(runner, 16).run(again := jobs("", ""))
    assert num_compiled == 2 * (NUM_TOKENS - 1)
    PlanDriver(plain, 16).run(others)
    assert [job.outputs for job in alone] == [job.outputs for job in again] == [job.outputs for job in others]
    assert beside[1].outputs == others[1].outputs
    assert beside[0].outputs != others[0].outputs
