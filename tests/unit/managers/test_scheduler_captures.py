"""Graphs are captured one by one between steps, and the first token waits for none."""

from __future__ import annotations

from srt.managers.scheduler_state import CAPTURE_AFTER_S
from srt.protocol.messages import StepPlan, WorkDone, WorkPlan
from tests.unit.managers.scheduler_host import Host, request, worker_hello

PROMPT = list(range(20))


def kinds(host: Host) -> list[str]:
    return [plan.kind if isinstance(plan, WorkPlan) else "step" for plan in host.plans]


def capture(host: Host, num_left: int) -> None:
    """The workers do what is first in line: a capture."""
    plan = host.plans.popleft()
    assert isinstance(plan, WorkPlan)
    assert plan.kind == "capture"
    host.worker._count(plan.step)
    for rank in range(host.tp_size):
        host.from_worker(WorkDone(plan.step, rank, {"num_left": num_left}), rank)


def test_the_first_step_comes_before_the_first_capture_and_steps_go_on_between_captures() -> None:
    host = Host(hello=worker_hello(num_graphs=3))
    host.tick()
    assert kinds(host) == []
    host.say(request(1, PROMPT, max_new=9))
    host.tick()
    assert kinds(host) == ["step", "step"]
    host.answer()
    host.tick()
    assert kinds(host) == ["step", "step", "capture"]
    host.answer()
    host.tick()
    assert kinds(host) == ["step", "capture", "step"], "only one capture at a time"
    host.answer()
    capture(host, 2)
    host.tick()
    assert kinds(host) == ["step", "step", "capture"]
    num_left = 1
    while host.plans:
        if isinstance(host.plans[0], StepPlan):
            host.answer()
        else:
            capture(host, num_left)
            num_left -= 1
        host.tick()
        host.acknowledge()
    host.tick()
    assert num_left == -1
    assert host.ends()[1, 0].reason == "length"


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
