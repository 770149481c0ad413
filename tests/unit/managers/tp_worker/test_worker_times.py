"""A worker's own times: of one size of step at a time, and of the steps since they were last asked for."""

from __future__ import annotations

from srt.managers.tp_worker.worker_times import WorkerTimes


def run(times: WorkerTimes, first: int, count: int, rows: int, launch_us: int, answer_us: int, step_us: int) -> None:
    for step in range(first, first + count):
        ready_s = step + step_us / 1e6
        times.launched(step, rows, float(step), step + launch_us / 1e6, is_busy=False)
        times.answered(step, float(step), ready_s, ready_s + answer_us / 1e6)


def test_figures_are_of_the_size_that_came_most_often_and_prompts_are_left_out() -> None:
    times = WorkerTimes(2)
    run(times, 1, 9, 0, 900, 900, 90_000)
    run(times, 10, 3, 1, 20, 5, 1_000)
    run(times, 13, 8, 256, 150, 40, 9_000)
    found = times.pop()
    assert found["decode_rows"] == 256
    assert [found[f"{name}_us_p99"] for name in ("launch", "answer", "step")] == [150, 40, 9_000]


def test_what_was_told_is_not_told_again() -> None:
    times = WorkerTimes(2)
    run(times, 1, 50, 256, 150, 40, 9_000)
    assert times.pop()["decode_rows"] == 256
    run(times, 51, 2, 1, 20, 5, 1_000)
    assert (found := times.pop())["decode_rows"] == 1
    assert found["launch_us_p99"] == 20
    assert times.pop() == {}


def test_a_loop_goes_from_a_result_to_the_launch_of_the_plan_that_it_led_to() -> None:
    times = WorkerTimes(2)
    times.launched(1, 4, 0.0, 0.1, is_busy=False)
    times.launched(2, 4, 0.2, 0.3, is_busy=True)
    times.answered(1, 0.1, 1.0, 1.1)
    times.launched(3, 4, 1.2, 1.5, is_busy=True)
    assert times.pop()["loop_us_p50"] == 500_000
