"""Who was in flight when engines died is tried: alone, before all others, until it has got further than it was then."""

from __future__ import annotations

import pytest

from srt.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    FrontendHello,
    GenerateRequest,
    LastWord,
    PauseGeneration,
    PlanSection,
    Refused,
)
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, expected_ids, request, worker_hello

LENGTH = 9


def suspect(rid: int, prompt: list[int], **changes: object) -> GenerateRequest:
    return request(rid, prompt, max_new=LENGTH, suspect=True, resumed=True, **changes)


def run_alone(host: Host) -> list[int]:
    """Until nothing is left to do. The seeds of those that ran in steps with nothing else in flight, one for each such step, in order."""
    alone = []
    seeds: dict[int, int] = {}
    host.tick()
    while host.plans:
        sections = host.all_plans[-len(host.plans) :]
        for section in host.all_plans:
            seeds.update((admission.slot, admission.seed) for admission in section.admissions)
        slots = [slot for section in sections for slot in slots_of(section)]
        if len(slots) == 1:
            alone.append(seeds[slots[0]])
        host.answer()
        host.tick()
        host.acknowledge()
        host.tick()
    return alone


def slots_of(section: PlanSection) -> list[int]:
    return [*section.extend_slots.tolist(), *section.decode_slots.tolist()]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_suspects_run_alone_one_after_the_other_and_before_all_others(policy: str) -> None:
    host = Host(schedule_policy=policy)
    made = [request(1, [1, 2, 3], max_new=LENGTH), suspect(2, [4] * 5), suspect(3, [5] * 6), request(4, [7])]
    for one in made:
        host.say(one)
    assert run_alone(host)[: 2 * TRIAL_TOKENS] == [2] * TRIAL_TOKENS + [3] * TRIAL_TOKENS
    assert [host.ids(one.rid) for one in made] == [expected_ids(one) for one in made]
    assert (host.value("num_tried"), host.value("num_preempted")) == (2, 0)


def test_who_runs_already_stands_still_meanwhile() -> None:
    host = Host()
    first, second = request(1, [1, 2, 3], max_new=LENGTH), suspect(2, [4] * 5)
    host.say(first)
    host.tick()
    assert len(host.plans) == 2  # in flight, so nobody is alone yet
    host.say(second)
    host.answer()
    host.tick()
    assert len(host.plans) == 1
    host.answer()
    assert run_alone(host)[:TRIAL_TOKENS] == [2] * TRIAL_TOKENS
    assert (host.ids(1), host.ids(2)) == (expected_ids(first), expected_ids(second))
    assert host.value("num_preempted") == 0


def test_a_trial_lasts_until_the_suspect_is_further_than_it_came() -> None:
    host = Host()
    outputs = expected_ids(suspect(2, [4] * 5))[:3]
    host.say(request(1, [1], max_new=LENGTH))
    host.say(suspect(2, [4] * 5, outputs=[outputs]))
    host.tick()
    for _ in range(TRIAL_TOKENS):
        assert [slots_of(section) for section in host.all_plans[-len(host.plans) :]] == [[0]]
        host.answer()
        host.tick()
    assert sorted(slots_of(host.all_plans[-1])) == [0, 1]
    host.run()
    assert outputs + host.ids(2) == expected_ids(suspect(2, [4] * 5))


def test_a_long_suspect_is_alone_with_each_of_its_chunks() -> None:
    host = Host(chunked_prefill_size=4)
    long = suspect(2, list(range(1, 19)))
    host.say(request(1, [1], max_new=LENGTH))
    host.say(long)
    assert run_alone(host)[: 4 + TRIAL_TOKENS] == [2] * (4 + TRIAL_TOKENS)
    assert host.ids(2) == expected_ids(long)


def test_a_suspect_gets_the_place_and_the_memory_of_others() -> None:
    host = Host(hello=worker_hello(num_slots=1, num_pages=6))
    first, second = request(1, [1] * 12, max_new=LENGTH), suspect(2, [2] * 12)
    host.say(first)
    host.tick()
    host.say(second)
    host.run()
    assert host.value("num_preempted") == 1
    assert (host.ids(1), host.ids(2)) == (expected_ids(first), expected_ids(second))


def test_a_suspect_may_leave_before_its_trial_and_in_it() -> None:
    host = Host()
    for rid in (1, 2, 3):
        host.say(suspect(rid, [rid] * 5))
    host.tick()
    host.say(Abort(2, -1))
    host.say(Abort(1, -1))
    host.run()
    assert host.ids(3) == expected_ids(suspect(3, [3] * 5))
    assert host.value("num_tried") == 2
    assert host.value("num_running") == host.value("num_waiting") == 0


