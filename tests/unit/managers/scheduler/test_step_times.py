"""Prompts and those who stream: how much of a step prompts get."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from srt.managers.scheduler.step_times import LEAST_CHUNK, StepTimes
from srt.protocol.messages import PlanSection, StepPlan
from tests.unit.managers.scheduler.scheduler_host import Host, request, worker_hello


def load(extends: list[tuple[int, int]], num_decodes: int) -> tuple[int, int, float]:
    """Of a step: decodes, prompt tokens, and what these attend to. Extends as (start, count)."""
    return num_decodes, sum(count for _, count in extends), sum(count * (start + count / 2) for start, count in extends)


def load_us(num_decodes: int, num_tokens: int, num_pairs: float) -> int:
    """A step of a made-up GPU: 10 ms for decodes, 25 µs a prompt token, 1 µs per 1,000 tokens that it attends to."""
    return (10_000 if num_decodes else 2_000) + int(25 * num_tokens + num_pairs / 1000)


def gpu_us(plan: PlanSection) -> int:
    extends = list(zip(plan.extend_starts.tolist(), plan.extend_counts.tolist(), strict=True))
    return load_us(*load(extends, len(plan.decode_slots)))


def test_what_tokens_cost_is_learnt_and_depends_on_how_far_they_look_back() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    for start in range(0, 100_000, 500):
        step = load([(start, 500)], 8)
        times.record(*step, load_us(*step))
    assert times.per_token == pytest.approx(25, rel=0.05)
    assert times.per_pair == pytest.approx(0.001, rel=0.05)
    for start in (0, 90_000):
        count = times.tokens_within(10_000, start)
        assert times.cost_us(start, count) <= 10_000 < times.cost_us(start, count + 1)


def test_without_streams_prompts_get_all() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    times.record(*load([(0, 100)], 8), 50_000)
    assert times.tokens_within(times.budget_us(0), 0) > 1 << 30
    assert times.tokens_within(times.budget_us(1), 0) == 25


def test_prompts_go_on_whatever_it_costs() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10)
    times.record(*load([(0, 10)], 8), 1_000_000)
    assert times.tokens_within(times.budget_us(8), 0) == LEAST_CHUNK


def test_what_steps_of_prompts_alone_cost_beside_the_tokens_makes_no_token_seem_cheap() -> None:
    """The first of two such steps took 10 ms of its own: that is not due to how far its tokens look back."""
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    times.record(*load([(0, 300), (0, 300), (0, 159)], 0), 10_000 + 759 * 50)
    times.record(*load([(0, 230)] * 60, 0), 10_000 + 230 * 60 * 50)
    for start, count in ((0, 20), (0, 250), (1000, 100)):
        assert times.cost_us(start, count) >= count * 50


def test_one_timed_step_says_nothing_about_tokens_that_look_back_further() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    times.record(*load([(0, 100)], 8), 12_500)
    assert times.cost_us(0, 10) == 250, "may be due to the tokens"
    assert times.cost_us(1000, 10) == 25 * 10 * 1005 / 50, "or to what they attend to"
    times.record(*load([(900, 100)], 8), 12_600)
    assert times.cost_us(1000, 10) == pytest.approx(260, rel=0.01)


def test_that_tokens_which_look_back_further_cost_less_is_not_believed() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    times.record(*load([(0, 20)], 8), 10_000 + 20 * 50)  # the step took a little longer by itself
    times.record(*load([(0, 200)], 8), 10_000 + 200 * 45)
    mean_us, mean_attended = 47.3, 58.4
    assert times.cost_us(500, 10) == pytest.approx(10 * mean_us * 505 / mean_attended, rel=0.01)
    assert times.cost_us(0, 10) == pytest.approx(10 * mean_us, rel=0.01)


def test_a_step_that_compiled_kernels_is_soon_forgotten() -> None:
    times = StepTimes(0)
    times.record(*load([(0, 2000)], 0), 5_000_000)
    times.record(*load([], 8), 10_000)
    for num_steps in range(60):
        if times.tokens_within(10_000, 0) > 300:
            break
        step = load([(0, times.tokens_within(10_000, 0))], 8)
        times.record(*step, load_us(*step))
    assert num_steps < 40


def run_timed(host: Host, cost_us: Callable[[PlanSection], int], max_steps: int) -> list[tuple[PlanSection, int]]:
    """The steps and what each took."""
    steps: list[tuple[PlanSection, int]] = []
    execute = host.worker.execute
    host.tick()
    while host.plans and len(steps) < max_steps:
        plan = host.plans.popleft()
        assert isinstance(plan, StepPlan)
        took = cost_us(plan.sections[0])
        steps.append((plan.sections[0], took))
        host.from_worker(replace(execute(plan), step_us=took))
        host.tick()
        host.acknowledge()
    return steps


def long_world(max_decode_stall: float = 10.0, *, streams: bool = True) -> Host:
    hello = worker_hello(page_size=64, num_pages=4000, num_slots=40, max_request_tokens=120_000)
    host = Host(hello=hello, chunked_prefill_size=8192, max_decode_stall=max_decode_stall)
    for rid in range(32):
        host.say(request(rid, [rid] * 20, max_new=1000, stream=streams))
    run_timed(host, gpu_us, 40)
    return host


def test_a_very_long_prompt_delays_no_stream_by_more_than_twice_its_step_and_the_stated_bound() -> None:
    host = long_world(max_decode_stall=5.0)
    host.say(request(100, list(range(97)) * 1030, max_new=4))
    steps = run_timed(host, gpu_us, 600)
    mixed = [(plan, us) for plan, us in steps if len(plan.extend_slots)]
    assert sum(int(plan.extend_counts.sum()) for plan, _ in mixed) == 97 * 1030
    assert all(len(plan.decode_slots) == 32 for plan, _ in mixed), "no stream stands still"
    assert max(us for _, us in mixed) <= 2 * 10_000 + 5_000 + LEAST_CHUNK * 130
    used = [us for _, us in mixed[:-1]]
    assert sum(used) / len(used) >= 20_000, "nor is the room for prompts left unused"


def test_where_nobody_watches_prompts_get_whole_chunks_until_somebody_does() -> None:
    host = long_world(streams=False)
    host.say(request(100, list(range(97)) * 1030, max_new=4))
    steps = run_timed(host, gpu_us, 6)
    assert [int(plan.extend_counts.sum()) for plan, _ in steps[2:]] == [8192] * 4, "two were planned before"
    host.say(request(101, [7] * 50, max_new=20, stream=True))
    steps = run_timed(host, gpu_us, 30)
    with_stream = [us for plan, us in steps if len(plan.decode_slots) == 33]
    assert len(with_stream) >= 19
    assert max(with_stream) <= 2 * 10_000 + 10_000 + LEAST_CHUNK * 130
    assert max(us for plan, us in steps[-10:]) > 200_000, "when the stream has ended nobody watches again"


def test_short_prompts_pass_a_long_one_which_goes_on_all_the_same() -> None:
    host = long_world()
    host.say(request(100, list(range(97)) * 1030, max_new=4))
    run_timed(host, gpu_us, 5)
    host.say(request(101, [7] * 50, max_new=1))
    steps = run_timed(host, gpu_us, 6)
    assert (101, 0) in host.ends(), "a short prompt does not wait for the long one"
    assert all(len(plan.extend_slots) >= 1 for plan, _ in steps)


def test_now_and_then_a_step_shows_what_decodes_take_alone() -> None:
    times = StepTimes(0)
    for planned in range(200):
        tokens = 0 if times.must_measure(8) else 20
        times.note_planned(8, tokens)
        times.record(*load([(0, tokens)] if tokens else [], 8), 12_000 if tokens else 10_000)
        if times.decode_us and planned < 10:
            first = planned
    assert times.decode_us == 10_000
    assert first < 10
    assert not times.must_measure(8)
    assert times.must_measure(4), "half as many streams take less time"


def test_a_chunk_is_at_most_twice_as_large_as_one_that_was_timed() -> None:
    times = StepTimes(0)
    times.record(*load([], 8), 10_000)
    assert times.most_tokens(8) == LEAST_CHUNK
    times.record(*load([(0, 100)], 8), 10_000)  # which seems to cost nothing
    assert times.most_tokens(8) == 200
    assert times.most_tokens(0) > 1 << 30
