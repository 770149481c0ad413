"""A rehearsal of the first steps leaves no trace: the same tokens afterwards, whether it succeeds or not, and nobody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import srt.kernels
from srt.distributed.parallel_state import TensorParallel
from srt.layers.attention import backend_choice
from srt.layers.attention.base import Reading
from srt.model_executor import kernel_record, model_runner
from srt.model_executor.cuda_graph_runner import Capture
from srt.model_executor.kernel_record import KernelRecord
from srt.model_executor.model_runner import Graph, ModelRunner
from srt.model_executor.warm_up import num_distinct_layers
from srt.protocol.messages import PlanSection
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import CPU, run_ranks, single_rank
from tests.support.recorder import PlansAtOnce, Recorder
from tests.support.runners import make_runner


class RehearsingRunner(ModelRunner):
    """Rehearses on a CPU too, where there is no kernel to compile."""

    def _profile_num_pages(self) -> int:
        self._rehearse()
        return super()._profile_num_pages()


@pytest.fixture
def captured_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """So that nobody has been here before."""
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rehearsing_runner(
    folder: Path, tp: TensorParallel | None = None, capture: Capture | None = None, **options: Any
) -> RehearsingRunner:
    args = ServerArgs(
        str(folder), device="cpu", max_total_tokens=8192, max_running_requests=24, dtype="float32", **options
    )
    config = ModelConfig.from_folder(folder)
    return RehearsingRunner(args, config, str(folder), tp or single_rank(), CPU, capture=capture)


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    jobs = [Job(list(range(1, 4 + 9 * index)), greedy(12)) for index in range(4)]
    PlanDriver(runner, runner.page_size).run(jobs)
    return [job.outputs for job in jobs]


def test_a_rehearsal_leaves_no_trace(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    plain, rehearsed = make_runner(folder, 16, dtype="float32"), rehearsing_runner(folder)
    assert tokens_of(rehearsed) == tokens_of(plain)
    assert rehearsed.weight_bytes == plain.weight_bytes


def test_what_fails_in_it_is_told_once_and_the_start_goes_on(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("qwen3")
    expected = tokens_of(make_runner(folder, 16, dtype="float32"))

    def fail(*about: object) -> list[list[PlanSection]]:
        raise RuntimeError("no threads")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(model_runner, "warm_up_requests", fail)
        runner = rehearsing_runner(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "Kernels are compiled one after the other, because of RuntimeError: no threads"
    ]
    runner.warm_up()
    assert tokens_of(runner) == expected


def test_no_rank_waits_for_another_ones_rehearsal(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")

    def on_rank(tp: TensorParallel) -> list[list[int]]:
        make: Callable[..., ModelRunner] = rehearsing_runner
        runner = make(folder, tp=tp) if tp.rank else make_runner(folder, 16, tp, dtype="float32")
        return tokens_of(runner)

    first, second = run_ranks(2, tmp_path, on_rank)
    assert first == second == tokens_of(make_runner(folder, 16, dtype="float32"))


def kernels_that_compile(runner: ModelRunner) -> dict[Graph, Future[None]]:
    """One of its own for each graph."""
    kernels = {graph: Future[None]() for graph in runner._kernels_of}
    runner._kernels_of = {graph: frozenset({kernel}) for graph, kernel in kernels.items()}
    return kernels


@pytest.mark.usefixtures("captured_attention")
def test_no_step_waits_for_a_graph_whose_kernels_are_being_compiled(checkpoint: CheckpointFactory) -> None:
    recorder = Recorder()
    runner = rehearsing_runner(
        checkpoint("qwen3"), capture=recorder, cuda_graph_bs=[2, 8], piecewise_cuda_graph_max_tokens=0
    )
    kernels, num_graphs = kernels_that_compile(runner), runner.num_graphs_left
    expected = tokens_of(runner)
    assert not runner.is_missing_graph, "they do miss one, but it cannot be made yet"
    assert runner.capture_graph() == 0
    assert runner.num_graphs_left == num_graphs
    kernels[Reading.BY_ROW, 8].set_result(None)
    assert runner.is_missing_graph
    assert runner.capture_graph() == 8
    assert tokens_of(runner) == expected
    assert recorder.num_replays


@pytest.mark.usefixtures("captured_attention")
def test_what_cannot_be_compiled_ahead_is_left_to_the_capture(checkpoint: CheckpointFactory) -> None:
    runner = rehearsing_runner(
        checkpoint("qwen3"), capture=Recorder(), cuda_graph_bs=[8], piecewise_cuda_graph_max_tokens=0
    )
    for kernel in kernels_that_compile(runner).values():
        kernel.set_exception(RuntimeError("No space left on device"))
    assert runner.capture_graph() == 8


@pytest.mark.usefixtures("captured_attention")
def test_all_graphs_are_rehearsed_and_none_of_them_again_where_all_were_captured_before(
    checkpoint: CheckpointFactory, cache: Path
) -> None:
    def captured_by(runner: ModelRunner) -> list[int]:
        return [runner.capture_graph() for _ in range(runner.num_graphs_left)]

    options: dict[str, Any] = {"cuda_graph_bs": [1, 4, 8], "piecewise_cuda_graph_max_tokens": 64}
    first = rehearsing_runner(checkpoint("qwen3"), capture=Recorder(), **options)
    rehearsed = list(first._kernels_of)
    assert rehearsed == [*((Reading.BY_ROW, size) for size in (8, 4, 1)), 64, 32]
    assert captured_by(first) == [8, 4, 1, 64, 32]
    assert first._kernels_of == {}
    second = rehearsing_runner(checkpoint("qwen3"), capture=Recorder(), **options)
    assert second._kernels_of == {}
    assert captured_by(second) == [8, 4, 1, 64, 32]
    for others in ({**options, "cuda_graph_bs": [1, 8]}, {**options, "page_size": 1}):
        assert rehearsing_runner(checkpoint("qwen3"), capture=Recorder(), **others)._kernels_of
    assert not rehearsing_runner(checkpoint("qwen3"), capture=Recorder(), disable_cuda_graph=True)._kernels_of


def test_kernels_of_other_sources_have_no_record(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sources" / "kernel.cu"
    source.parent.mkdir()
    source.write_text("int a;")
    monkeypatch.setattr(srt.kernels, "__path__", [str(source.parent)])
    monkeypatch.setattr(kernel_record, "_sources", kernel_record._sources.__wrapped__)
    record = KernelRecord(CPU, "configuration")
    assert not record.is_complete
    record.note_complete()
    assert record.is_complete
    assert not KernelRecord(CPU, "another").is_complete
    source.write_text("int b;")
    assert not record.is_complete


@pytest.mark.parametrize(
    ("windows", "count"), [((None,) * 9, 2), ((8, 8, 8, None, 8, 8, 8, None), 4), ((None, 8), 2), ((None,), 2)]
)
def test_so_many_layers_have_all_kernels_among_them(windows: tuple[int | None, ...], count: int) -> None:
    assert num_distinct_layers(windows) == count
