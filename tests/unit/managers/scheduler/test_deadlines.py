"""Requests that wait or run too long."""

from __future__ import annotations

from tests.unit.managers.scheduler.scheduler_host import Host, expected_ids, request, worker_hello


def test_a_request_that_waits_too_long_ends_with_a_sentence() -> None:
    host = Host(hello=worker_hello(num_slots=1), request_waiting_timeout=5.0)
    host.say(request(1, [1], max_new=50))
    host.tick()
    host.now = 1.0
    host.say(request(2, [2]))
    assert host.scheduler.next_tick_s is not None
    host.now = 5.9
    host.answer()
    host.tick()
    assert (2, 0) not in host.ends()
    host.now = 6.0
    host.tick()
    end = host.ends()[2, 0]
    assert (end.reason, end.status, end.num_output) == ("error", 503, 0)
    assert "has waited for 5 s" in end.message
    host.run()
    assert host.ends()[1, 0].reason == "length", "who runs is not meant"


def test_a_request_that_runs_too_long_keeps_what_it_got() -> None:
    host = Host(request_running_timeout=3.0)
    made = request(1, [1], max_new=50)
    host.say(made)
    host.tick()
    for _ in range(4):
        host.now += 0.5
        host.answer()
        host.tick()
    host.now = 3.0
    host.tick()
    end = host.ends()[1, 0]
    assert (end.reason, end.status, end.num_output) == ("error", 504, 4)
    assert host.ids(1) == expected_ids(made)[:4]
    host.run()
    assert host.value("num_timed_out") == 1
    assert host.state(deep=True).ok


def test_the_next_tick_comes_when_the_first_is_due() -> None:
    host = Host(hello=worker_hello(num_slots=1), request_waiting_timeout=5.0, request_running_timeout=20.0)
    host.say(request(1, [1], max_new=50))
    host.tick()
    host.tick()
    host.now = 1.0
    host.tick()
    assert host.scheduler.next_tick_s == 20.0
    host.say(request(2, [2]))
    host.tick()
    assert host.scheduler.next_tick_s == 6.0


def test_how_long_requests_waited_is_counted() -> None:
    host = Host(hello=worker_hello(num_slots=1))
    host.say(request(1, [1], max_new=2))
    host.say(request(2, [2], max_new=2))
    host.tick()
    host.now = 0.5
    host.run()
    assert (host.value("queue_ms_to_1"), host.value("queue_ms_to_1000"), host.value("queue_us")) == (1, 1, 500_000)


def test_the_state_tells_what_steps_were_made_of() -> None:
    host = Host()
    host.say(request(1, [1] * 6, max_new=3))
    host.run()
    names = ("rows_per_step_to_1", "num_prompt_steps", "num_computed_prompt_tokens", "prompt_step_us", "decode_step_us")
    assert [host.value(name) for name in names] == [3, 1, 6, 1000, 1000]
    values = host.state().values
    pages = [values[f"num_{kind}_pages"] for kind in ("free", "cached", "promised")]
    assert pages == [62, 2, 0]
