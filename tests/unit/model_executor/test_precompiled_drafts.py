"""A server that drafts has the kernels of its first steps and of its graphs compiled ahead, in each variant that these launch."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.kernels.build.precompile import Compilers, precompiling
from srt.model_executor.graphs import verify_runner
from srt.model_executor.graphs.cuda_graph_runner import Work
from srt.model_executor.graphs.graph_kernels import Graph, GraphKernels
from srt.model_executor.graphs.row_tokens import CAPTURED_KINDS
from srt.model_executor.graphs.sized_graphs import SizedGraphs
from srt.model_executor.graphs.verify_runner import VerifyRunner
from srt.model_executor.loaded_model import LoadedModel, load_model
from srt.model_executor.startup import precompile as precompile_module
from srt.model_executor.startup import start_drafter
from srt.model_executor.startup.kernel_record import KernelRecord
from srt.model_executor.startup.precompile import drafter_key, precompile
from srt.model_executor.startup.start_drafter import draft_sizes, load_drafter, verify_sizes
from srt.model_executor.startup.start_runner import build_runner
from srt.model_executor.startup.warm_up import warm_up
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.eagle3_heads import make_head
from tests.support.fake_gpu import AskedKernels, launch_kernels_of_gpus
from tests.support.mtp_checkpoint import add_mtp_layer
from tests.support.ranks import CPU, single_rank
from tests.support.recorder import Recorder

ALGORITHMS = {  # the kinds of graphs that each has beside those of a plain server
    "NGRAM": {"verify"},
    "STANDALONE": {"verify", "draft"},
    "EAGLE3": {"verify", "head"},
    "NEXTN": {"verify", "head"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test caches of its own, so that it finds no kernel compiled."""
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache" / "triton"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> AskedKernels:
    return launch_kernels_of_gpus(monkeypatch)


def load(
    checkpoint: CheckpointFactory, algorithm: str, tmp_path: Path, num_layers: int = 2
) -> tuple[LoadedModel, LoadedModel | None]:
    """A model of a few layers, and what drafts for it, which differs from it in its sizes."""
    folder, draft = checkpoint("qwen3", num_layers=num_layers), None
    if algorithm == "STANDALONE":
        draft = checkpoint("llama", num_layers=num_layers)
    elif algorithm == "EAGLE3":
        draft = make_head(folder, tmp_path / "head", draft_vocab=96)
    elif algorithm == "NEXTN":
        folder = add_mtp_layer(checkpoint("deepseek_v3", tied=False, num_layers=num_layers), tmp_path / "mtp")
        draft = folder
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        attention_backend="triton",
        max_total_tokens=8192,
        max_running_requests=48,
        piecewise_cuda_graph_max_tokens=64,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=None if draft is None else str(draft),
    )
    config = ModelConfig.from_folder(folder)
    return load_drafter(load_model(args, config, str(folder), single_rank(), CPU))


def late_kernels(
    loaded: LoadedModel, small: LoadedModel | None, kernels: GraphKernels, asked: AskedKernels
) -> dict[Graph, set[str]]:
    """Capture all graphs, in order, and return the variants of kernels that each launches and does not wait for."""
    of_graphs = {graph: {future.result(240) for future in futures} for graph, futures in kernels._kernels.items()}
    late: dict[Graph, set[str]] = {}
    with precompiling(Compilers(1)):  # launches are noted, and what they would write reads as zeros
        graphs = build_runner(loaded, kernels, Recorder(), small=small).graphs
        asked.pop()
        while graphs.num_left:
            graph = graphs._next_runner.next_graph
            graphs.capture_next()
            late[graph] = asked.pop() - of_graphs.get(graph, set())
    return late


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_graph_waits_for_all_kernels_that_it_launches(
    checkpoint: CheckpointFactory, tmp_path: Path, asked: AskedKernels, algorithm: str
) -> None:
    loaded, small = load(checkpoint, algorithm, tmp_path)
    kernels = precompile(loaded, small)
    names = list(kernels._kernels)
    assert all(kernels._kernels.values())
    assert {graph[0] for graph in names if isinstance(graph, tuple) and isinstance(graph[0], str)} == ALGORITHMS[
        algorithm
    ]
    late = late_kernels(loaded, small, kernels, asked)
    assert list(late) == names, "kernels are compiled in the order in which graphs need them"
    assert {graph: some for graph, some in late.items() if some} == {}


