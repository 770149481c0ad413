"""The scheduler's counters in shared memory, and the lines about how the engine does, with an invented clock."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from srt.managers.process.run_files import ENGINE_STATE_PREFIX
from srt.managers.scheduler.engine_status import PUBLISH_S, STATUS_S, EngineStatus
from srt.protocol.messages import Scalar
from srt.utils.shared_numbers import SharedNumbers
from tests.support.full_disk import fill_disk
from tests.unit.managers.scheduler.scheduler_host import Host


class World:
    """An engine that makes a step of 10 ms with one token each time `run` counts one."""

    def __init__(self, run_dir: Path, interval: int | None = None) -> None:
        self.path = run_dir / f"{ENGINE_STATE_PREFIX}0"
        self.status = EngineStatus(run_dir, interval)
        counters = Host().scheduler.counters()
        assert counters is not None
        self.counters: dict[str, Scalar] = counters
        self.now = 1000.0
        self.status.publish(self.counters, self.now)

    def add(self, name: str, count: int) -> None:
        before = self.counters[name]
        assert isinstance(before, int)
        self.counters[name] = before + count

    def run(self, steps: int, running: int = 1) -> None:
        """So many steps in a tenth of a second each, and the counters published after each."""
        self.counters["num_running"] = running
        for _ in range(steps):
            for name, count in (("num_steps", 1), ("num_rows", 1), ("num_generated_tokens", 1), ("step_us", 10_000)):
                self.add(name, count)
            self.status.record_step(10_000)
            self.now += 0.1
            self.status.publish(self.counters, self.now)

    def idle(self, seconds: float) -> None:
        self.counters["num_running"] = 0
        self.now += PUBLISH_S
        self.status.publish(self.counters, self.now)
        self.now += seconds

    def value(self, name: str) -> float:
        numbers = SharedNumbers.open(self.path)
        assert numbers is not None
        return numbers.get(name, -1.0)


def test_counters_can_be_read_while_the_scheduler_does_something_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (world.value("num_steps"), world.value("num_total_pages")) == (0, 64)
    world.run(3)
    assert (world.value("num_steps"), world.value("step_ms_to_10"), world.value("step_ms_sum")) == (3, 3, 30)


def test_a_scheduler_that_takes_the_place_of_another_is_seen_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    World(tmp_path).run(3)
    seen = SharedNumbers.open(tmp_path / f"{ENGINE_STATE_PREFIX}0")
    assert seen is not None
    fill_disk(monkeypatch)
    World(tmp_path).run(1)
    assert seen.get("num_steps") == 1


def test_they_are_published_a_few_times_a_second_at_most(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.status.is_due(world.now + PUBLISH_S / 2)
    assert world.status.is_due(world.status.due_s)


def test_tokens_per_second_are_those_of_the_last_seconds_and_none_when_nothing_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(200)
    assert world.value("gen_throughput") == pytest.approx(10.0)
    world.idle(60.0)
    assert world.value("gen_throughput") == 0.0
    assert world.value("last_gen_throughput") == pytest.approx(10.0)


def test_the_hit_rate_is_that_of_the_latest_prompts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add("num_prompt_tokens", 100)
    world.add("num_cached_tokens", 25)
    world.run(1)
    assert world.value("cache_hit_rate") == 0.25
    world.idle(60.0)
    world.run(1)
    assert world.value("cache_hit_rate") == 0.25


def test_a_line_every_ten_seconds_tells_what_happened_in_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    with caplog.at_level(logging.INFO):
        world.run(int(STATUS_S * 10 * 3.5))
    assert len(caplog.records) == 3
    assert caplog.records[1].getMessage() == (
        "1 running, 0 waiting; 10.0 tokens/s generated, 0.0 of prompts; KV memory 0% in use, prefix hits 0%;"
        " 100 steps of 10.00 ms with 1.0 rows."
    )


def test_idle_time_does_not_count_and_makes_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    with caplog.at_level(logging.INFO):
        world.idle(3600.0)
        world.run(5)
        world.idle(3600.0)
        for _ in range(5):
            world.idle(60.0)
    (line,) = caplog.records
    assert "5 steps of 10.00 ms" in line.getMessage()
    assert 5.0 < line.fields["gen_throughput"] < 12.0  # type: ignore[attr-defined]


def test_a_line_can_be_had_every_so_many_steps_at_every_log_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, interval=4)
    with caplog.at_level(logging.ERROR, "srt"):
        caplog.handler.setLevel(logging.NOTSET)
        world.run(10)
    assert len(caplog.records) == 2
