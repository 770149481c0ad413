"""Decode steps through PyTorch's compiler: the tokens of eager steps, and no others, and refused by name where it cannot be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from srt.layers.attention import backend_choice
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import SamplingSpec
from srt.server_args import ArgumentError, ServerArgs, parse_args
from srt.utils.errors import StartError
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver
from tests.support.recorder import PlansAtOnce, Recorder
from tests.support.runners import make_runner

COMPILED: dict[str, Any] = {"enable_torch_compile": True, "torch_compile_max_bs": 6}


def jobs() -> list[Job]:
    """Of many lengths, so that steps have from one row to eleven."""
    rng = random.Random(5)
    specs = [SamplingSpec(5 + 2 * i, temperature=0.0 if i % 3 else 0.8) for i in range(11)]
    return [Job([rng.randrange(500) for _ in range(3 + 4 * i)], spec, seed=i) for i, spec in enumerate(specs)]


def num_compiled_steps(runner: ModelRunner) -> int:
    count = runner.inspect()["num_compiled_steps"]
    assert isinstance(count, int)
    return count


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.full
@pytest.mark.usefixtures("own_cache")
def test_float32_tokens_are_those_of_eager_steps(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found, replayed = jobs(), jobs(), jobs()
    driver = PlanDriver(make_runner(checkpoint("qwen3"), 4), 4, chunk=40)
    driver.run(expected)
    runner = make_runner(checkpoint("qwen3"), 4, **COMPILED)
    before = num_compiled_steps(runner)
    assert before == 2, "a step of one row, and one of several"
    PlanDriver(runner, 4, chunk=40).run(found)
    assert [job.outputs for job in found] == [job.outputs for job in expected]
    small = [decodes for extends, decodes in driver.steps if not extends and decodes <= 6]
    assert num_compiled_steps(runner) - before == len(small)
    assert len(set(small)) > 3
    assert any(decodes > 6 for extends, decodes in driver.steps if not extends)
    # And inside graphs, as a GPU has them.
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)
    recorder = Recorder()
    graphs = make_runner(checkpoint("qwen3"), 4, capture=recorder, cuda_graph_bs=(4, 16), **COMPILED)
    while graphs.graphs.num_left:
        graphs.graphs.capture_next()
    PlanDriver(graphs, 4, chunk=40).run(replayed)
    assert [job.outputs for job in replayed] == [job.outputs for job in expected]
    assert recorder.num_replays > 10
    assert num_compiled_steps(graphs) > 7


@pytest.mark.usefixtures("own_cache")
def test_without_a_compiler_it_is_refused_before_anything_is_served(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none() -> str:
        raise InvalidCxxCompiler

    torch.compiler.reset()  # code that another test has compiled in this process
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", find_none)
    with pytest.raises(
        StartError, match=r"^--enable-torch-compile: PyTorch could not .* C\+\+ compiler: install g\+\+"
    ):
        make_runner(checkpoint("qwen3"), 4, enable_torch_compile=True)


def test_it_is_off_unless_asked_for_and_serves_one_rank() -> None:
    assert not ServerArgs(model_path="x").enable_torch_compile
    assert ServerArgs(model_path="x").torch_compile_max_bs == 32
    with pytest.raises(ArgumentError, match=r"^--enable-torch-compile .* --tp 2\.$"):
        parse_args(["--model-path", "x", "--enable-torch-compile", "--tp", "2"])
    with pytest.raises(ArgumentError, match=r"--torch-compile-max-bs must be at least 1"):
        parse_args(["--model-path", "x", "--enable-torch-compile", "--torch-compile-max-bs", "0"])
