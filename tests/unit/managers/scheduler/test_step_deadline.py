"""The time that a step may take, with an invented clock."""

from __future__ import annotations

import pytest

from srt.managers.scheduler.step_deadline import StepDeadline
from srt.protocol.engine_work import (
    CaptureGraph,
    EngineWork,
    InspectTables,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    LoadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
)
from srt.protocol.messages import PageDelta, PlanSection, StepPlan, WorkPlan, int32_array


def plan(step: int, prompt_tokens: int = 0, decodes: int = 1) -> StepPlan:
    none = int32_array()
    chunks = [prompt_tokens] if prompt_tokens else []
    rows = int32_array(range(len(chunks)))
    section = PlanSection(
        [], [PageDelta(none, none, none)], rows, rows, int32_array(chunks), rows, int32_array(range(decodes))
    )
    return StepPlan(step, [section])


def test_nothing_is_due_while_nothing_was_sent_or_all_is_answered() -> None:
    deadline = StepDeadline(30.0, 2)
    assert deadline.due_s is None
    deadline.sent(plan(1), 5.0)
    deadline.answered(0, 1, 6.0)
    assert deadline.due_s == 35.0
    deadline.answered(1, 1, 7.0)
    assert deadline.due_s is None
    assert deadline.complaint(1000.0) is None


def test_the_time_of_a_step_begins_when_the_one_before_is_answered() -> None:
    deadline = StepDeadline(30.0, 1)
    deadline.sent(plan(1), 0.0)
    deadline.sent(plan(2), 1.0)
    deadline.answered(0, 1, 29.0)
    assert deadline.due_s == 59.0


def test_a_step_of_many_tokens_may_take_longer() -> None:
    deadline = StepDeadline(30.0, 1)
    deadline.sent(plan(1, prompt_tokens=1000, decodes=24), 0.0)
    assert deadline.due_s == 120.0


def test_a_capture_may_take_longer_since_it_may_compile_but_not_for_ever() -> None:
    deadline = StepDeadline(30.0, 1)
    deadline.sent(WorkPlan(1, CaptureGraph()), 0.0)
    assert deadline.complaint(299.9) is None
    assert deadline.complaint(300.0) is not None


@pytest.mark.parametrize(
    "work",
    [
        LoadWeights("new"),
        JoinUpdateGroup("group", "host", 1, 1, 2, ""),
        ReceiveWeights("group", ["norm"], ["F32"], [[1]], False),
        LeaveUpdateGroup("group"),
        ReleaseMemory(["weights"]),
        ResumeMemory(["weights"]),
    ],
)
def test_disks_and_trainers_may_take_long_but_not_for_ever(work: EngineWork) -> None:
    deadline = StepDeadline(30.0, 1)
    deadline.sent(WorkPlan(1, work), 0.0)
    assert deadline.complaint(1799.9) is None
    assert deadline.complaint(1800.0) is not None


def test_who_is_late_is_named_with_the_step_and_the_option() -> None:
    deadline = StepDeadline(30.0, 3)
    deadline.sent(WorkPlan(7, InspectTables()), 0.0)
    deadline.answered(1, 7, 1.0)
    assert deadline.complaint(29.9) is None
    assert deadline.complaint(30.0) == (
        "Workers 0, 2 have not answered step 7 (0 tokens) within 30 s (see --watchdog-timeout)."
    )


def test_nobody_is_late_for_the_time_in_which_this_process_was_stopped_itself() -> None:
    deadline = StepDeadline(30.0, 1)
    deadline.sent(plan(1), 0.0)
    deadline.excuse(600.0)
    assert deadline.complaint(601.0) is None
    assert deadline.due_s == 630.0


def test_a_step_is_nearly_over_after_two_thirds_of_its_time() -> None:
    deadline = StepDeadline(30.0, 1)
    assert not deadline.is_nearly_over(1000.0)
    deadline.sent(plan(1), 1000.0)
    assert not deadline.is_nearly_over(1019.0)
    assert deadline.is_nearly_over(1021.0)
