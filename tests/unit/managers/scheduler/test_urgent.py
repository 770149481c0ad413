"""A request that asks about the engine's health goes before all others."""

from __future__ import annotations

import pytest

from srt.managers.scheduler.forecast import NUM_NEEDED
from srt.protocol.messages import Abort, Refused
from tests.unit.managers.scheduler.scheduler_host import VOCAB, Host, expected_ids, request, worker_hello


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_an_urgent_request_takes_a_place_at_once_and_whoever_had_it_loses_nothing(policy: str) -> None:
    host = Host(hello=worker_hello(num_slots=1), schedule_policy=policy, max_queued_requests=1)
    long, waiting = request(1, [1] * 6, max_new=12), request(2, [2] * 6)
    host.say(long)
    host.tick()
    host.say(waiting)
    host.say(request(3, [3]))
    assert [refused.rid for refused in host.of_type(Refused)] == [3]
    host.say(request(4, [4], max_new=1, urgent=True))
    host.answer()
    host.tick()
    assert [admission.seed for plan in host.all_plans for admission in plan.admissions] == [1, 4]
    host.run()
    assert host.value("num_preempted") == 1
    assert (host.ids(1), host.ids(2)) == (expected_ids(long), expected_ids(waiting))
    assert len(host.ids(4)) == 1


def test_an_urgent_request_takes_a_place_also_when_a_later_one_has_gone() -> None:
    """World 88: the last urgent one that came had been admitted, while an earlier one waited for its prefix."""
    host = Host(hello=worker_hello(num_slots=1))
    host.say(request(1, [1] * 6, max_new=12))
    host.tick()
    host.say(request(2, [2], max_new=1, urgent=True))
    host.say(request(3, [3], max_new=1, urgent=True))
    host.say(Abort(3, -1))
    host.answer()
    host.tick()
    assert [admission.seed for plan in host.all_plans for admission in plan.admissions] == [1, 2]


def test_an_urgent_request_takes_a_place_also_when_the_cache_has_much_of_it() -> None:
    """World 53: what the cache had of it counted twice, as pages that it did not need and as pages that it could take."""
    host = Host(hello=worker_hello(page_size=1, num_pages=20))
    host.say(request(1, [1] * 8, max_new=1))
    host.run()
    host.say(request(2, [2] * 2, max_new=9))
    host.tick()
    host.say(request(3, [1] * 8 + [3], max_new=1, urgent=True))
    host.answer()
    host.tick()
    assert [admission.seed for plan in host.all_plans for admission in plan.admissions] == [1, 2, 3]
    host.run()
    assert host.value("num_preempted") == 1


def test_an_urgent_request_finds_memory_even_if_others_hold_all_of_it() -> None:
    host = Host(hello=worker_hello(num_pages=4))
    long = request(1, [1] * 12, max_new=4)
    host.say(long)
    host.tick()
    host.say(request(2, [2], max_new=1, urgent=True))
    host.answer()
    host.tick()
    assert [admission.seed for plan in host.all_plans for admission in plan.admissions] == [1, 2]
    host.run()
    assert host.ids(1) == expected_ids(long)


def test_urgent_requests_do_not_take_each_others_places() -> None:
    host = Host(hello=worker_hello(num_slots=1))
    for rid in (1, 2):
        host.say(request(rid, [rid], max_new=3, urgent=True))
    host.run()
    assert host.value("num_preempted") == 0
    assert [len(host.ids(rid)) for rid in (1, 2)] == [3, 3]


def test_urgent_requests_leave_no_trace_in_what_is_told_and_expected_of_others() -> None:
    host, names = Host(), ("expected_share_of_max_new_tokens", "queue_ms_to_1", "queue_ms_above")
    for rid in range(1, NUM_NEEDED + 1):
        host.say(request(rid, [rid], max_new=4, stop_ids=list(range(VOCAB))))
        host.run()
    before = [host.value(name) for name in names]
    for rid in range(100, 200):
        host.now += 60.0
        host.say(request(rid, [1], max_new=2, urgent=True))
        host.tick()
        host.now += 60.0
        host.run()
    assert [host.value(name) for name in names] == before == [1 / 4, NUM_NEEDED, 0]


def test_urgent_requests_do_not_make_others_come_back_sooner() -> None:
    host = Host(hello=worker_hello(num_slots=1), max_queued_requests=1)
    host.say(request(1, [1], max_new=1))
    host.run()
    for rid in range(2, 200):
        host.now += 10.0
        host.say(request(rid, [2], max_new=1, urgent=True))
        host.run()
    for rid in range(200, 203):
        host.say(request(rid, [3]))
        host.tick()
    (refused,) = host.of_type(Refused)
    assert refused.retry_after_s == 60
