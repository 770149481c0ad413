"""On a GPU the first steps find all of Triton's kernels compiled, by threads that compiled them at the same time."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
from triton import knobs

from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.runners import make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
REAL_CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-0.6b.json"


def test_a_start_without_caches_compiles_nothing_in_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In float16, which other tests leave aside: what this process has compiled before is not compiled again."""
    config = {**json.loads(REAL_CONFIG.read_text()), "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    compiled: list[tuple[str, bool]] = []

    def note(*, src: object, **rest: object) -> None:
        compiled.append((str(getattr(src, "name", src)), threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(knobs.compilation, "listener", note)
    with caplog.at_level(logging.WARNING):
        runner = make_runner(tmp_path, 16, device=CUDA, dtype="float16", load_format="dummy")
    runner.warm_up()
    assert compiled
    assert [name for name, is_here in compiled if is_here] == []
    requests = PlanDriver(runner, 16, share=True)
    requests.run([Job(list(range(200)), greedy(4))])
    before = len(compiled)
    requests.run([Job(list(range(205)), greedy(4))])  # a chunk of a few tokens, behind what the two have in common
    assert compiled[before:] == []
    assert not [one for one in caplog.records if "one after the other" in one.getMessage()]
