"""A precompiling of the first steps leaves no trace: the same tokens afterwards, whether it succeeds or not, and nobody waits for it."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

import srt
from srt.distributed.parallel_state import TensorParallel
from srt.kernels.build import precompile as precompiling
from srt.kernels.build.precompile import Compilers
from srt.layers.attention import backend_choice
from srt.layers.attention.base import Reading
from srt.layers.ops import TORCH_OPS
from srt.model_executor.graphs.cuda_graph_runner import Capture, Work
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.graph_kernels import Graph, GraphKernels
from srt.model_executor.loaded_model import LoadedModel, load_model
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup import kernel_record
from srt.model_executor.startup import precompile as precompile_module
from srt.model_executor.startup.kernel_record import KernelRecord
from srt.model_executor.startup.precompile import precompile
from srt.model_executor.startup.start_runner import build_runner
from srt.model_executor.startup.trial_runner import trial_runner
from srt.model_executor.startup.warm_up import warm_up
from srt.models import decoder
from srt.models.causal_lm import CausalLM
from srt.protocol.messages import PlanSection
from srt.server_args import ServerArgs
from srt.utils.layer_spec import FeedForward, LayerSpec, SelfAttention, num_distinct_layers
from srt.utils.model_config import ModelConfig
from srt.utils.quantization import QUANTIZING, LayerNames, WeightFormats
from srt.utils.rope_config import RopeConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.ranks import CPU, run_ranks, single_rank
from tests.support.recorder import PlansAtOnce, Recorder
from tests.support.runners import make_runner

PLAIN = LayerSpec(SelfAttention(2, 1, 8, 1.0, RopeConfig("default", 1e4)), FeedForward(8))


@pytest.fixture
def captured_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "TorchNativeBackend", PlansAtOnce)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test caches of its own, so that it finds no kernel compiled."""
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache" / "triton"))
    return tmp_path / "cache"


def precompiling_runner(
    folder: Path, tp: TensorParallel | None = None, capture: Capture | None = None, **options: Any
) -> ModelRunner:
    """Precompiles on a CPU too, where there is no kernel to compile."""
    args = ServerArgs(
        model_path=str(folder), device="cpu", max_total_tokens=8192, max_running_requests=24, dtype="float32", **options
    )
    config = ModelConfig.from_folder(folder)
    loaded = load_model(args, config, str(folder), tp or single_rank(), CPU)
    return build_runner(loaded, precompile(loaded), capture)


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    jobs = [Job(list(range(1, 4 + 9 * index)), greedy(12)) for index in range(4)]
    PlanDriver(runner, runner.state.page_size).run(jobs)
    return [job.outputs for job in jobs]


