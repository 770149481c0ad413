"""What the host does for a step of decodes: it launches, and waits for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.warm_up import warm_up
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
    warm_up(made)
    run_section(made, PlanSection(admissions, [pages], SLOTS, 0 * ones, ones, ones, EMPTY))
    run_section(made, decodes())
    return made


def decodes() -> PlanSection:
    return PlanSection([], [PageDelta(EMPTY, EMPTY, EMPTY)], EMPTY, EMPTY, EMPTY, EMPTY, SLOTS)


def launch_ahead(runner: ModelRunner, sections: Iterable[PlanSection]) -> list[list[int]]:
    """Ids of these steps, each launched before those of the last are read."""
    ids, before = [], None
    for section in sections:
        step = runner.sample(runner.execute(section))
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
        runner.graphs.capture_all()
    launch_ahead(runner, [decodes()] * STEPS)
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.zeros(1, device=CUDA).item()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, waiting_is_an_error():
        ids = launch_ahead(runner, [decodes()] * STEPS)
    assert [len(of_step) for of_step in ids] == [ROWS] * STEPS
    on_device = [event.key for event in profile.key_averages()]
    assert any("store_draws" in name for name in on_device), on_device
    assert [name for name in on_device if "Memcpy" in name] == []
    if captures:  # a graph of kernels alone is launched in one go
        assert [name for name in on_device if name.startswith("Memset")] == []


def begin(runner: ModelRunner, pages_each: int) -> None:
    """Rows of 11, 12, … tokens, with their first pages: row r has pages r, r + ROWS, …"""
    runner.reset()
    lengths, zeros, ones = int32_array(range(11, 11 + ROWS)), int32_array([0] * ROWS), int32_array([1] * ROWS)
    spec = SamplingSpec(4 * STEPS, temperature=0.6)
    prompts = [int32_array(range(7, 7 + length)) for length in lengths.tolist()]
    admissions = [Admission(s, prompts[s], len(prompts[s]), 0, s, spec, LogprobSpec()) for s in range(ROWS)]
    numbers = int32_array([row + number * ROWS for row in range(ROWS) for number in range(pages_each)])
    pages = PageDelta(SLOTS, pages_each * ones, numbers)
    run_section(runner, PlanSection(admissions, [pages], SLOTS, zeros, lengths, ones, EMPTY))


def decodes_that_begin_pages() -> Iterator[PlanSection]:
    """Of the rows that `begin` has left with one page each: one after the other needs its second."""
    for step in range(STEPS):
        row = int32_array([ROWS - step] if 1 <= step <= ROWS else [])
        yield PlanSection([], [PageDelta(row, row * 0 + 1, row + ROWS)], EMPTY, EMPTY, EMPTY, EMPTY, SLOTS)


@pytest.mark.parametrize("captures", [False, True])
def test_pages_that_rows_begin_are_told_without_a_copy(runner: ModelRunner, captures: bool) -> None:
    if captures:
        runner.graphs.capture_all()
    begin(runner, 2)
    expected = launch_ahead(runner, [decodes()] * STEPS)
    tables = runner.state.req_to_token_pool.page_table[:ROWS, :2].tolist()
    assert tables == [[row, row + ROWS] for row in range(ROWS)]
    begin(runner, 1)
    steps = decodes_that_begin_pages()
    run_section(runner, next(steps))  # whose slots are copied
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, waiting_is_an_error():
        found = launch_ahead(runner, steps)
    assert found == expected[1:]
    assert runner.state.req_to_token_pool.page_table[:ROWS, :2].tolist() == tables
    assert [event.key for event in profile.key_averages() if "Memcpy" in event.key] == []
