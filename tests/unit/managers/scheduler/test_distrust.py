"""What the prefix cache keeps of a request for which the model gave no finite logits, and of others beside it."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from srt.protocol.messages import StepPlan, int32_array
from tests.unit.managers.scheduler.scheduler_host import Host, request, worker_hello

PROMPT = list(range(1, 14))  # three pages, and one token


def answer_without_logits(host: Host, *rids: int) -> None:
    """The oldest plan is executed, and the model has nothing finite for these requests."""
    plan = host.plans.popleft()
    assert isinstance(plan, StepPlan)
    (section,) = plan.sections
    slots = [*section.extend_slots[section.extend_samples == 1].tolist(), *section.decode_slots.tolist()]
    seeds = {a.slot: a.seed for one in host.all_plans[: plan.step] for a in one.admissions}
    result = host.worker.execute(plan)
    is_broken = np.array([seeds[slot] in rids for slot in slots])
    assert is_broken.any()
    counts = int32_array(np.where(is_broken, -1, 1))
    host.from_worker(replace(result, counts=counts, ids=result.ids[~is_broken]))


def cached(host: Host, rid: int) -> int:
    return host.ends()[rid, 0].cached_tokens


def test_a_prompt_that_fails_is_computed_anew_by_the_next() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.tick()
    answer_without_logits(host, 1)
    host.run()
    assert (host.ends()[1, 0].status, host.value("num_cached_pages")) == (500, 0)
    host.say(request(2, PROMPT))
    host.run()
    assert cached(host, 2) == 0


def test_what_others_made_use_of_outlives_a_failure() -> None:
    host = Host()
    host.say(request(1, PROMPT[:8], max_new=5))
    host.run()
    host.say(request(2, [*PROMPT[:8], *[50] * 5]))
    host.run()
    num_before = host.value("num_cached_pages")
    host.say(request(3, [*PROMPT[:8], *[60] * 9]))
    host.tick()
    answer_without_logits(host, 3)
    host.run()
    assert (cached(host, 3), host.value("num_cached_pages")) == (8, num_before)


def test_what_another_runs_on_stays_until_that_fails_too() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=9))
    host.say(request(2, PROMPT, max_new=9))
    host.tick()
    answer_without_logits(host, 1)
    host.tick()
    assert host.value("num_cached_pages") == 3
    answer_without_logits(host, 2)
    host.run()
    assert (cached(host, 2), host.value("num_cached_pages")) == (12, 0)


def test_who_lost_its_slot_leaves_nothing_either_when_its_last_row_fails() -> None:
    host = Host(hello=worker_hello(num_pages=8), schedule_conservativeness=0.01)
    for rid in (1, 2):
        host.say(request(rid, [rid] * 8, max_new=20))
    host.tick()
    while not host.value("num_preempted"):
        host.answer()
        host.tick()
    assert host.value("num_waiting") == 1
    assert host.value("num_cached_pages") == 5
    answer_without_logits(host, 2)
    assert host.value("num_cached_pages") == 2, "the first one's prompt"
    host.run()
    assert host.ends()[2, 0].status == 500
    host.say(request(3, [2] * 9, max_new=1))
    host.run()
    assert cached(host, 3) == 0


def test_a_request_whose_time_is_up_leaves_what_it_has_computed() -> None:
    host = Host(request_running_timeout=5.0)
    host.say(request(1, PROMPT, max_new=100))
    host.tick()
    host.answer()
    host.now = 6.0
    host.run()
    assert (host.ends()[1, 0].status, host.value("num_cached_pages")) == (504, 3)
