"""The Replacer by itself: events and a clock go in, effects come out."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest

from srt.managers.process.child_process import ChildKey
from srt.managers.process.replica_layout import ReplicaLayout
from srt.managers.supervisor.events import (
    BecameReady,
    ChildExited,
    ChildSpoke,
    Effect,
    Finish,
    HostBack,
    HostLost,
    Kill,
    LinkLost,
    SaveReport,
    ServesAgain,
    Start,
    StopAsked,
    Stopping,
    Tell,
    TellRuntime,
)
from srt.managers.supervisor.replacer import (
    CALM_S,
    ENDING_S,
    LAST_ANSWERS_S,
    SETTLE_S,
    SILENT_S,
    START_S,
    Replacer,
    State,
)
from srt.protocol.messages import EngineLost, EngineReplaced, Failed, Heartbeat, Progress, Ready, ServerReady, Stop

WORKERS = [ChildKey("worker", 0), ChildKey("worker", 1)]
SCHEDULER = ChildKey("scheduler", 0)
FRONTENDS = [ChildKey("frontend", 0), ChildKey("frontend", 1)]
ALL = [*WORKERS, SCHEDULER, *FRONTENDS]


def starting(most_replacements: int = 0) -> Replacer:
    return Replacer(ALL, started_s=0.0, stuck_s=60.0, most_replacements=most_replacements)


def ready(most_replacements: int = 0) -> Replacer:
    """Of a server that ends with the first death, unless told otherwise."""
    replacer = starting(most_replacements)
    gets_ready(replacer, ALL, 1.0)
    return replacer


def gets_ready(replacer: Replacer, children: Iterable[ChildKey], now_s: float) -> list[Effect]:
    return [effect for child in children for effect in replacer.handle(ChildSpoke(child, Ready({})), now_s)]


def exits(replacer: Replacer, children: list[ChildKey], now_s: float, code: int = 0) -> list[Effect]:
    return [effect for child in children for effect in replacer.handle(ChildExited(child, code), now_s)]


def told(effects: list[Effect]) -> list[ChildKey]:
    return [effect.child for effect in effects if isinstance(effect, Tell)]


def killed(effects: list[Effect]) -> list[ChildKey]:
    return [effect.child for effect in effects if isinstance(effect, Kill)]


ELSEWHERE = (ChildKey("worker", 1, 1), ChildKey("scheduler", 1, 1))
HERE = [ChildKey("worker", 0), ChildKey("scheduler", 0), *FRONTENDS]


def on_two_hosts() -> Replacer:
    """Of a server with a replica on each host."""
    replacer = Replacer([*HERE, *ELSEWHERE], started_s=0.0, stuck_s=60.0, most_replacements=3)
    gets_ready(replacer, [*HERE, *ELSEWHERE], 1.0)
    return replacer


def test_the_replica_of_a_lost_host_starts_when_the_host_is_back() -> None:
    replacer = on_two_hosts()
    effects = replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone."), 5.0)
    assert effects == [
        TellRuntime(lost := EngineLost(1, False, is_cut_off=True)),
        *(Tell(child, lost) for child in FRONTENDS),
    ]
    assert replacer.tick(6.0) == []
    effects = replacer.handle(HostBack(ELSEWHERE), 700.0)
    assert effects[0] == Start(ELSEWHERE, 4, "Host 1 is gone.")
    assert Tell(FRONTENDS[0], EngineReplaced(4, False, 1)) in effects
    assert ServesAgain(ELSEWHERE, 695.0) in gets_ready(replacer, ELSEWHERE, 700.0)


def test_a_host_may_be_lost_while_its_replica_starts() -> None:
    replacer = on_two_hosts()
    replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone."), 5.0)
    replacer.handle(HostBack(ELSEWHERE), 6.0)
    replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone again."), 7.0)
    assert replacer.tick(500.0) == [] and replacer.state is State.READY
    assert Start(ELSEWHERE, 6, "Host 1 is gone again.") in replacer.handle(HostBack(ELSEWHERE), 600.0)


def test_the_loss_of_a_host_is_told_even_if_its_replica_was_lost_before() -> None:
    replacer = on_two_hosts()
    said = [effect for effect in exits(replacer, [ELSEWHERE[0]], 5.0, -9) if isinstance(effect, TellRuntime)]
    assert said == [TellRuntime(EngineLost(1, False))]
    effects = replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone."), 5.1)
    cut_off = EngineLost(1, False, is_cut_off=True)
    assert effects == [TellRuntime(cut_off), *(Tell(child, cut_off) for child in FRONTENDS)]
    assert Start(ELSEWHERE, 4, "Worker 1 was killed by SIGKILL (out of memory?).") in replacer.handle(
        HostBack(ELSEWHERE), 6.0
    )


def test_a_server_without_a_replica_ends_with_the_lost_host() -> None:
    part = (WORKERS[1],)
    replacer = ready(most_replacements=3)
    effects = replacer.handle(HostLost(part, "Host 1 is gone."), 5.0)
    assert effects == [Tell(child, Stop(LAST_ANSWERS_S, "Host 1 is gone.")) for child in FRONTENDS]
    assert killed(replacer.tick(5.0 + SETTLE_S)) == [WORKERS[0], SCHEDULER]
    exits(replacer, [WORKERS[0], SCHEDULER], 6.0, -9)
    assert exits(replacer, FRONTENDS, 6.0) == [Finish(1, "Host 1 is gone.")]


def test_a_host_lost_at_the_start_or_in_a_stop_is_the_reason() -> None:
    replacer = Replacer([*HERE, *ELSEWHERE], started_s=0.0, stuck_s=60.0, most_replacements=3)
    assert replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone."), 0.5) == []
    assert killed(replacer.tick(0.5 + SETTLE_S)) == HERE
    assert exits(replacer, HERE, 1.0, -9) == [Finish(1, "Host 1 is gone.")]

    replacer = on_two_hosts()
    replacer.handle(StopAsked(20.0), 5.0)
    effects = replacer.handle(HostLost(ELSEWHERE, "Host 1 is gone."), 6.0)
    final = EngineLost(1, False, is_final=True)
    assert effects == [TellRuntime(final), *(Tell(child, final) for child in FRONTENDS)]
    exits(replacer, FRONTENDS, 7.0)
    assert exits(replacer, [HERE[1], HERE[0]], 8.0)[-1] == Finish(1, "Host 1 is gone.")


def test_the_server_is_ready_when_the_last_child_is_and_all_are_told() -> None:
    replacer = starting()
    for child in ALL[:-1]:
        assert replacer.handle(ChildSpoke(child, Ready({})), 2.0) == []
    effects = replacer.handle(ChildSpoke(ALL[-1], Ready({})), 4.5)
    assert effects == [SaveReport(), *(Tell(child, ServerReady(4.5)) for child in ALL), BecameReady()]


def test_a_stop_goes_from_frontends_to_scheduler_to_workers() -> None:
    replacer = ready()
    effects = replacer.handle(StopAsked(20.0), 10.0)
    assert effects == [Stopping(20.0), *(Tell(child, Stop(20.0)) for child in FRONTENDS)]
    assert exits(replacer, FRONTENDS[:1], 11.0) == []
    assert told(exits(replacer, FRONTENDS[1:], 12.0)) == [SCHEDULER]
    assert told(exits(replacer, [SCHEDULER], 13.0)) == WORKERS
    assert exits(replacer, WORKERS, 14.0) == [Finish(0, None)]


def test_a_worker_that_dies_in_a_stop_does_not_end_the_scheduler_before_the_frontends() -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    reason = "Worker 0 was killed by SIGKILL (out of memory?)."  # what runs has no hope: clients are told
    assert exits(replacer, WORKERS, 11.0, -9) == [Tell(child, Stop(LAST_ANSWERS_S, reason)) for child in FRONTENDS]
    assert told(exits(replacer, FRONTENDS, 12.0)) == [SCHEDULER]
    assert exits(replacer, [SCHEDULER], 13.0) == [Finish(1, reason)]


@pytest.mark.parametrize("code", [-9, 3, 0])
def test_who_dies_in_a_stop_before_its_turn_is_the_reason_of_a_failure(code: int) -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    exits(replacer, [SCHEDULER], 11.0, code)
    exits(replacer, FRONTENDS, 12.0)
    how = "was killed by SIGKILL (out of memory?)" if code < 0 else f"ended with exit code {code}"
    assert exits(replacer, WORKERS, 13.0) == [Finish(1, f"Scheduler 0 {how}.")]


def test_a_frontend_that_dies_in_a_stop_is_the_reason_of_a_failure() -> None:
    replacer = ready(most_replacements=3)
    exits(replacer, list(ENGINE), 5.0, -11)
    gets_ready(replacer, ENGINE, 6.0)
    exits(replacer, list(ENGINE), 7.0, -11)
    gets_ready(replacer, ENGINE, 8.0)
    replacer.handle(StopAsked(20.0), 10.0)
    replacer.handle(ChildSpoke(FRONTENDS[0], Failed("Internal error in frontend 0: no.")), 11.0)
    exits(replacer, FRONTENDS[:1], 11.0, 1)
    exits(replacer, [*FRONTENDS[1:], SCHEDULER], 12.0)
    assert exits(replacer, WORKERS, 13.0) == [Finish(1, "Internal error in frontend 0: no.")]


def test_a_death_by_a_signal_in_a_stop_explains_what_others_say_of_it() -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    replacer.handle(ChildSpoke(SCHEDULER, Failed("Worker 0 is gone.")), 11.0)
    exits(replacer, [SCHEDULER], 11.0, 1)
    exits(replacer, WORKERS[:1], 11.1, -11)
    exits(replacer, FRONTENDS, 12.0)
    assert exits(replacer, WORKERS[1:], 13.0) == [Finish(1, SEGFAULT)]


def test_workers_that_miss_each_other_as_they_end_are_no_failure() -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    exits(replacer, [*FRONTENDS, SCHEDULER, WORKERS[0]], 11.0)
    replacer.handle(ChildSpoke(WORKERS[1], Failed("Connection closed by peer.")), 11.1)
    assert exits(replacer, WORKERS[1:], 11.1, 1) == [Finish(0, None)]


def test_without_frontends_a_stop_begins_with_the_scheduler() -> None:
    replacer = Replacer([*WORKERS, SCHEDULER], 0.0, 60.0, 0)
    for child in [*WORKERS, SCHEDULER]:
        replacer.handle(ChildSpoke(child, Ready({})), 1.0)
    assert told(replacer.handle(StopAsked(5.0), 2.0)) == [SCHEDULER]


def test_who_does_not_stop_within_its_grace_is_killed_and_the_next_role_follows() -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    assert replacer.next_tick_s() == 30.0 + ENDING_S
    assert replacer.tick(30.0) == []
    assert killed(replacer.tick(30.0 + ENDING_S)) == FRONTENDS
    assert told(exits(replacer, FRONTENDS, 34.0, -9)) == [SCHEDULER]
    assert killed(replacer.tick(34.0 + 2 * ENDING_S)) == [SCHEDULER]
    exits(replacer, [SCHEDULER], 41.0, -9)
    assert killed(replacer.tick(41.0 + 2 * ENDING_S)) == WORKERS
    assert exits(replacer, WORKERS, 48.0, -9) == [Finish(0, None)]


def test_a_second_stop_ends_everything_at_once() -> None:
    replacer = ready()
    replacer.handle(StopAsked(20.0), 10.0)
    assert killed(replacer.handle(StopAsked(20.0), 10.1)) == ALL
    replacer.was_dying(SCHEDULER)  # of the workers' deaths, perhaps
    assert exits(replacer, [*WORKERS, *FRONTENDS], 10.2, -9) == []
    assert exits(replacer, [SCHEDULER], 10.3, 1) == [Finish(0, None)]


def test_a_stop_during_the_start_is_no_failure() -> None:
    replacer = starting()
    assert killed(replacer.handle(StopAsked(20.0), 0.5)) == ALL
    assert exits(replacer, ALL, 0.6, -9) == [Finish(0, None)]


def test_a_failed_start_ends_all_with_the_sentence_of_who_failed() -> None:
    replacer = starting()
    replacer.handle(ChildSpoke(WORKERS[1], Failed("config.json has no hidden_size.")), 1.0)
    exits(replacer, [WORKERS[1]], 1.01, 1)
    assert killed(replacer.tick(1.0 + SETTLE_S)) == [WORKERS[0], SCHEDULER, *FRONTENDS]
    effects = exits(replacer, [WORKERS[0], SCHEDULER, *FRONTENDS], 1.5, -9)
    assert effects == [Finish(1, "config.json has no hidden_size.")]


def test_a_death_by_a_signal_explains_more_than_what_others_say_of_it() -> None:
    replacer = ready()
    replacer.handle(ChildSpoke(WORKERS[1], Failed("Connection closed by peer.")), 5.0)
    exits(replacer, [WORKERS[0]], 5.1, -9)
    replacer.tick(5.0 + SETTLE_S)
    effects = exits(replacer, ALL[1:], 6.0, 1)
    assert effects == [Finish(1, "Worker 0 was killed by SIGKILL (out of memory?).")]


def test_the_first_death_is_the_reason_and_the_kills_that_follow_are_not() -> None:
    replacer = ready()
    exits(replacer, [SCHEDULER], 5.0, 3)
    assert killed(replacer.tick(5.0 + SETTLE_S)) == WORKERS
    assert killed(replacer.tick(5.0 + ENDING_S)) == FRONTENDS
    assert exits(replacer, [*WORKERS, *FRONTENDS], 9.0, -9) == [Finish(1, "Scheduler 0 ended with exit code 3.")]


def test_when_the_engine_dies_frontends_get_time_for_their_last_answers() -> None:
    replacer = ready()
    word = Stop(LAST_ANSWERS_S, "Worker 0 was killed by SIGSEGV.")
    assert exits(replacer, [WORKERS[0]], 5.0, -11) == [Tell(child, word) for child in FRONTENDS]
    assert killed(replacer.tick(5.0 + SETTLE_S)) == [WORKERS[1], SCHEDULER]
    assert exits(replacer, [WORKERS[1], SCHEDULER], 5.5, -9) == []
    assert exits(replacer, FRONTENDS, 6.0) == [Finish(1, "Worker 0 was killed by SIGSEGV.")]


def test_a_death_at_the_start_says_what_the_child_was_doing() -> None:
    replacer = starting()
    replacer.handle(ChildSpoke(WORKERS[0], Progress("weights", 1, 2, 0.1)), 0.1)
    exits(replacer, [WORKERS[0]], 1.0, -15)
    effects = exits(replacer, ALL[1:], 2.0, -9)
    assert effects == [Finish(1, "Worker 0 was killed by SIGTERM at its start (weights).")]


def test_silence_counts_from_the_first_heartbeat_on() -> None:
    replacer = ready()
    assert replacer.tick(1000.0) == []
    replacer.handle(ChildSpoke(WORKERS[0], Heartbeat(0.0)), 1000.0)
    replacer.tick(1000.0 + SILENT_S)
    assert replacer.state is State.READY
    replacer.tick(1000.1 + SILENT_S)
    assert replacer.state is State.FAILING
    replacer.tick(1001.0 + SILENT_S)
    replacer.tick(1010.0 + SILENT_S)
    effects = exits(replacer, ALL, 1011.0 + SILENT_S, -9)
    assert effects == [Finish(1, f"Worker 0 has given no sign of life for {SILENT_S:.0f} s.")]


def test_silence_while_the_supervisor_itself_was_stopped_does_not_count() -> None:
    replacer = ready()
    replacer.handle(ChildSpoke(SCHEDULER, Heartbeat(0.0)), 1000.0)
    replacer.excuse(2000.0)
    assert replacer.tick(2000.0) == []
    assert replacer.state is State.READY
    assert replacer.next_tick_s() == 2000.0 + SILENT_S


def test_who_makes_no_progress_ends_the_server_once_it_is_ready() -> None:
    replacer = starting()
    replacer.handle(ChildSpoke(WORKERS[1], Heartbeat(100.0)), 1.0)
    assert replacer.state is State.STARTING
    replacer = ready()
    replacer.handle(ChildSpoke(WORKERS[1], Heartbeat(60.0)), 2.0)
    assert replacer.state is State.READY
    replacer.handle(ChildSpoke(WORKERS[1], Heartbeat(61.0)), 3.0)
    assert WORKERS[1] in killed(replacer.tick(3.0 + SETTLE_S))
    effects = exits(replacer, ALL, 4.0, 1)
    assert effects == [Finish(1, "Worker 1 has made no progress for 61 s (see --watchdog-timeout).")]


def test_a_closed_link_is_explained_by_the_exit_that_follows() -> None:
    replacer = ready()
    assert replacer.handle(LinkLost(WORKERS[0], None), 5.0) == []
    assert replacer.state is State.READY
    exits(replacer, [WORKERS[0]], 5.1, -6)
    assert exits(replacer, ALL[1:], 6.0, -9) == [Finish(1, "Worker 0 was killed by SIGABRT.")]


def test_who_closes_its_link_and_does_not_exit_is_killed() -> None:
    replacer = ready()
    replacer.handle(LinkLost(WORKERS[0], None), 5.0)
    assert killed(replacer.tick(5.0 + ENDING_S)) == [WORKERS[0]]
    exits(replacer, [WORKERS[0]], 8.1, -9)
    assert exits(replacer, ALL[1:], 20.0) == [Finish(1, "Worker 0 closed its link to the supervisor.")]


def test_a_link_that_cannot_be_read_is_a_failure() -> None:
    replacer = ready()
    replacer.handle(LinkLost(WORKERS[0], "not MessagePack"), 5.0)
    assert WORKERS[0] in killed(replacer.tick(5.0 + SETTLE_S))
    assert exits(replacer, ALL, 20.0, 1) == [Finish(1, "Worker 0 sent what cannot be read: not MessagePack.")]


def test_what_a_dead_child_had_sent_changes_nothing() -> None:
    replacer = ready()
    replacer.handle(StopAsked(1.0), 2.0)
    exits(replacer, ALL, 3.0)
    assert replacer.handle(ChildSpoke(WORKERS[0], Ready({})), 4.0) == []
    assert exits(replacer, WORKERS, 4.0) == []
    assert replacer.tick(100.0) == []
    assert replacer.next_tick_s() is None


# ---- Replacement

ENGINE = (*WORKERS, SCHEDULER)
SEGFAULT = "Worker 0 was killed by SIGSEGV."


def test_an_engine_is_replaced_as_a_whole_once_nothing_is_left_of_it() -> None:
    replacer = ready(most_replacements=1)
    assert exits(replacer, [WORKERS[0]], 5.0, -11) == [Tell(SCHEDULER, Stop(0.0, SEGFAULT))]
    assert replacer.next_tick_s() == 5.0 + SETTLE_S
    assert killed(replacer.tick(5.0 + SETTLE_S)) == [WORKERS[1], SCHEDULER]
    assert exits(replacer, [WORKERS[1]], 5.5, -9) == []
    word = EngineReplaced(2, by_request=True)
    replaced = [TellRuntime(word), *(Tell(child, word) for child in FRONTENDS)]
    assert exits(replacer, [SCHEDULER], 5.6, -9) == [Start(ENGINE, 2, SEGFAULT), *replaced]
    assert gets_ready(replacer, WORKERS, 8.0) == []
    again = [Tell(child, ServerReady(1.0)) for child in ENGINE]
    assert gets_ready(replacer, [SCHEDULER], 9.0) == [*again, ServesAgain(ENGINE, 4.0)]


@pytest.mark.parametrize(
    ("code", "by_request"), [(-11, True), (-6, True), (1, True), (0, True), (-9, False), (-15, False)]
)
def test_who_was_killed_from_outside_did_not_die_of_a_request(code: int, by_request: bool) -> None:
    replacer = ready(most_replacements=1)
    replacer.handle(ChildSpoke(WORKERS[1], Failed("Connection closed by peer.")), 4.9)
    exits(replacer, WORKERS, 5.0, code)
    assert TellRuntime(EngineReplaced(2, by_request=by_request)) in exits(replacer, [SCHEDULER], 5.1, 0)


def test_a_frontend_is_replaced_alone_and_told_that_the_server_is_ready() -> None:
    replacer = ready(most_replacements=1)
    effects = exits(replacer, FRONTENDS[:1], 5.0, 3)
    assert effects == [Start((FRONTENDS[0],), 1, "Frontend 0 ended with exit code 3.")]
    assert replacer.next_tick_s() == 5.0 + START_S + 10.0
    effects = gets_ready(replacer, FRONTENDS[:1], 6.0)
    assert replacer.next_tick_s() is None
    assert effects == [Tell(FRONTENDS[0], ServerReady(1.0)), ServesAgain((FRONTENDS[0],), 1.0)]


def test_a_frontend_that_starts_meanwhile_is_told_of_the_new_engine_too() -> None:
    replacer = ready(most_replacements=2)
    exits(replacer, FRONTENDS[:1], 5.0, 3)
    exits(replacer, WORKERS, 5.1, -11)
    effects = exits(replacer, [SCHEDULER], 5.2, -9)
    assert sorted(told(effects), key=str) == FRONTENDS
    assert effects[0] == Start(ENGINE, 2, SEGFAULT)


def test_a_death_while_it_is_being_replaced_is_another_one() -> None:
    replacer = ready(most_replacements=2)
    exits(replacer, list(ENGINE), 5.0, -11)
    gets_ready(replacer, WORKERS, 6.0)
    replacer.handle(ChildSpoke(SCHEDULER, Failed("The port is taken.")), 7.0)
    assert exits(replacer, [SCHEDULER], 7.1, 1) == []
    assert killed(replacer.tick(7.0 + SETTLE_S)) == WORKERS
    (started, *_) = exits(replacer, WORKERS, 7.5, -9)
    assert started == Start(ENGINE, 3, "The port is taken.")
    assert gets_ready(replacer, ENGINE, 9.0)[-1] == ServesAgain(ENGINE, 4.0)


@pytest.mark.parametrize("is_calm", [False, True])
def test_whoever_dies_too_often_ends_the_server_unless_there_was_calm(is_calm: bool) -> None:
    replacer, now_s = ready(most_replacements=1), 5.0
    exits(replacer, list(ENGINE), now_s, -11)
    gets_ready(replacer, ENGINE, 6.0)
    now_s += CALM_S if is_calm else CALM_S - 1
    effects = exits(replacer, list(ENGINE), now_s, -11)
    if is_calm:
        assert Start(ENGINE, 3, SEGFAULT) in effects
        return
    assert effects == [Tell(child, Stop(LAST_ANSWERS_S, SEGFAULT)) for child in FRONTENDS]
    why_now = "It was replaced once within 300 s (see --max-replacements)."
    assert exits(replacer, FRONTENDS, 400.0) == [Finish(1, f"{SEGFAULT} {why_now}")]


def test_who_is_not_ready_in_time_after_it_was_replaced_is_replaced_again() -> None:
    replacer = ready(most_replacements=3)
    exits(replacer, list(ENGINE), 5.0, -11)
    gets_ready(replacer, [WORKERS[1], SCHEDULER], 6.0)
    assert replacer.tick(5.0 + START_S + 10.0) == []
    assert told(replacer.tick(5.1 + START_S + 10.0)) == [SCHEDULER]
    effects = exits(replacer, list(ENGINE), 140.0, 0)
    assert Start(ENGINE, 3, "Worker 0 was not ready in time, after it was replaced.") in effects


def test_whoever_was_dying_when_it_was_to_be_killed_died_of_something_else() -> None:
    replacer = ready(most_replacements=3)
    replacer.handle(ChildSpoke(SCHEDULER, Failed("Worker 0 is gone.")), 5.0)
    exits(replacer, [SCHEDULER], 5.1, 1)
    assert killed(replacer.tick(5.0 + SETTLE_S)) == WORKERS
    replacer.was_dying(WORKERS[0])
    exits(replacer, WORKERS[1:], 5.4, -9)
    effects = exits(replacer, WORKERS[:1], 5.9, -9)
    assert effects[0] == Start(ENGINE, 2, "Worker 0 was killed by SIGKILL (out of memory?).")
    assert TellRuntime(EngineReplaced(2, by_request=False)) in effects


def test_who_says_that_no_other_could_take_its_place_ends_the_server() -> None:
    replacer = ready(most_replacements=9)
    exits(replacer, list(ENGINE), 5.0, -11)
    gets_ready(replacer, ENGINE, 6.0)
    exits(replacer, list(ENGINE), 7.0, -11)
    effects = replacer.handle(ChildSpoke(WORKERS[1], Failed("Another model lies there.", is_final=True)), 8.0)
    assert effects == [Tell(child, Stop(LAST_ANSWERS_S, "Another model lies there.")) for child in FRONTENDS]
    assert killed(replacer.tick(8.0 + SETTLE_S)) == [*WORKERS, SCHEDULER]
    exits(replacer, list(ENGINE), 8.5, -9)
    assert exits(replacer, FRONTENDS, 9.0) == [Finish(1, "Another model lies there.")]


def test_nothing_of_a_dead_child_is_held_against_its_successor() -> None:
    replacer = ready(most_replacements=9)
    replacer.handle(ChildSpoke(WORKERS[0], Heartbeat(0.0)), 4.0)
    replacer.handle(LinkLost(WORKERS[0], None), 5.0)
    replacer.handle(ChildSpoke(WORKERS[0], Failed("A page was lost.")), 5.0)
    (started, *_) = exits(replacer, [SCHEDULER, *WORKERS], 5.1, 1)
    assert started == Start(ENGINE, 2, "A page was lost.")
    gets_ready(replacer, ENGINE, 5.2)
    assert replacer.tick(5.0 + ENDING_S) == []  # the old one's time to end, and its silence, concern nobody
    assert replacer.tick(5.0 + 2 * SILENT_S) == []
    (started, *_) = exits(replacer, [SCHEDULER, *WORKERS], 70.0, 4)
    assert started == Start(ENGINE, 3, "Scheduler 0 ended with exit code 4.")


def test_who_is_silent_in_an_engine_that_ends_has_nothing_more_to_say() -> None:
    replacer = ready(most_replacements=1)
    for worker in WORKERS:
        replacer.handle(ChildSpoke(worker, Heartbeat(0.0)), 10.0)
    assert told(replacer.tick(10.1 + SILENT_S)) == [SCHEDULER]
    assert replacer.next_tick_s() == 10.1 + SILENT_S + SETTLE_S
    assert killed(replacer.tick(10.2 + SILENT_S + SETTLE_S)) == list(ENGINE)
    (started, *_) = exits(replacer, list(ENGINE), 50.0, -9)
    assert started == Start(ENGINE, 2, f"Worker 0 has given no sign of life for {SILENT_S:.0f} s.")


def test_a_stop_while_the_engine_is_replaced_is_in_order_and_clients_are_told() -> None:
    replacer = ready(most_replacements=1)
    exits(replacer, list(ENGINE), 5.0, -11)
    effects = replacer.handle(StopAsked(20.0), 6.0)
    assert effects[:3] == [Stopping(20.0), *(Tell(child, Stop(20.0)) for child in FRONTENDS)]
    reason = "the server is shutting down, and its engine was being replaced"
    assert effects[3:5] == [Tell(child, Stop(LAST_ANSWERS_S, reason)) for child in FRONTENDS]
    assert killed(effects) == list(ENGINE)
    assert exits(replacer, list(ENGINE), 6.1, -9) == []
    assert exits(replacer, FRONTENDS, 7.0) == [Finish(0, None)]


# ---- Several replicas

FRONTEND = FRONTENDS[0]
FIRST, SECOND = (ReplicaLayout(1, replica).members for replica in (0, 1))


def ready_replicas(most_replacements: int = 1) -> Replacer:
    children = [*FIRST, *SECOND, FRONTEND]
    replacer = Replacer(children, 0.0, 60.0, most_replacements)
    gets_ready(replacer, children, 1.0)
    return replacer


def test_a_killed_replica_is_announced_at_once_and_replaced_while_the_other_serves() -> None:
    replacer = ready_replicas()
    effects = replacer.handle(ChildExited(SECOND[0], -signal.SIGKILL), 5.0)
    lost = EngineLost(1, by_request=False)
    assert effects[:2] == [TellRuntime(lost), Tell(FRONTEND, lost)]
    effects = replacer.handle(ChildExited(SECOND[1], 1), 5.1)
    replaced = EngineReplaced(4, by_request=False, replica=1)
    assert [effect.children for effect in effects if isinstance(effect, Start)] == [SECOND]
    assert Tell(FRONTEND, replaced) in effects
    assert replacer.generations == [1, 4]
    assert isinstance(gets_ready(replacer, SECOND, 6.0)[-1], ServesAgain)


def test_a_cause_is_announced_when_it_is_certain_and_only_once() -> None:
    replacer = ready_replicas()
    assert told(replacer.handle(ChildSpoke(SECOND[1], Failed("Worker 1 is gone.")), 5.0)) == [SECOND[1]]
    effects = replacer.handle(ChildExited(SECOND[0], -signal.SIGSEGV), 5.1)
    assert effects == [TellRuntime(EngineLost(1, by_request=True)), Tell(FRONTEND, EngineLost(1, by_request=True))]
    assert told(replacer.handle(ChildExited(SECOND[1], 1), 5.2)) == [FRONTEND]  # of the replacement


def test_replacements_are_counted_by_replica() -> None:
    replacer = ready_replicas(most_replacements=1)
    for members in (FIRST, SECOND):
        exits(replacer, list(members), 5.0, -signal.SIGKILL)
        gets_ready(replacer, members, 6.0)
    assert replacer.state is State.READY
    exits(replacer, [FIRST[0]], 7.0, -signal.SIGKILL)
    assert replacer.state is State.FAILING


def test_a_replica_that_dies_while_the_server_stops_leaves_its_requests_to_the_other() -> None:
    replacer = ready_replicas()
    replacer.handle(StopAsked(25.0), 5.0)
    effects = replacer.handle(ChildExited(FIRST[0], -signal.SIGKILL), 6.0)
    lost = EngineLost(0, by_request=False, is_final=True)
    assert effects == [TellRuntime(lost), Tell(FRONTEND, lost), Kill(FIRST[1])]
    effects = replacer.handle(ChildExited(SECOND[0], -signal.SIGKILL), 7.0)
    assert [
        effect.message.reason for effect in effects if isinstance(effect, Tell) and isinstance(effect.message, Stop)
    ]


# ---- Attention groups, which share experts


def ready_groups(most_replacements: int = 1) -> Replacer:
    children = [*FIRST, *SECOND, FRONTEND]
    replacer = Replacer(children, 0.0, 60.0, most_replacements, shares_experts=True)
    gets_ready(replacer, children, 1.0)
    return replacer


def test_groups_end_and_start_together_and_only_requests_of_the_first_to_die_are_suspects() -> None:
    replacer = ready_groups()
    said = [
        effect for effect in replacer.handle(ChildExited(SECOND[0], -signal.SIGSEGV), 5.0) if isinstance(effect, Tell)
    ]
    assert [effect.child for effect in said] == [FIRST[1], SECOND[1]], "no frontend: nobody is left to go on"
    assert not any(isinstance(effect, Start) for effect in exits(replacer, [SECOND[1], FIRST[0]], 5.1, 1))
    effects = exits(replacer, [FIRST[1]], 5.2, 1)
    assert [(one.children, one.generation) for one in effects if isinstance(one, Start)] == [(FIRST, 3), (SECOND, 4)]
    assert [effect.message for effect in effects if isinstance(effect, Tell)] == [
        EngineReplaced(3, by_request=False, replica=0),
        EngineReplaced(4, by_request=True, replica=1),
    ]
    assert replacer.generations == [3, 4]


def test_a_death_by_a_signal_in_another_group_is_the_cause() -> None:
    replacer = ready_groups()
    replacer.handle(ChildSpoke(FIRST[0], Failed("rank 0 lost the others")), 5.0)
    replacer.handle(ChildExited(SECOND[0], -signal.SIGSEGV), 5.1)
    effects = exits(replacer, [FIRST[0], FIRST[1], SECOND[1]], 5.2, 1)
    replaced = [one.message for one in effects if isinstance(one, Tell) and isinstance(one.message, EngineReplaced)]
    assert [message.by_request for message in replaced] == [False, True]


def test_a_group_that_dies_while_both_start_again_starts_both_anew() -> None:
    replacer = ready_groups(most_replacements=2)
    exits(replacer, [*FIRST, *SECOND], 5.0, -signal.SIGKILL)
    gets_ready(replacer, FIRST, 6.0)
    exits(replacer, [SECOND[0]], 7.0, -signal.SIGKILL)
    effects = exits(replacer, [SECOND[1], *FIRST], 7.1, 1)
    assert [one.generation for one in effects if isinstance(one, Start)] == [5, 6]
    exits(replacer, [SECOND[0]], 8.0, -signal.SIGKILL)
    assert replacer.state is State.FAILING


def test_a_group_that_dies_while_the_server_stops_ends_the_requests_of_all() -> None:
    replacer = ready_groups()
    replacer.handle(StopAsked(25.0), 5.0)
    effects = replacer.handle(ChildExited(FIRST[0], -signal.SIGKILL), 6.0)
    (effect,) = effects
    assert isinstance(effect, Tell) and effect.child == FRONTEND and isinstance(effect.message, Stop)
