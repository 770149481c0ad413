"""Graphs are captured one by one: those that steps have missed between steps, the others when there is nothing else to do."""

from __future__ import annotations

import pytest

from srt.managers.scheduler.scheduler import CAPTURE_AFTER_S, CAPTURE_REST_S
from srt.protocol.engine_work import CaptureGraph, InspectTables
from srt.protocol.messages import (
    Abort,
    ContinueGeneration,
    PauseGeneration,
    StepAck,
    StepPlan,
    StepResult,
    WorkDone,
    WorkPlan,
    int32_array,
)
from tests.unit.managers.scheduler.scheduler_host import Host, request, worker_hello

PROMPT = list(range(20))
NAMES = {CaptureGraph: "capture", InspectTables: "inspect"}


def kinds(host: Host) -> list[str]:
    return [NAMES[type(plan.work)] if isinstance(plan, WorkPlan) else "step" for plan in host.plans]


def capture(host: Host, num_left: int) -> None:
    """The workers do what is first in line: a capture."""
    plan = host.plans.popleft()
    assert isinstance(plan, WorkPlan)
    assert plan.work == CaptureGraph()
    host.worker._count(plan.step)
    for rank in range(host.tp_size):
        host.from_worker(WorkDone(plan.step, rank, {"num_left": num_left}), rank)


def run_steps(host: Host) -> None:
    """Until something else than a step is in line, or nothing."""
    host.tick()
    while host.plans and isinstance(host.plans[0], StepPlan):
        host.answer()
        host.tick()
        host.acknowledge()
    host.tick()


def test_what_a_step_has_missed_is_captured_between_steps_and_only_that() -> None:
    host = Host(hello=worker_hello(num_graphs=3))
    host.tick()
    assert kinds(host) == []
    host.say(request(1, PROMPT, max_new=12))
    host.now = 100.0
    host.tick()
    assert kinds(host) == ["step", "step"]
    host.answer()
    host.tick()
    assert kinds(host) == ["step", "step"], "nobody misses a graph"
    host.answer(wants_capture=True)
    host.tick()
    assert kinds(host) == ["step", "step", "capture"]
    host.answer(wants_capture=True)
    host.tick()
    assert kinds(host) == ["step", "capture", "step"], "only one capture at a time"
    host.answer(wants_capture=True)
    host.tick()
    capture(host, 2)
    host.tick()
    assert kinds(host) == ["step", "step"], "the steps before a capture have not seen it"
    host.answer(wants_capture=True)
    host.tick()
    assert kinds(host) == ["step", "step", "capture"]
    host.answer()
    host.answer()
    host.tick()
    capture(host, 1)
    run_steps(host)
    assert kinds(host) == []
    assert host.ends()[1, 0].reason == "length"
    assert host.value("num_graphs_left") == 1


def test_an_idle_server_captures_after_a_moment() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    assert host.scheduler.next_tick_s == CAPTURE_AFTER_S
    host.now = CAPTURE_AFTER_S
    for num_left in (1, 0):
        host.tick()
        assert kinds(host) == ["capture"]
        capture(host, num_left)
        assert host.value("num_graphs_left") == num_left
    host.tick()
    assert kinds(host) == []
    assert host.scheduler.next_tick_s != CAPTURE_AFTER_S


def test_a_rest_after_the_last_step_keeps_captures_from_a_client_that_asks_again_at_once() -> None:
    host = Host(hello=worker_hello(num_graphs=2))
    for rid in range(1, 6):
        host.now += 0.5 * CAPTURE_REST_S
        host.say(request(rid, PROMPT))
        run_steps(host)
        assert kinds(host) == []
        assert host.ends()[rid, 0].reason == "length"
    assert host.scheduler.next_tick_s == host.now + CAPTURE_REST_S
    host.now += CAPTURE_REST_S
    host.tick()
    assert kinds(host) == ["capture"]


def test_a_request_that_comes_in_between_waits_for_one_capture() -> None:
    host = Host(hello=worker_hello(num_graphs=3))
    host.now = CAPTURE_AFTER_S
    host.tick()
    host.say(request(1, PROMPT))
    host.tick()
    assert kinds(host) == ["capture", "step", "step"]
    capture(host, 2)
    run_steps(host)
    assert kinds(host) == []
    assert host.ends()[1, 0].reason == "length"


