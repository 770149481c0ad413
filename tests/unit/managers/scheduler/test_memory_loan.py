"""Memory that is released: nothing runs meanwhile, nothing is lost, and the ledger says it to the next generation."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from srt.protocol.engine_work import (
    EngineLedger,
    EngineWork,
    LoadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
    WeightsSource,
)
from srt.protocol.messages import ControlReply, PauseGeneration, Refused, WorkPlan
from tests.unit.managers.scheduler.scheduler_host import Host, expected_ids, request
from tests.unit.managers.scheduler.test_weight_updates import MADE, admissions, fail, reply, running

ALL = ["weights", "kv_cache", "cuda_graph"]


def ask(host: Host, work: EngineWork, call: int = 7) -> ControlReply:
    host.say(UpdateWeights(call, work, "", aborts=False))
    host.run()
    return reply(host, call)


def test_nothing_runs_until_all_memory_is_back_and_then_all_is_computed_again() -> None:
    host = running(tp_size=2)
    assert ask(host, ReleaseMemory(ALL)).ok and host.value("num_free_pages") == host.value("num_total_pages")
    host.say(request(2, [2]))
    host.run()
    assert ask(host, ResumeMemory(["weights"]), 8).ok
    assert not host.ends(), "the KV memory is still released"
    assert ask(host, ResumeMemory(ALL), 9).ok
    assert host.ids(1) == expected_ids(MADE) and len(host.ids(2)) > 0
    assert admissions(host)[:2] == [0, 0]


def test_running_requests_keep_their_keys_and_values_while_only_weights_are_released() -> None:
    host = running()
    assert ask(host, ReleaseMemory(["weights"])).ok
    assert host.value("num_running") == 1
    assert ask(host, ResumeMemory(ALL), 8).ok
    assert (admissions(host), host.ids(1)) == ([0], expected_ids(MADE))


def test_keys_and_values_are_lost_even_in_a_pause_that_keeps_them() -> None:
    host = running()
    host.say(PauseGeneration(6, "in_place"))
    host.run()
    assert ask(host, ReleaseMemory(["kv_cache"])).ok
    assert host.value("num_running") == 0 and host.value("num_free_pages") == host.value("num_total_pages")


def test_the_ledger_says_what_is_released_and_where_the_weights_are() -> None:
    host = Host(ledger=EngineLedger(weights=WeightsSource("new", "those of new")))
    host.run()
    assert ask(host, ReleaseMemory(["kv_cache"])).ok
    assert host.ledger is not None and host.ledger.released == ["kv_cache"]
    host.say(UpdateWeights(8, ReleaseMemory(ALL), "", aborts=False))
    host.tick()
    (sent,) = host.plans
    assert isinstance(sent, WorkPlan)
    assert sent.work == ReleaseMemory(["weights", "cuda_graph"], WeightsSource("new", "those of new"))
    host.run()
    successor = Host(ledger=host.ledger)
    successor.say(replace(MADE, rid=3))
    successor.run()
    assert not successor.ends()
    assert ask(successor, ResumeMemory(ALL), 9).ok
    assert successor.ids(3) == expected_ids(replace(MADE, rid=3))
    assert successor.ledger == EngineLedger(weights=WeightsSource("new", "those of new"))


def test_requests_are_refused_while_that_is_asked_for() -> None:
    host = running()
    host.run()
    assert ask(host, ReleaseMemory(ALL, refuses_requests=True)).ok
    host.say(request(2, [2]))
    host.run()
    (refused,) = host.of_type(Refused)
    assert (refused.status, "memory is released" in refused.message) == (503, True)
    assert ask(host, ResumeMemory(ALL), 8).ok
    host.say(request(3, [2]))
    host.run()
    assert (3, 0) in host.ends()


def test_requests_are_refused_until_all_is_back_if_any_release_asked_for_it() -> None:
    host = Host()
    host.run()
    assert ask(host, ReleaseMemory(["weights"], refuses_requests=True)).ok
    assert ask(host, ReleaseMemory(["kv_cache"]), 8).ok
    assert ask(host, ResumeMemory(["weights"]), 9).ok
    host.say(request(2, [2]))
    host.run()
    assert len(host.of_type(Refused)) == 1
    assert ask(host, ResumeMemory(ALL), 10).ok and ask(host, ReleaseMemory(ALL), 11).ok
    host.say(request(3, [2]))
    host.run()
    assert len(host.of_type(Refused)) == 1


@pytest.mark.parametrize(
    "work", [LoadWeights("new", is_partial=True), ReceiveWeights("group", ["norm"], ["F32"], [[1]], False)]
)
def test_weights_without_memory_are_not_updated_in_part(work: EngineWork) -> None:
    host = running()
    assert ask(host, ReleaseMemory(["weights"])).ok
    refused = ask(host, work, 8)
    assert not refused.ok and "call /resume_memory_occupation or" in refused.message
    assert ask(host, ResumeMemory(["weights"]), 9).ok and ask(host, work, 10).ok


def test_an_update_of_all_weights_brings_their_memory_back() -> None:
    host = running()
    assert ask(host, ReleaseMemory(["weights", "kv_cache"], refuses_requests=True)).ok
    assert ask(host, LoadWeights("new"), 8).ok
    new = WeightsSource("new", "those of new")
    assert host.ledger == EngineLedger(weights=new, released=["kv_cache"], refuses_requests=True)
    assert not host.ends(), "the KV memory is still released"
    assert ask(host, ResumeMemory(ALL), 9).ok
    assert (host.ledger, host.ids(1)) == (EngineLedger(weights=new), expected_ids(MADE))


def test_weights_that_cannot_be_updated_stay_released() -> None:
    host = running()
    assert ask(host, ReleaseMemory(["weights"])).ok
    host.say(UpdateWeights(8, LoadWeights("new"), "", aborts=False))
    host.tick()
    fail(host, "It lacks a tensor.")
    host.run()
    assert not reply(host, 8).ok and not host.ends()
    assert host.ledger is not None and host.ledger.released == ["weights"]


def test_a_drain_ends_what_cannot_go_on() -> None:
    host = running()
    assert ask(host, ReleaseMemory(ALL)).ok
    host.scheduler.drain()
    host.run()
    assert host.ends()[1, 0].reason == "abort" and not ask(host, ResumeMemory(ALL), 8).ok
