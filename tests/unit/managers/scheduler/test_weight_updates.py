"""Updates of the weights: what becomes of those who run, of what is cached, and of an update that fails."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from srt.protocol.engine_work import (
    EngineLedger,
    InspectWeights,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    LoadWeights,
    ReceiveWeights,
    SameWeights,
    SetWeightVersion,
    UpdateWeights,
    WeightsSource,
    WeightVersion,
)
from srt.protocol.messages import (
    ContinueGeneration,
    ControlReply,
    FrontendHello,
    PauseGeneration,
    StepPlan,
    WorkPlan,
)
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, expected_ids, request

MADE = request(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_new=9)
NEW = LoadWeights("new")
UPDATED = EngineLedger(weights=WeightsSource("new", "those of new"), weight_version="two")


def update(call: int = 7, *, aborts: bool = False, work: LoadWeights = NEW) -> UpdateWeights:
    return UpdateWeights(call, work, "two", aborts)


def running(tp_size: int = 1) -> Host:
    """With a request that has a token, and a step in flight."""
    host = Host(tp_size)
    host.say(MADE)
    host.tick()
    host.answer()
    host.tick()
    return host


def reply(host: Host, call: int = 7) -> ControlReply:
    (found,) = [one for one in host.of_type(ControlReply) if one.call == call]
    return found


def admissions(host: Host) -> list[int]:
    """How many tokens the cache had of each admission."""
    return [admission.cached for plan in host.all_plans for admission in plan.admissions]


def test_no_step_is_planned_until_all_ranks_have_the_weights_and_then_all_is_computed_again() -> None:
    host = running(tp_size=2)
    host.say(update())
    host.tick()
    while isinstance(host.plans[0], StepPlan):
        host.answer()
        host.tick()
    (sent,) = host.plans
    assert isinstance(sent, WorkPlan) and sent.work == NEW
    done = host.worker.do(sent)
    host.from_worker(replace(done, rank=1), 1)
    host.tick()
    assert len(host.plans) == 1 and not [one for one in host.of_type(ControlReply) if one.call == 7]
    host.plans.clear()
    host.from_worker(done)
    host.run()
    assert (reply(host).ok, reply(host).values) == (True, {"num_paused_requests": 1})
    assert admissions(host) == [0, 0] and host.ids(1) == expected_ids(MADE)
    assert host.ends()[1, 0].weight_version == "two"


def test_an_aborting_update_ends_what_runs_without_tokens_of_the_new_weights() -> None:
    host = running()
    host.say(update(aborts=True))
    host.say(request(2, [2]))
    host.run()
    assert (host.ends()[1, 0].reason, host.ends()[1, 0].weight_version) == ("abort", "default")
    assert (host.ends()[2, 0].reason, host.ends()[2, 0].weight_version) == ("length", "two")
    assert host.ids(1) == expected_ids(MADE)[: len(host.ids(1))]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_in_a_pause_only_its_mode_decides_what_is_computed_again(mode: str) -> None:
    host = running()
    host.say(PauseGeneration(6, mode))
    host.run()
    host.say(update())
    host.run()
    assert reply(host).ok and host.value("is_paused")
    host.say(ContinueGeneration(8))
    host.run()
    assert host.ids(1) == expected_ids(MADE)
    again = replace(MADE, rid=3, label="again")
    host.say(again)
    host.run()
    if mode == "in_place":  # its keys and values are of both weights, so nobody may share them
        assert admissions(host) == [0, 0]
    else:
        assert admissions(host) == [0, 0, 8]


def test_what_is_cached_of_the_old_weights_is_forgotten_and_its_pages_are_free() -> None:
    host = running()
    host.run()
    assert host.value("num_cached_pages")
    host.say(update())
    host.run()
    assert host.value("num_free_pages") == host.value("num_total_pages")
    host.say(replace(MADE, rid=2, label="again"))
    host.run()
    assert admissions(host) == [0, 0]


def test_the_ledger_is_written_and_others_are_told_before_the_answer() -> None:
    host = running()
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    host.say(update())
    host.run()
    assert host.ledger == UPDATED
    told = [type(one) for one in host.inbox[0] if isinstance(one, WeightVersion | ControlReply)]
    assert told == [WeightVersion, ControlReply]
    assert host.of_type(WeightVersion, 1) == [WeightVersion("two")]
    successor = Host(ledger=host.ledger)
    assert successor.greeting.weight_version == "two"
    successor.say(SetWeightVersion(8, "three"))
    assert successor.ledger == replace(UPDATED, weight_version="three")


def test_who_looks_at_the_weights_changes_nothing() -> None:
    host = running(tp_size=2)
    host.say(replace(update(), work=InspectWeights("norm", 1), version=""))
    host.run()
    assert reply(host).values == {"0 rows": "[norm]", "1 rows": "[norm]"}
    assert (host.ledger, admissions(host), host.ids(1)) == (None, [0], expected_ids(MADE))


@pytest.mark.parametrize(
    "work", [JoinUpdateGroup("group", "host", 1, 1, 3, ""), LeaveUpdateGroup("group")], ids=["join", "leave"]
)
def test_joining_and_leaving_a_group_leaves_requests_and_weights_as_they_are(work: SameWeights) -> None:
    host = running(tp_size=2)
    host.say(replace(update(), work=work, version=""))
    host.run()
    assert reply(host).ok and (host.ledger, admissions(host), host.ids(1)) == (None, [0], expected_ids(MADE))


@pytest.mark.parametrize(
    "work", [LoadWeights("new", is_partial=True), ReceiveWeights("group", ["norm"], ["F32"], [[1]], False)]
)
def test_weights_of_tensors_are_kept_in_no_folder(work: LoadWeights | ReceiveWeights) -> None:
    host = running()
    host.say(replace(update(), work=work))
    host.run()
    assert host.ledger == replace(UPDATED, weights=WeightsSource("", ""))


def fail(host: Host, *sentences: str) -> None:
    """Let the workers answer the update, each with its sentence; an empty one is none."""
    while isinstance(host.plans[0], StepPlan):
        host.answer()
        host.tick()
    sent = host.plans.popleft()
    assert isinstance(sent, WorkPlan)
    done = host.worker.do(sent)
    for rank, sentence in enumerate(sentences):
        host.from_worker(replace(done, rank=rank, error=sentence), rank)


def test_a_failed_update_changes_nothing_but_that_requests_are_computed_again() -> None:
    host = running(tp_size=2)
    host.say(update())
    host.tick()
    fail(host, "It lacks a tensor.", "Another rank could not.")
    host.run()
    assert (reply(host).ok, reply(host).message) == (False, "It lacks a tensor.")
    assert host.ledger is None and host.ids(1) == expected_ids(MADE)
    assert host.ends()[1, 0].weight_version == "default"


def test_ranks_with_different_weights_end_the_engine() -> None:
    host = running(tp_size=2)
    host.say(update())
    host.tick()
    fail(host, "", "It lacks a tensor.")
    assert host.fatal is not None and "It lacks a tensor." in host.fatal


def test_a_second_update_and_one_in_a_drain_are_refused() -> None:
    host = running()
    host.say(update())
    host.say(update(8))
    assert not reply(host, 8).ok and "under way" in reply(host, 8).message
    host.run()
    host.scheduler.drain()
    host.say(update(9))
    assert not reply(host, 9).ok and "shutting down" in reply(host, 9).message


def test_an_update_outlives_the_frontend_that_asked_for_it() -> None:
    host = running()
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    host.say(update(), frontend=1)
    host.scheduler.frontend_gone(1)
    host.run()
    assert host.ledger == UPDATED and host.ids(1) == expected_ids(MADE)