def test_nobody_captures_while_a_step_is_out_though_its_requests_have_left() -> None:
    host = Host(hello=worker_hello(num_graphs=1))
    host.say(request(1, PROMPT))
    host.tick()
    host.say(Abort(1, -1))
    host.now = 100.0
    host.tick()
    assert kinds(host) == ["step", "step"]
    run_steps(host)
    assert host.scheduler.next_tick_s == 100.0 + CAPTURE_REST_S


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_leaves_time_for_captures(mode: str) -> None:
    host = Host(hello=worker_hello(num_graphs=2))
    host.say(request(1, PROMPT, max_new=9))
    host.tick()
    host.answer()
    host.say(PauseGeneration(1, mode))
    host.tick()
    host.now = 100.0
    host.tick()
    assert kinds(host) == ["step"]
    run_steps(host)
    assert host.scheduler.next_tick_s == 100.0 + CAPTURE_REST_S
    host.now += CAPTURE_REST_S
    host.tick()
    assert kinds(host) == ["capture"]
    host.say(ContinueGeneration(2))
    host.tick()
    capture(host, 1)
    host.now = 200.0
    run_steps(host)
    assert kinds(host) == []
    assert host.ends()[1, 0].reason == "length"


def test_what_worker_0_misses_behind_a_capture_is_not_forgotten_when_a_slower_rank_has_captured() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    host.say(request(1, PROMPT, max_new=20))
    host.tick()
    host.answer(wants_capture=True)
    host.tick()
    host.answer()
    host.answer()
    host.tick()
    assert kinds(host) == ["capture", "step", "step"]
    plan, step = host.plans.popleft(), host.plans.popleft()
    host.from_worker(WorkDone(plan.step, 0, {"num_left": 1}), 0)
    host.from_worker(StepResult(step.step, int32_array([1]), int32_array([5]), 5, [], 0, wants_capture=True), 0)
    host.from_worker(WorkDone(plan.step, 1, {"num_left": 1}), 1)
    host.from_worker(StepAck(step.step, 1, 5, 0), 1)
    host.tick()
    assert kinds(host) == ["step", "step", "capture"]
    assert host.fatal is None


def test_who_is_still_compiling_is_asked_again_after_a_rest() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    host.now = 100.0
    host.tick()
    capture(host, 2)
    host.tick()
    assert kinds(host) == []
    assert host.value("num_graphs_left") == 2
    assert host.scheduler.next_tick_s == 100.0 + CAPTURE_REST_S
    host.now += CAPTURE_REST_S
    host.tick()
    capture(host, 1)
    assert host.value("num_graphs_left") == 1
    assert host.fatal is None


def test_who_is_still_compiling_is_not_asked_with_each_step_that_misses_a_graph() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    host.say(request(1, PROMPT, max_new=40))
    host.tick()
    host.answer(wants_capture=True)
    host.tick()
    host.answer()
    host.answer()
    capture(host, 2)
    for _ in range(5):
        host.tick()
        assert kinds(host) == ["step", "step"]
        host.answer(wants_capture=True)
    host.now += CAPTURE_REST_S
    host.tick()
    assert "capture" in kinds(host)


def test_one_rank_alone_cannot_wait() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    host.now = 1.0
    host.tick()
    plan = host.plans.popleft()
    host.from_worker(WorkDone(plan.step, 0, {"num_left": 2}), 0)
    host.from_worker(WorkDone(plan.step, 1, {"num_left": 1}), 1)
    assert host.fatal == "Worker 1 has 1 graphs left to capture, not 2."


def test_a_rank_that_has_other_graphs_than_the_others_ends_the_replica() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=2))
    host.now = 1.0
    host.tick()
    plan = host.plans.popleft()
    host.from_worker(WorkDone(plan.step, 0, {"num_left": 1}), 0)
    host.from_worker(WorkDone(plan.step, 1, {"num_left": 0}), 1)
    assert host.fatal == "Worker 1 has 0 graphs left to capture, not 1."


def test_no_more_is_captured_once_a_capture_has_failed_on_all_ranks() -> None:
    host = Host(tp_size=2, hello=worker_hello(num_graphs=7))
    host.now = 1.0
    host.tick()
    capture(host, 0)
    assert host.value("num_graphs_left") == 0
    host.now = 100.0
    host.say(request(1, PROMPT))
    host.run()
    assert kinds(host) == []
    assert host.fatal is None


def test_workers_without_graphs_are_never_asked_to_capture() -> None:
    host = Host()
    host.now = 100.0
    host.say(request(1, PROMPT))
    host.run()
    assert all(isinstance(plan, StepPlan) for plan in host.plans)
    assert host.ends()[1, 0].reason == "length"
