"""What the host does for a step of decodes: it launches, and waits for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from tests.support.plan_driver import run_section
from tests.support.runners import make_runner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
REAL_CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-0.6b.json"
ROWS, STEPS = 5, 6
EMPTY, SLOTS = int32_array(), int32_array(range(ROWS))


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    """With rows that have decoded a token."""
    config = {**json.loads(REAL_CONFIG.read_text()), "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = make_runner(tmp_path, 16, device=CUDA, dtype="bfloat16", load_format="dummy", cuda_graph_bs=(8,))
    ones = int32_array([1] * ROWS)
    spec = SamplingSpec(4 * STEPS, temperature=0.6)
    admissions = [Admission(slot, int32_array([7]), 1, 0, slot, spec, LogprobSpec()) for slot in range(ROWS)]
    pages = PageDelta(SLOTS, 2 * ones, int32_array(range(2 * ROWS)))
    made.warm_up()
    run_section(made, PlanSection(admissions, [pages], SLOTS, 0 * ones, ones, ones, EMPTY))
    run_section(made, decodes())
    return made


def decodes() -> PlanSection:
    return PlanSection([], [PageDelta(EMPTY, EMPTY, EMPTY)], EMPTY, EMPTY, EMPTY, EMPTY, SLOTS)


def launch_ahead(runner: ModelRunner, count: int) -> list[list[int]]:
    """Ids of so many steps, each launched before those of the last are read."""
    ids, before = [], None
    for _ in range(count):
        step = runner.sample(runner.execute(decodes()))
        if before is not None:
            ids.append(before.result().ids.tolist())
        before = step
    assert before is not None
    return [*ids, before.result().ids.tolist()]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("captures", [False, True])
def test_steps_of_the_same_rows_wait_for_nothing_and_copy_nothing(runner: ModelRunner, captures: bool) -> None:
    if captures:
        runner.capture_graphs()
    launch_ahead(runner, STEPS)
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.zeros(1, device=CUDA).item()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, waiting_is_an_error():
        ids = launch_ahead(runner, STEPS)
    assert [len(of_step) for of_step in ids] == [ROWS] * STEPS
    on_device = [event.key for event in profile.key_averages()]
    assert any("store_draws" in name for name in on_device), on_device
    assert [name for name in on_device if "Memcpy" in name] == []
    if captures:  # a graph of kernels alone is launched in one go
        assert [name for name in on_device if name.startswith("Memset")] == []