class WarmedUp(Recorder):
    """Notes the kernels that captures launch without having launched them in their warm-ups, and the numbers of launches of both."""

    def __init__(self, asked: AskedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._asked, self._ask, self._num_launched = asked, asked.ask, 0
        self.late = set[str]()
        self.num_launched: list[tuple[int, int]] = []
        monkeypatch.setattr(asked, "ask", self._count)

    def _count(self, *given: Any, **options: Any) -> None:
        self._num_launched += 1
        self._ask(*given, **options)

    def launched_by(self, work: Work) -> tuple[set[str], int]:
        self._asked.pop()
        before = self._num_launched
        work()
        return self._asked.pop(), self._num_launched - before

    def __call__(self, work: Work, warm_up: Work | None = None) -> Work:
        assert warm_up is not None
        (warmed, num_warmed), (launched, num_launched) = self.launched_by(warm_up), self.launched_by(work)
        self.late |= launched - warmed
        self.num_launched.append((num_warmed, num_launched))
        return work


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "EAGLE3"])
def test_a_warm_up_of_few_layers_launches_each_kernel_of_the_capture(
    checkpoint: CheckpointFactory, tmp_path: Path, asked: AskedKernels, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    loaded, small = load(checkpoint, algorithm, tmp_path, num_layers=6)
    capture = WarmedUp(asked, monkeypatch)
    with precompiling(Compilers(1)), torch.inference_mode():
        runner = build_runner(loaded, GraphKernels(), capture, small=small)
        for graphs in [one for one in runner.graphs._runners if isinstance(one, SizedGraphs)]:
            capture.num_launched.clear()
            graphs.capture_next()
            whole = [few for few, many in capture.num_launched if few == many]
            assert len(whole) == len(CAPTURED_KINDS) + 2 * (graphs.name == "head"), "draws, and a head's one layer"
            assert all(2 * few < many for few, many in capture.num_launched if few != many), "two of six layers"
            while graphs.num_left:
                graphs.capture_next()
    assert capture.late == set()
    features = runner.state.token_to_kv_pool.features
    assert (None if features is None else features.taps) == (None if loaded.head is None else loaded.head.taps)


def test_kernels_that_were_not_foreseen_are_told_from_the_others(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: AskedKernels
) -> None:
    """By graphs of which some read the tokens of a row together that were compiled to read them one by one."""
    loaded, small = load(checkpoint, "NGRAM", tmp_path)
    kernels = precompile(loaded, small)
    monkeypatch.setattr(verify_runner, "LEAST_TOGETHER", 24)
    late = late_kernels(loaded, small, kernels, asked)
    assert [graph for graph, some in late.items() if some] == [("verify", 32), ("verify", 24)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_start_waits_for_all_kernels_of_its_first_steps(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: AskedKernels, algorithm: str
) -> None:
    loaded, small = load(checkpoint, algorithm, tmp_path)
    waited_for = set[str]()
    monkeypatch.setattr(precompile_module, "_precompile_later_steps", lambda *parts: waited_for.update(asked.pop()))
    kernels = precompile(loaded, small)
    asked.pop()
    with precompiling(Compilers(1)):
        warm_up(build_runner(loaded, kernels, Recorder(), small=small))
    launched = asked.pop()
    assert launched
    assert launched - waited_for == set()


def test_a_start_warms_up_few_layers_of_a_smaller_model(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: AskedKernels
) -> None:
    loaded, small = load(checkpoint, "STANDALONE", tmp_path, num_layers=6)
    counted = WarmedUp(asked, monkeypatch)
    found = []
    for is_whole in (False, True):
        with precompiling(Compilers(1)):
            runner = build_runner(loaded, GraphKernels(), Recorder(), small=small)
            if is_whole:
                monkeypatch.setattr(runner, "warming_up", nullcontext)
            found.append(counted.launched_by(partial(warm_up, runner)))
    (few_kernels, num_few), (kernels, num_launched) = found
    assert few_kernels == kernels
    assert num_few < num_launched


def test_the_record_is_of_what_drafts_too(checkpoint: CheckpointFactory, tmp_path: Path, asked: AskedKernels) -> None:
    del asked
    parts = [load(checkpoint, algorithm, tmp_path) for algorithm in ALGORITHMS]
    plain = replace(parts[0][0].args, speculative_algorithm=None)
    records = [KernelRecord(plain, "model", 0, CPU)]
    for loaded, small in parts:
        records.append(KernelRecord(loaded.args, ("model", drafter_key(loaded, small)), 0, CPU))
        longer = replace(loaded.args, speculative_num_draft_tokens=3)
        records.append(KernelRecord(longer, ("model", drafter_key(loaded, small)), 0, CPU))
    loaded, _ = parts[1]
    records.append(KernelRecord(loaded.args, ("model", drafter_key(loaded, loaded)), 0, CPU))
    for record in records:
        assert not record.is_complete
        record.record_complete()
    assert all(record.is_complete for record in records)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_memory_of_what_drafts_is_gone_when_all_is_asked_for(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, asked: AskedKernels
) -> None:
    """Not only when garbage is collected: the KV memory gets what is left then."""
    loaded, small = load(checkpoint, algorithm, tmp_path)
    logits = list[weakref.ref[torch.Tensor]]()

    def noted(*parts: Any) -> VerifyRunner:
        verifier = VerifyRunner(*parts)
        logits.append(weakref.ref(verifier.logits))
        return verifier

    monkeypatch.setattr(start_drafter, "VerifyRunner", noted)
    gc.disable()
    try:
        precompile(loaded, small)
        assert [one() for one in logits] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("row_tokens", "max_tokens", "sizes"),
    [
        (4, 256, [4, 8, 16, 24, 32, 64, 96, 128, 192, 256]),
        (5, 256, [5, 10, 16, 24, 32, 64, 96, 128, 192, 256]),
        (8, 256, [8, 16, 24, 32, 64, 96, 128, 192, 256]),
        (4, 24, [4, 8, 16, 24]),
        (4, 4, [4]),
        (200, 256, [16, 24, 32, 64, 96, 128, 192, 200, 256]),
    ],
)
def test_one_row_and_two_with_all_drafts_are_verified_without_padding(
    row_tokens: int, max_tokens: int, sizes: list[int]
) -> None:
    assert verify_sizes(row_tokens, max_tokens) == sizes


@pytest.mark.parametrize(
    ("num_slots", "max_tokens", "sizes"),
    [(256, 256, [1, 4, 8, 16, 32, 64, 128]), (6, 24, [1, 4, 6]), (1, 4, [1]), (48, 192, [1, 4, 8, 16, 32, 48])],
)
def test_no_more_rows_draft_than_a_step_can_verify(num_slots: int, max_tokens: int, sizes: list[int]) -> None:
    """A row that drafts has two tokens or more."""
    assert draft_sizes(num_slots, max_tokens) == sizes