def test_a_frontend_that_goes_takes_its_suspects_along() -> None:
    host = Host()
    host.say(suspect(1, [1] * 5))
    host.say(suspect(2, [2] * 5))
    host.tick()
    host.scheduler.frontend_gone(0)
    host.say(FrontendHello(0, PROTOCOL))
    other = request(1, [3], max_new=LENGTH)
    host.say(other)
    host.run()
    assert host.ids(1) == expected_ids(other)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_in_a_trial_loses_nothing(mode: str) -> None:
    host = Host()
    made = [suspect(1, [1] * 5), suspect(2, [2] * 5), request(3, [3], max_new=LENGTH)]
    for one in made:
        host.say(one)
    host.tick()
    host.say(PauseGeneration(7, mode))
    host.run()
    host.continue_generation(8)
    host.run()
    for one in made:
        assert host.ids(one.rid) == ([] if mode == "abort" else expected_ids(one))
    assert host.value("num_tried") == {"retract": 3, "in_place": 2, "abort": 1}[mode]  # who lost its slot is tried anew


def test_who_is_retracted_with_its_last_row_of_a_trial_in_flight_is_not_tried_anew() -> None:
    """Found by world 256."""
    host = Host()
    host.say(suspect(1, [1] * 5))
    host.tick()
    for _ in range(TRIAL_TOKENS - 1):
        host.answer()
        host.tick()
    host.say(PauseGeneration(7, "retract"))
    host.run()
    host.continue_generation(8)
    host.run()
    assert host.value("num_tried") == 1
    assert host.value("num_preempted") == 1


def test_who_was_retracted_in_its_trial_and_left_is_not_ended_again_when_its_time_is_up() -> None:
    """Found by world 0, where poison, pauses and a running timeout came together."""
    host = Host(request_running_timeout=3.0)
    host.say(suspect(1, [1] * 5))
    host.tick()
    host.say(PauseGeneration(7, "retract"))
    host.run()
    host.say(Abort(1, -1))
    host.now += 4.0
    host.tick()
    assert host.value("num_running") == host.value("num_waiting") == 0


def test_last_words_name_who_is_in_flight_and_whether_anybody_else_is() -> None:
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(1, [1], max_new=LENGTH))
    host.say(request(5, [2], max_new=LENGTH, choices=[0, 2]), 1)
    host.tick()
    host.say(request(2, [3]))  # in no plan yet
    assert words(host) == {0: ([(1, 0)], False), 1: ([(5, 0), (5, 2)], False)}
    host.say(Abort(5, -1), 1)
    assert words(host) == {0: ([(1, 0)], False), 1: ([], False)}  # what is gone was in flight, too


def test_last_words_of_one_request_alone_say_so_and_bring_what_frontends_are_owed() -> None:
    host = Host()
    made = request(1, [1], max_new=LENGTH)
    host.say(made)
    host.tick()
    host.answer()
    assert host.ids(1) == []
    assert words(host) == {0: ([(1, 0)], True)}
    assert host.ids(1) == expected_ids(made)[:1]
    host.run()
    assert words(host) == {0: ([], False)}


def test_last_words_bring_all_that_is_known_however_much_is_not_acknowledged() -> None:
    host = Host()
    made = request(1, [1], max_new=40)
    host.say(made)
    host.tick()
    for _ in range(20):
        host.answer()
        host.tick()
    assert len(host.ids(1)) == 8
    words(host)
    assert host.ids(1) == expected_ids(made)[:20]


def test_what_ran_already_goes_on_though_another_has_taken_its_label_meanwhile() -> None:
    host = Host()
    first, second = request(1, [1], label="job"), request(2, [2], label="job", resumed=True)
    host.say(first)
    host.say(second)
    host.say(request(3, [3], label="job"))
    host.run()
    assert [refused.rid for refused in host.of_type(Refused)] == [3]
    assert (host.ids(1), host.ids(2)) == (expected_ids(first), expected_ids(second))


def words(host: Host) -> dict[int, tuple[list[tuple[int, int]], bool]]:
    host.end()
    last = {number: host.of_type(LastWord, number)[-1] for number in host.inbox}
    return {
        number: (list(zip(word.rids.tolist(), word.choices.tolist(), strict=True)), word.is_alone)
        for number, word in last.items()
    }
