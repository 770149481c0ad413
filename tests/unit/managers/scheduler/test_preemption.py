"""Memory that is promised on evidence, and what happens when the evidence was wrong."""

from __future__ import annotations

from srt.managers.scheduler.forecast import NUM_NEEDED, NUM_REMEMBERED, OutputForecast
from srt.protocol.messages import Abort, PlanSection
from tests.unit.managers.scheduler.scheduler_host import Host, expected_ids, request, worker_hello

BOLD = 0.01  # conservativeness: next to nothing is expected of an answer


def test_without_evidence_all_that_a_request_may_use_is_expected() -> None:
    assert OutputForecast(1.0).expected_outputs(100) == 100


def test_answers_are_expected_to_be_as_long_as_nine_of_ten_were() -> None:
    forecast = OutputForecast(1.0)
    for i in range(NUM_NEEDED * 5):
        forecast.note_end(90 if i % 20 == 0 else 25, 100)
    assert forecast.expected_outputs(200) == 50
    assert forecast.expected_outputs(1) == 1


def test_only_the_latest_answers_say_what_is_expected() -> None:
    forecast = OutputForecast(1.0)
    for share in (0, 64, 256, 32):
        for _ in range(NUM_REMEMBERED):
            forecast.note_end(share, 256)
        assert forecast.expected_outputs(256) == max(share, 1)
    for _ in range(NUM_REMEMBERED // 10 + 1):
        forecast.note_end(200, 256)
    assert forecast.expected_outputs(256) == 200, "one more than a tenth used so much"


def test_requests_that_may_use_little_say_nothing_about_those_that_may_use_much() -> None:
    forecast = OutputForecast(1.0)
    for _ in range(NUM_NEEDED):
        forecast.note_end(250, 2000)
        for _ in range(9):
            forecast.note_end(1, 1)
            forecast.note_end(10, 20)
    assert [forecast.expected_outputs(most) for most in (1, 2, 30, 2000, 3000)] == [1, 2, 15, 250, 375]


def test_the_latest_is_preempted_when_memory_runs_out_and_every_answer_is_whole() -> None:
    host = Host(hello=worker_hello(num_pages=12), schedule_conservativeness=BOLD)
    made = [request(rid, [rid] * 7, max_new=24) for rid in (1, 2, 3)]
    for one in made:
        host.say(one)
    host.run()
    assert host.value("num_preempted") == 2
    seeds = [admission.seed for plan in host.all_plans for admission in plan.admissions]
    assert seeds == [1, 2, 3, 2, 3], "the first stays; the others come back in their old order"
    for one in made:
        assert host.ids(one.rid) == expected_ids(one)
        assert host.ends()[one.rid, 0].reason == "length"


def test_a_token_in_flight_is_kept_when_its_request_is_preempted() -> None:
    """Two plans are out when memory runs out: both samples are known before the request comes back."""
    host = Host(hello=worker_hello(num_pages=8), schedule_conservativeness=BOLD)
    host.say(request(1, [1] * 8, max_new=20))
    host.say(request(2, [2] * 8, max_new=20))
    host.run()
    first, again = [a for plan in host.all_plans for a in plan.admissions if a.seed == 2]
    known = len(again.ids)
    sampled_before = sum(
        slot == first.slot
        for plan in host.all_plans[: host.all_plans.index(_plan_of(host, again.seed, 1))]
        for slot in [*plan.decode_slots.tolist(), *plan.extend_slots[plan.extend_samples == 1].tolist()]
    )
    assert known == 8 + sampled_before
    assert again.cached > 0, "what it had computed was in the cache"
    assert host.ids(2) == expected_ids(request(2, [2] * 8, max_new=20))


def test_a_preempted_request_says_how_much_was_cached_when_it_first_ran() -> None:
    host = Host(hello=worker_hello(num_pages=8), schedule_conservativeness=BOLD)
    host.say(request(1, [1] * 8, max_new=20))
    host.say(request(2, [2] * 8, max_new=20))
    host.run()
    assert host.ends()[2, 0].cached_tokens == 0


def test_a_preempted_request_can_be_aborted_with_its_tokens_in_flight() -> None:
    host = Host(hello=worker_hello(num_pages=8), schedule_conservativeness=BOLD)
    host.say(request(1, [1] * 8, max_new=20))
    host.say(request(2, [2] * 8, max_new=20, label="two"))
    host.tick()
    while host.value("num_preempted") == 0:
        host.answer()
        host.tick()
    host.say(Abort(2, -1))
    host.run()
    end = host.ends()[2, 0]
    assert end.reason == "abort"
    assert host.ids(2) == expected_ids(request(2, [2] * 8, max_new=20))[: end.num_output]
    assert host.state(deep=True).ok


def test_memory_for_exactly_one_request_serves_many() -> None:
    host = Host(hello=worker_hello(num_pages=7, num_slots=4), schedule_conservativeness=BOLD)
    made = [request(rid, [5, 6, 7, 8, rid % 2], max_new=23) for rid in range(8)]
    for one in made:
        host.say(one)
    host.run()
    assert [host.ids(one.rid) for one in made] == [expected_ids(one) for one in made]


def _plan_of(host: Host, seed: int, occurrence: int) -> PlanSection:
    return [plan for plan in host.all_plans if any(a.seed == seed for a in plan.admissions)][occurrence]
