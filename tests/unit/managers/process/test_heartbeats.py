"""Signs of life, and what is concluded from their age."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.managers.process.heartbeats import STUCK_S, UNHEALTHY_S, HeartbeatReader, HeartbeatWriter, as_json
from tests.support.full_disk import fill_disk

WORKER_STUCK_S = 100.0


def trouble(run_dir: Path, now_s: float, frontend: str = "frontend 0") -> str | None:
    reader = HeartbeatReader(run_dir, WORKER_STUCK_S)
    return reader.trouble(reader.read(now_s), frontend)


def test_who_gives_signs_is_healthy_and_who_falls_silent_is_not(tmp_path: Path) -> None:
    worker, scheduler = HeartbeatWriter(tmp_path, "worker 0"), HeartbeatWriter(tmp_path, "scheduler 0")
    assert HeartbeatReader(tmp_path, WORKER_STUCK_S).read(5.0) == []
    worker.beat(100.0)
    scheduler.beat(100.0)
    assert trouble(tmp_path, 101.0) is None
    scheduler.beat(101.0 + UNHEALTHY_S)
    assert trouble(tmp_path, 101.0 + UNHEALTHY_S) == "Worker 0 has given no sign of life for 6 s."
    worker.beat(102.0 + UNHEALTHY_S)
    assert trouble(tmp_path, 102.0 + UNHEALTHY_S) is None


def test_who_gives_signs_but_makes_no_progress_is_not_healthy(tmp_path: Path) -> None:
    worker, scheduler = HeartbeatWriter(tmp_path, "worker 0"), HeartbeatWriter(tmp_path, "scheduler 0")
    worker.beat(100.0, age_s=STUCK_S + 1)  # a step of many tokens
    scheduler.beat(100.0)
    assert trouble(tmp_path, 100.5) is None
    worker.beat(200.0, age_s=WORKER_STUCK_S + 1)
    scheduler.beat(200.0)
    assert trouble(tmp_path, 200.5) == "Worker 0 has made no progress for 101 s."
    worker.beat(300.0)
    scheduler.beat(300.0, age_s=STUCK_S + 1)
    assert trouble(tmp_path, 300.5) == "Scheduler 0 has made no progress for 11 s."
    scheduler.beat(300.0, is_overdue=True)
    assert trouble(tmp_path, 300.5) == "Scheduler 0 waits for a step that takes too long."


def test_who_should_give_signs_and_has_left_none_is_in_trouble(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, "scheduler 0").beat(100.0)
    HeartbeatWriter(tmp_path, "worker 0")
    reader, expected = HeartbeatReader(tmp_path, WORKER_STUCK_S), ["scheduler 0", "worker 0"]
    sentence = reader.trouble(reader.read(100.5), "frontend 0", expected)
    assert sentence == "Worker 0 has left no sign of life."
    HeartbeatWriter(tmp_path, "worker 0").beat(100.0)
    assert reader.trouble(reader.read(100.5), "frontend 0", expected) is None
    for path in tmp_path.iterdir():
        path.unlink()
    assert reader.trouble(reader.read(100.5), "frontend 0", expected) is None
    assert reader.trouble(reader.read(110.5), "frontend 0", expected) is not None


def test_other_frontends_do_not_matter(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, "frontend 0").beat(100.0)
    HeartbeatWriter(tmp_path, "frontend 1").beat(1.0)
    assert trouble(tmp_path, 100.0, "frontend 0") is None
    assert trouble(tmp_path, 100.0, "frontend 1") is not None


def test_a_process_that_takes_the_place_of_another_speaks_for_itself(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, "worker 0").beat(100.0)
    reader = HeartbeatReader(tmp_path, WORKER_STUCK_S)
    assert [status.silent_s for status in reader.read(150.0)] == [50.0]
    HeartbeatWriter(tmp_path, "worker 0").beat(149.0)
    assert [status.silent_s for status in reader.read(150.0)] == [1.0]
    (told,) = as_json(reader.read(150.0)).values()
    assert (told["silent_s"], told["progress_age_s"]) == (1.0, 0.0)


def test_a_process_that_takes_the_place_of_another_is_seen_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HeartbeatWriter(tmp_path, "worker 0").beat(100.0, age_s=WORKER_STUCK_S + 1)
    reader = HeartbeatReader(tmp_path, WORKER_STUCK_S)
    assert reader.trouble(reader.read(150.0), "frontend 0") is not None
    fill_disk(monkeypatch)
    HeartbeatWriter(tmp_path, "worker 0").beat(149.0)
    assert reader.trouble(reader.read(150.0), "frontend 0") is None
    assert list(as_json(reader.read(150.0))) == ["worker 0"]


def test_without_the_folder_nobody_sees_the_signs(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "gone", "worker 0").beat(1.0)
    assert HeartbeatReader(tmp_path / "gone", WORKER_STUCK_S).read(2.0) == []