def test_precompiling_leaves_no_trace(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen3")
    plain, precompiled = make_runner(folder, 16, dtype="float32"), precompiling_runner(folder)
    assert tokens_of(precompiled) == tokens_of(plain)
    assert precompiled.loaded.weight_bytes == plain.loaded.weight_bytes


def test_the_memory_that_its_steps_ran_on_is_gone_at_its_end(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when garbage is collected: what is left then is measured."""
    loaded = make_runner(checkpoint("qwen3"), 16).loaded
    tables = list[weakref.ref[torch.Tensor]]()

    def noted(loaded: LoadedModel) -> ModelRunner:
        runner = trial_runner(loaded)
        tables.append(weakref.ref(runner.state.req_to_token_pool.page_table))
        return runner

    monkeypatch.setattr(precompile_module, "trial_runner", noted)
    gc.disable()
    try:
        precompile(loaded)
        assert [table() for table in tables] == [None]
    finally:
        gc.enable()


def test_what_fails_in_it_is_told_once_and_the_start_goes_on(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("qwen3")
    expected = tokens_of(make_runner(folder, 16, dtype="float32"))

    def fail(*about: object) -> list[list[PlanSection]]:
        raise RuntimeError("no threads")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(precompile_module, "warm_up_requests", fail)
        runner = precompiling_runner(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "Kernels could not be compiled ahead (RuntimeError: no threads). They are compiled at first use, so the first requests are slow."
    ]
    warm_up(runner)
    assert tokens_of(runner) == expected


def test_the_kernels_of_steps_whose_rows_ranks_divide_are_among_them(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "DIVIDED_PRODUCTS", 0)
    folder = checkpoint("qwen3")

    def on_rank(tp: TensorParallel) -> int:
        asked: list[int] = []
        cast("Any", tp).divide = lambda num_rows, *_: asked.append(num_rows)
        precompiling_runner(folder, tp=tp, chunked_prefill_size=512)
        return max(asked)

    assert all(num_rows > 512 for num_rows in run_ranks(2, tmp_path, on_rank))


def test_no_rank_waits_for_another_ones_precompiling(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")

    def on_rank(tp: TensorParallel) -> list[list[int]]:
        make: Callable[..., ModelRunner] = precompiling_runner
        runner = make(folder, tp=tp) if tp.rank else make_runner(folder, 16, tp, dtype="float32")
        return tokens_of(runner)

    first, second = run_ranks(2, tmp_path, on_rank)
    assert first == second == tokens_of(make_runner(folder, 16, dtype="float32"))


def kernels_that_compile(runner: ModelRunner) -> dict[Graph, Future[None]]:
    """One of its own for each graph."""
    kernels = {graph: Future[None]() for graph in runner.graphs._kernels._kernels}
    for graph, kernel in kernels.items():
        runner.graphs._kernels.add(graph, frozenset({kernel}))
    return kernels


@pytest.mark.usefixtures("captured_attention")
def test_no_step_waits_for_a_graph_whose_kernels_are_being_compiled(checkpoint: CheckpointFactory) -> None:
    recorder = Recorder()
    runner = precompiling_runner(
        checkpoint("qwen3"), capture=recorder, cuda_graph_bs=[2, 8], piecewise_cuda_graph_max_tokens=0
    )
    kernels, num_graphs = kernels_that_compile(runner), runner.graphs.num_left
    expected = tokens_of(runner)
    assert not runner.graphs.is_missing_one, "they do miss one, but it cannot be made yet"
    assert runner.graphs.capture_next() == 0
    assert runner.graphs.num_left == num_graphs
    kernels[Reading.BY_ROW, 8].set_result(None)
    assert runner.graphs.is_missing_one
    assert runner.graphs.capture_next() == 8
    assert tokens_of(runner) == expected
    assert recorder.num_replays


@pytest.mark.usefixtures("captured_attention")
def test_what_cannot_be_compiled_ahead_is_left_to_the_capture(checkpoint: CheckpointFactory) -> None:
    runner = precompiling_runner(
        checkpoint("qwen3"), capture=Recorder(), cuda_graph_bs=[8], piecewise_cuda_graph_max_tokens=0
    )
    for kernel in kernels_that_compile(runner).values():
        kernel.set_exception(RuntimeError("No space left on device"))
    assert runner.graphs.capture_next() == 8


@pytest.mark.usefixtures("captured_attention")
def test_ranks_capture_once_all_of_them_have_the_kernels(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    can_go_on = threading.Barrier(2, timeout=60)

    def on_rank(tp: TensorParallel) -> list[int]:
        options: dict[str, Any] = {"cuda_graph_bs": [8], "piecewise_cuda_graph_max_tokens": 0}
        runner = make_runner(folder, 16, tp, capture=Recorder(), dtype="float32", **options)
        kernel = Future[None]()
        runner.graphs._kernels.add((Reading.BY_ROW, 8), frozenset({kernel}))
        if tp.rank == 0:
            kernel.set_result(None)
        captured = [runner.graphs.capture_next()]
        can_go_on.wait()
        if tp.rank == 1:
            kernel.set_result(None)
        return [*captured, runner.graphs.capture_next(), runner.graphs.num_left]

    assert run_ranks(2, tmp_path, on_rank) == [[0, 8, 0]] * 2


class SlowCompilers(Compilers):
    """Compile what a test asks for, once it lets them. Nobody is made to wait for it."""

    may_compile: ClassVar[threading.Event]
    waited_for: ClassVar[list[int]]  # how many kernels, each time that somebody waited

    def compile_late(self, name: str) -> None:
        self.compile(name, partial(self.may_compile.wait, 60))

    def wait(self, kernels: Collection[Future[Any]]) -> None:
        self.waited_for.append(len(kernels))


@pytest.fixture
def slow_compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowCompilers]]:
    class OfThisTest(SlowCompilers):
        may_compile: ClassVar = threading.Event()
        waited_for: ClassVar = list[int]()

    def with_kernels(runner: ModelRunner, decodes: DecodeRunner, compilers: OfThisTest, kernels: GraphKernels) -> None:
        precompile_graphs(runner, decodes, compilers, kernels)
        compilers.compile_late("of a step without a graph")

    precompile_graphs: Callable[..., None] = precompile_module._precompile_graphs
    monkeypatch.setattr(precompiling, "Compilers", OfThisTest)
    monkeypatch.setattr(precompile_module, "_precompile_graphs", with_kernels)
    yield OfThisTest
    OfThisTest.may_compile.set()


OPTIONS: dict[str, Any] = {"cuda_graph_bs": [1, 4, 8], "piecewise_cuda_graph_max_tokens": 64}


def precompiled(runner: ModelRunner) -> list[Graph] | None:
    """The graphs that its start has precompiled; None if it relies on the record."""
    kernels = runner.graphs._kernels
    return None if kernels._compilers is None else list(kernels._kernels)


def has_record(cache: Path) -> bool:
    return bool(list(cache.rglob("*.complete")))


@pytest.mark.usefixtures("captured_attention")
def test_all_graphs_are_precompiled_and_nothing_again_once_all_was_compiled(
    checkpoint: CheckpointFactory, cache: Path, slow_compilers: type[SlowCompilers], recorded: threading.Event
) -> None:
    folder = checkpoint("qwen3")
    start = partial(precompiling_runner, folder, capture=Recorder())
    runner = start(**OPTIONS)
    graphs = [*((Reading.BY_ROW, size) for size in (8, 4, 1)), 64, 32]
    assert precompiled(runner) == graphs
    assert [runner.graphs.capture_next() for _ in range(runner.graphs.num_left)] == [8, 4, 1, 64, 32]
    assert runner.graphs._kernels._kernels == {}
    assert not has_record(cache), "a step without a graph needs one more"
    assert precompiled(start(**OPTIONS)) == graphs
    slow_compilers.may_compile.set()
    assert recorded.wait(60)
    assert precompiled(start(**OPTIONS)) is None
    for others in ({**OPTIONS, "cuda_graph_bs": [1, 8]}, {**OPTIONS, "page_size": 1}):
        assert precompiled(start(**others))


@pytest.mark.usefixtures("captured_attention")
def test_a_start_without_graphs_has_a_record_too(checkpoint: CheckpointFactory, recorded: threading.Event) -> None:
    runner = precompiling_runner(checkpoint("qwen3"), capture=Recorder(), disable_cuda_graph=True)
    assert precompiled(runner) == []
    assert recorded.wait(60)
    assert precompiled(precompiling_runner(checkpoint("qwen3"), capture=Recorder(), disable_cuda_graph=True)) is None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """That the record has been written."""
    event = threading.Event()
    note: Callable[[KernelRecord], None] = KernelRecord.record_complete

    def note_and_tell(record: KernelRecord) -> None:
        note(record)
        event.set()

    monkeypatch.setattr(KernelRecord, "record_complete", note_and_tell)
    return event


@pytest.mark.usefixtures("captured_attention")
@pytest.mark.parametrize("part", ["_precompile_graphs", "batches"])
def test_where_later_steps_cannot_be_precompiled_the_first_ones_are(
    checkpoint: CheckpointFactory,
    cache: Path,
    slow_compilers: type[SlowCompilers],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    num_calls = list[int]()

    def fail(*about: Any) -> None:
        num_calls.append(1)
        raise RuntimeError("no room")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(precompile_module, part, fail)
        runner = precompiling_runner(checkpoint("qwen3"), capture=Recorder(), **OPTIONS)
    assert num_calls == [1]
    assert len(slow_compilers.waited_for) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Some kernels could not be compiled ahead (RuntimeError: no room)."
        " They are compiled at first use, which delays the requests of that step."
    ]
    assert not has_record(cache)
    slow_compilers.may_compile.set()
    compilers = runner.graphs._kernels._compilers
    assert compilers is not None
    begun = [future.result(60) for future in compilers._futures.values()]
    assert begun == [True] * (part == "batches"), "what was asked for before it failed is compiled nevertheless"
    runner.graphs.capture_all()
    assert runner.graphs.num_left == 0


@pytest.mark.usefixtures("captured_attention")
def test_threads_compile_nothing_for_graphs_that_nobody_captures_any_more(
    checkpoint: CheckpointFactory, slow_compilers: type[SlowCompilers], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Recorder):
        def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
            raise RuntimeError("no graphs here")

    runner = precompiling_runner(checkpoint("qwen3"), capture=Broken(), **OPTIONS)
    runner.graphs.capture_next()
    assert runner.graphs.num_left == 0
    assert (runner.graphs._kernels._compilers, runner.graphs._kernels._kernels) == (None, {})


@pytest.fixture
def arguments(checkpoint: CheckpointFactory) -> ServerArgs:
    return ServerArgs(model_path=str(checkpoint("qwen3")), device="cpu")


def test_the_record_is_of_these_options_this_rank_and_this_model(arguments: ServerArgs) -> None:
    record = KernelRecord(arguments, "model", 0, CPU)
    assert not record.is_complete
    record.record_complete()
    assert record.is_complete
    assert KernelRecord(replace(arguments, port=1, random_seed=7), "model", 0, CPU).is_complete
    for changes in ({"page_size": 1}, {"prefill_attention_backend": "fa3"}, {"enable_torch_compile": True}):
        assert not KernelRecord(replace(arguments, **changes), "model", 0, CPU).is_complete
    assert not KernelRecord(arguments, "model", 1, CPU).is_complete
    assert not KernelRecord(arguments, "another", 0, CPU).is_complete


def test_the_record_is_of_these_sources(arguments: ServerArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sources" / "layers" / "kernel.cu"
    source.parent.mkdir(parents=True)
    source.write_text("int a;")
    monkeypatch.setattr(srt, "__path__", [str(tmp_path / "sources")])
    monkeypatch.setattr(kernel_record, "_sources", kernel_record._sources.__wrapped__)
    record = KernelRecord(arguments, "model", 0, CPU)
    record.record_complete()
    assert record.is_complete
    source.write_text("int b;")
    assert not record.is_complete


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "SRT_CACHE_DIR"])
def test_the_record_goes_where_either_folder_of_kernels_goes(
    arguments: ServerArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    record = KernelRecord(arguments, "model", 0, CPU)
    record.record_complete()
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert not record.is_complete
    monkeypatch.setenv("SRT_CACHE_DIR", "/dev/null/none")
    assert not record.is_complete


@pytest.mark.parametrize(
    ("windows", "count"), [((None,) * 9, 2), ((8, 8, 8, None, 8, 8, 8, None), 4), ((None, 8), 2), ((None,), 2), ((), 2)]
)
def test_so_many_layers_have_all_kernels_among_them(windows: tuple[int | None, ...], count: int) -> None:
    layers = [replace(PLAIN, attention=replace(PLAIN.self_attention, window=window)) for window in windows]
    assert num_distinct_layers(layers, [None] * len(layers)) == count


@pytest.mark.parametrize(
    ("sizes", "count"), [((8, 8, 4, 4, 4), 4), ((8, 4, 8, 4, 8, 4), 4), ((8, 4, 8, 4, 8), 3), ((4, 4, 8), 3)]
)
def test_feed_forward_parts_have_other_kernels_where_a_layer_follows(sizes: tuple[int, ...], count: int) -> None:
    layers = [replace(PLAIN, feed_forward=FeedForward(size)) for size in sizes]
    assert num_distinct_layers(layers, [None] * len(layers)) == count


@pytest.mark.parametrize(("plain", "count"), [(r"re:.*layers\.3\.mlp", 5), (r"re:.*layers\.[0-5]\.mlp", 2)])
def test_layers_whose_weights_are_stored_otherwise_have_kernels_of_their_own(
    checkpoint: CheckpointFactory, plain: str, count: int
) -> None:
    config = ModelConfig.from_folder(checkpoint("qwen3", num_layers=6))
    formats = WeightFormats("fp8", LayerNames((plain,)), ((LayerNames(("re:.*",)), QUANTIZING["fp8"]),))
    with torch.device("meta"):
        model = CausalLM(replace(config, weight_formats=formats), single_rank(), TORCH_OPS)
    assert model.num_distinct_layers == count
