"""On a GPU the first steps and all graphs find their kernels compiled, by threads that compiled them at the same time."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from srt.kernels.build import cuda_source
from srt.model_executor.startup.warm_up import warm_up
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.runners import make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
REAL_CONFIG, HEAD_CONFIG = CONFIGS / "qwen3-0.6b.json", CONFIGS / "qwen3-8b-eagle3.json"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What is compiled, and whether by the main thread, without caches on the disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    found: list[tuple[str, bool]] = []

    def note(*, src: object, cache_hit: bool, **rest: object) -> None:
        if not cache_hit:
            found.append((str(getattr(src, "name", src)), threading.current_thread() is threading.main_thread()))

    compile_source = cuda_source.compile_source

    def compile_and_note(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
        found.append((str(dict(constants)), threading.current_thread() is threading.main_thread()))
        return compile_source(source, constants, architecture)

    monkeypatch.setattr(knobs.compilation, "listener", note)
    monkeypatch.setattr(cuda_source, "compile_source", compile_and_note)
    return found


def make_real_shape(folder: Path, **changes: Any) -> Path:
    config = {**json.loads(REAL_CONFIG.read_text()), "num_hidden_layers": 4, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_start_without_caches_compiles_nothing_in_its_steps(
    tmp_path: Path, compiled: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """In float16, which other tests leave aside: what this process has compiled before is not compiled again."""
    make_real_shape(tmp_path)
    with caplog.at_level(logging.WARNING):
        runner = make_runner(tmp_path, 16, device=CUDA, dtype="float16", load_format="dummy")
    warm_up(runner)
    assert compiled
    # Kernels in CUDA's C++ that say whether others of their kind will run are compiled before.
    assert [name for name, is_here in compiled if is_here and "{" not in name] == []
    requests = PlanDriver(runner, 16, share=True)
    requests.run([Job(list(range(200)), greedy(4))])
    before = len(compiled)
    requests.run([Job(list(range(205)), greedy(4))])  # a chunk of a few tokens, behind what the two have in common
    assert [name for name, is_here in compiled[before:] if is_here] == []
    assert not [one for one in caplog.records if "one after the other" in one.getMessage()]


def test_graphs_compile_nothing_and_wait_for_those_who_do(tmp_path: Path, compiled: list[tuple[str, bool]]) -> None:
    """In bfloat16, with widths that other tests do not have: so products have kernels of their own."""
    make_real_shape(tmp_path, hidden_size=1280, intermediate_size=3328)
    runner = make_runner(tmp_path, 16, device=CUDA, dtype="bfloat16", load_format="dummy", max_running_requests=256)
    warm_up(runner)
    precompiled = runner.graphs._kernels
    assert precompiled._kernels
    sizes = []
    while runner.graphs.num_left:
        kernels = precompiled._kernels[runner.graphs._next_runner.next_graph]
        wait(kernels)
        before = len(compiled)
        sizes.append(runner.graphs.capture_next())
        assert [name for name, is_here in compiled[before:] if is_here] == []
    assert sizes[0] == 256
    assert 0 not in sizes
    assert any("STAGES" in name for name, _ in compiled), "kernels in CUDA's C++ are among them"
    assert precompiled._compilers is not None
    precompiled._compilers._threads.shutdown()  # once they have compiled what larger steps without a graph need
    again = make_runner(tmp_path, 16, device=CUDA, dtype="bfloat16", load_format="dummy", max_running_requests=256)
    assert again.graphs._kernels._compilers is None


def options_of(algorithm: str, folder: Path) -> dict[str, Any]:
    """Options of a server that drafts, for the shape that `make_real_shape` has written to this folder."""
    options: dict[str, Any] = {"speculative_algorithm": algorithm}
    if algorithm == "STANDALONE":
        (folder / "draft").mkdir()
        options["speculative_draft_model_path"] = str(make_real_shape(folder / "draft", hidden_size=768))
    elif algorithm == "EAGLE3":
        (folder / "head").mkdir()
        config = json.loads(HEAD_CONFIG.read_text()) | {"hidden_size": 1280, "intermediate_size": 3328}
        (folder / "head" / "config.json").write_text(json.dumps(config))
        options["speculative_draft_model_path"] = str(folder / "head")
    return options


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "EAGLE3"])
def test_graphs_of_drafts_compile_nothing_either(
    tmp_path: Path, compiled: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    make_real_shape(tmp_path, hidden_size=1280, intermediate_size=3328, num_hidden_layers=8)
    options = {"cuda_graph_bs": (1, 64), "piecewise_cuda_graph_max_tokens": 0, **options_of(algorithm, tmp_path)}
    with caplog.at_level(logging.WARNING):
        runner = make_runner(
            tmp_path, 16, device=CUDA, dtype="bfloat16", load_format="dummy", max_running_requests=64, **options
        )
    assert not [one for one in caplog.records if "compiled ahead" in one.getMessage()]
    warm_up(runner)
    assert [name for name, is_here in compiled if is_here and "{" not in name] == []
    precompiled, before = runner.graphs._kernels, len(compiled)
    names = list(precompiled._kernels)
    assert names[0] == ("verify", 256)
    captured = []
    while runner.graphs.num_left:
        captured.append(runner.graphs._next_runner.next_graph)
        precompiled.wait(captured[-1])
        assert runner.graphs.capture_next()
        assert [name for name, is_here in compiled[before:] if is_here] == [], captured[-1]
    assert captured == names
