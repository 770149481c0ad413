"""Pausing, what becomes of those who run, and going on."""

from __future__ import annotations

from srt.managers.scheduler.effects import Record
from srt.protocol.engine_work import EngineLedger, Pause
from srt.protocol.messages import ContinueGeneration, ControlReply, FlushCache, FrontendHello, PauseGeneration
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, expected_ids, request

MADE = request(1, [1, 2, 3, 4, 5], max_new=9)


def paused(mode: str) -> Host:
    host = Host()
    host.say(MADE)
    host.tick()
    host.answer()
    host.tick()
    host.say(PauseGeneration(7, mode))
    host.tick()
    return host


def replies(host: Host) -> dict[int, bool]:
    return {reply.call: reply.ok for reply in host.of_type(ControlReply)}


def test_a_pause_is_answered_when_no_step_is_in_flight_and_none_is_planned() -> None:
    host = paused("in_place")
    assert 7 not in replies(host)
    host.run()
    assert replies(host)[7]
    assert (host.value("is_paused"), host.value("num_running"), len(host.ids(1))) == (True, 1, 3)
    host.say(request(2, [2]))
    host.run()
    assert host.value("num_waiting") == 1
    host.say(ContinueGeneration(8))
    host.run()
    assert replies(host)[8]
    assert host.ids(1) == expected_ids(MADE)
    assert host.ids(2) == expected_ids(request(2, [2]))


def test_retracted_requests_leave_the_cache_free_to_be_flushed_and_come_back() -> None:
    host = paused("retract")
    host.run()
    assert (host.value("num_running"), host.value("num_waiting"), len(host.ids(1))) == (0, 1, 3)
    host.say(FlushCache(8))
    assert replies(host)[8]
    assert host.value("num_free_pages") == host.value("num_total_pages")
    host.say(ContinueGeneration(9))
    host.run()
    assert host.ids(1) == expected_ids(MADE)


def test_an_aborting_pause_ends_what_is_there_and_lets_what_comes_wait() -> None:
    host = paused("abort")
    host.run()
    assert host.ends()[1, 0].reason == "abort"
    host.say(request(2, [2]))
    host.run()
    assert (2, 0) not in host.ends()
    host.say(ContinueGeneration(8))
    host.run()
    assert host.ends()[2, 0].reason == "length"


def test_a_pause_of_an_unknown_kind_is_refused() -> None:
    host = paused("now")
    assert replies(host) == {7: False}
    host.run()
    assert host.ids(1) == expected_ids(MADE)


def test_a_pause_ends_with_the_frontend_that_asked_for_it() -> None:
    """Its word to go on would be lost with it."""
    host = Host()
    host.say(MADE)
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    host.say(PauseGeneration(7, "in_place"), frontend=1)
    host.run()
    assert host.ids(1) == []
    host.scheduler.frontend_gone(1)
    host.run()
    assert host.ids(1) == expected_ids(MADE)


def test_a_pause_outlives_the_scheduler_that_was_asked_for_it() -> None:
    host = paused("in_place")
    host.run()
    assert host.ledger == EngineLedger([Pause(0, "")])
    successor = Host(ledger=host.ledger)
    successor.say(MADE)
    successor.run()
    assert (successor.value("is_paused"), successor.ids(1)) == (True, [])
    successor.say(ContinueGeneration(9))
    assert successor.ledger == EngineLedger(), "it is recorded before the call is answered, so at once"
    successor.run()
    assert successor.ids(1) == expected_ids(MADE)


def test_a_pause_does_not_outlive_a_frontend_that_dies_with_the_scheduler() -> None:
    successor = Host(ledger=EngineLedger([Pause(0, "a process that is gone")]))
    successor.say(MADE)
    successor.run()
    assert successor.ids(1) == expected_ids(MADE)
    assert successor.ledger == EngineLedger()


def test_a_pause_is_recorded_before_it_is_answered() -> None:
    """The scheduler may die right behind its answer."""
    host = paused("abort")
    effects = [*host.scheduler.tick(host.now)]
    assert host.ledger == EngineLedger([Pause(0, "")])
    assert not any(isinstance(effect, Record) for effect in effects), "once is enough"


def test_any_frontend_may_end_a_pause() -> None:
    host = paused("in_place")
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    host.say(ContinueGeneration(1), frontend=1)
    host.run()
    assert host.ids(1) == expected_ids(MADE)


def test_a_pause_that_another_ends_before_its_steps_are_back_is_answered_so() -> None:
    host = paused("in_place")
    host.say(ContinueGeneration(8))
    host.tick()
    assert replies(host) == {7: False, 8: True}
    assert host.plans, "generation goes on"
    host.say(PauseGeneration(9, "in_place"))
    host.run()
    assert replies(host) == {7: False, 8: True, 9: True}


def test_a_pause_that_a_drain_ends_before_its_steps_are_back_is_answered_so() -> None:
    host = paused("in_place")
    host.scheduler.drain()
    host.tick()
    assert replies(host) == {7: False}


def test_a_pause_in_a_drain_is_refused_and_what_runs_is_finished() -> None:
    host = Host()
    host.say(MADE)
    host.tick()
    host.scheduler.drain()
    host.say(PauseGeneration(7, "in_place"))
    host.run()
    assert replies(host) == {7: False}
    assert host.ids(1) == expected_ids(MADE)


def test_a_frontend_may_be_gone_before_the_step_after_its_requests_were_retracted() -> None:
    host = paused("in_place")
    host.say(ContinueGeneration(8))
    host.run()
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    host.say(request(3, [1, 2, 3]), frontend=1)
    host.tick()
    host.answer()
    host.tick()
    host.say(PauseGeneration(9, "retract"))
    host.scheduler.frontend_gone(1)
    host.say(ContinueGeneration(10))
    host.run()
    assert (host.value("num_running"), host.value("num_waiting")) == (0, 0)
