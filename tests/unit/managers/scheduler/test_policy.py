"""Who is admitted first, who may take whose place, and what the cache forgets first."""

from __future__ import annotations

from srt.managers.scheduler.request import Request, Status, expand
from srt.managers.scheduler.waiting import MAX_PASSED, NUM_COMPARED, LongestPrefixQueue
from srt.protocol.messages import Refused
from tests.support.wire import request_at_scheduler
from tests.unit.managers.scheduler.scheduler_host import Host, expected_ids, request, worker_hello

ONE_SLOT = worker_hello(num_slots=1)


def admitted(host: Host) -> list[int]:
    """Seeds, which are rids."""
    return [admission.seed for plan in host.all_plans for admission in plan.admissions]


def test_a_higher_priority_is_admitted_first_and_equal_ones_as_they_came() -> None:
    host = Host(hello=ONE_SLOT, schedule_policy="priority")
    for rid, priority in ((1, 0), (2, 1), (3, 5), (4, 5), (5, -1)):
        host.say(request(rid, [rid], priority=priority))
    host.run()
    assert admitted(host) == [3, 4, 2, 1, 5]


def test_waiting_is_worth_priority_so_that_nobody_starves() -> None:
    host = Host(hello=ONE_SLOT, enable_priority_scheduling=True, priority_aging_time=10.0)
    host.say(request(1, [1], priority=9))
    host.tick()
    host.say(request(2, [2], priority=0))
    host.now = 11.0
    host.say(request(3, [3], priority=1))
    host.now = 12.0
    host.say(request(4, [4], priority=2))
    host.run()
    assert admitted(host) == [1, 4, 2, 3], "11 seconds of waiting are worth more than one step of priority"


def test_a_much_higher_priority_takes_the_place_of_the_last_in_rank_which_loses_nothing() -> None:
    host = Host(hello=worker_hello(num_slots=2), schedule_policy="priority", priority_scheduling_preemption_threshold=3)
    made = {rid: request(rid, [rid] * 6, max_new=12, priority=p) for rid, p in ((1, 1), (2, 0), (3, 2), (4, 3))}
    host.say(made[1])
    host.say(made[2])
    host.tick()
    host.say(made[3])
    host.tick()
    assert admitted(host) == [1, 2], "a priority higher by 2 is not worth a preemption"
    host.say(made[4])
    host.answer()
    host.tick()
    assert admitted(host) == [1, 2, 4]
    host.run()
    assert host.value("num_preempted") == 1
    assert all(host.ids(rid) == expected_ids(one) for rid, one in made.items())


def test_who_may_displace_does_so_for_pages_too_but_only_if_it_then_fits() -> None:
    host = Host(
        hello=worker_hello(num_pages=10), schedule_policy="priority", priority_scheduling_preemption_threshold=1
    )
    host.say(request(1, [1] * 8, max_new=12, priority=5))
    host.say(request(2, [2] * 8, max_new=12))
    host.tick()
    host.answer()
    host.say(request(3, [3] * 8, max_new=20, priority=4))  # 7 pages: more than request 2 has
    host.answer()
    host.tick()
    assert host.value("num_preempted") == 0
    host.say(request(4, [4] * 8, max_new=12, priority=6))  # 5 pages
    host.answer()
    host.tick()
    assert (host.value("num_preempted"), admitted(host)) == (1, [1, 2, 4])
    host.run()


def test_nobody_is_displaced_for_a_prompt_that_another_request_is_computing() -> None:
    host = Host(
        hello=worker_hello(num_pages=10),
        chunked_prefill_size=4,
        schedule_policy="priority",
        priority_scheduling_preemption_threshold=1,
    )
    for number in (1, 2):
        host.say(request(number, [number] * 4, max_new=16))
        host.tick()
        host.answer()
    for number in (3, 4):
        host.say(request(number, list(range(16)), max_new=4, priority=6))
    host.tick()
    for _ in range(2):  # The first page of the prompt is cached already, and two of four are still to come.
        host.answer()
        host.tick()
    assert (host.value("num_preempted"), admitted(host)) == (1, [1, 2, 3])
    host.run()
    assert 4 in admitted(host)


def test_a_priority_is_refused_where_it_means_nothing() -> None:
    host = Host()
    host.say(request(1, [1], priority=1))
    (refused,) = host.of_type(Refused)
    assert (refused.status, "--enable-priority-scheduling" in refused.message) == (400, True)


def test_the_longest_cached_prefix_goes_first() -> None:
    host = Host(hello=ONE_SLOT, schedule_policy="lpm")
    host.say(request(1, list(range(20)), max_new=1))
    host.run()
    host.say(request(2, [50] * 20, max_new=1))
    host.tick()
    host.say(request(3, [60] * 20, max_new=1))
    host.say(request(4, [*range(8), 70], max_new=1))
    host.say(request(5, [*range(16), 70], max_new=1))
    host.run()
    assert admitted(host) == [1, 2, 5, 4, 3]


def test_with_lpm_nobody_is_passed_for_ever() -> None:
    host = Host(hello=ONE_SLOT, schedule_policy="lpm")
    host.say(request(1, list(range(20)), max_new=1))
    host.run()
    host.say(request(2, [50] * 9, max_new=1))
    for rid in range(3, 3 + MAX_PASSED + 2 * NUM_COMPARED):
        host.say(request(rid, [*range(8), rid], max_new=1))
    host.run()
    assert admitted(host).index(2) == MAX_PASSED + 1


def test_least_frequently_used_prefixes_go_first_if_asked_for() -> None:
    """Two prefixes; the first is used three times, the second last. Then memory for one of them is needed."""
    kept = {}
    for policy in ("lru", "lfu"):
        host = Host(hello=worker_hello(num_pages=9), radix_eviction_policy=policy)
        often, lately, other = [1] * 13, [2] * 13, [3] * 17
        for rid, prompt in enumerate((often, often, often, lately, other), 1):
            host.say(request(rid, prompt, max_new=1))
            host.run()
        host.say(request(8, often, max_new=1))
        host.run()
        kept[policy] = host.ends()[8, 0].cached_tokens
    assert kept["lru"] < kept["lfu"] == 12


def test_without_aging_the_more_important_always_goes_first() -> None:
    host = Host(hello=worker_hello(num_slots=1), schedule_policy="priority", priority_aging_time=float("inf"))
    host.say(request(1, [1]))
    host.tick()
    host.now = 1e6
    for rid, priority in ((2, 0), (3, 0), (4, 1)):
        host.say(request(rid, [rid], priority=priority))
    host.run()
    assert admitted(host) == [1, 4, 2, 3]


class LongestPrefixFirst:
    """A queue of requests that are known by rid; so much is cached of each."""

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}
        self._queue = LongestPrefixQueue(lambda one: self.cached.get(one.rid, 0))

    def push(self, rid: int, cached: int = 0) -> Request:
        self.cached[rid] = cached
        (one,) = expand(0, request_at_scheduler(request(rid, [rid])), rid)
        self._queue.push(one)
        return one

    def begin_plan(self) -> None:
        self._queue.begin_plan()

    def first(self) -> Request:
        first = self._queue.first()
        assert first is not None
        return first

    def stand_aside(self) -> Request:
        first = self.first()
        self._queue.stand_aside()
        return first

    def put_back(self, one: Request) -> None:
        self._queue.push(one)

    def admit(self) -> int:
        first = self.first()
        self._queue.pop()
        first.progress.status = Status.RUNNING
        return first.rid

    def admit_in_a_plan(self) -> int:
        self.begin_plan()
        return self.admit()


def test_with_lpm_who_comes_back_is_passed_no_more_often_than_others() -> None:
    """Nor if who had been the earliest meanwhile is admitted in between."""
    queue = LongestPrefixFirst()
    queue.push(2)
    for rid in range(3, 200):
        queue.push(rid, cached=1)
    assert all(queue.admit_in_a_plan() > 2 for _ in range(40))
    queue.push(1)
    assert all(queue.admit_in_a_plan() > 2 for _ in range(20))
    queue.cached[2] = 5
    order = [queue.admit_in_a_plan() for _ in range(MAX_PASSED)]
    assert 2 in order
    assert order.index(1) == MAX_PASSED - 20


def test_with_lpm_who_stands_aside_or_is_behind_such_is_passed_no_more_often_than_others() -> None:
    queue = LongestPrefixFirst()
    queue.push(1, cached=5)
    queue.push(2)
    for rid in range(3, 200):
        queue.push(rid, cached=1)
    for _ in range(10):
        queue.begin_plan()
        aside = queue.stand_aside()
        assert aside.rid == 1
        assert all(queue.admit() > 2 for _ in range(3))
        queue.put_back(aside)
    assert aside.place.num_passed == 30
    order = [queue.admit_in_a_plan() for _ in range(MAX_PASSED)]
    assert (order[0], order.index(2)) == (1, MAX_PASSED - 30 + 1)


def test_with_lpm_who_stands_aside_has_passed_nobody() -> None:
    queue = LongestPrefixFirst()
    first = queue.push(1)
    for rid in range(2, 200):
        queue.push(rid, cached=1)
    queue.begin_plan()
    for _ in range(MAX_PASSED):
        queue.stand_aside()
    assert first.place.num_passed == 0


def test_with_lpm_the_second_is_passed_no_more_often_than_the_first() -> None:
    """Who passed the first passed it too, and counts when the first is gone."""
    queue = LongestPrefixFirst()
    first = queue.push(1)
    queue.push(2)
    for rid in range(3, 200):
        queue.push(rid, cached=1)
    assert all(queue.admit_in_a_plan() > 2 for _ in range(50))
    first.progress.status = Status.ENDED
    order = [queue.admit_in_a_plan() for _ in range(MAX_PASSED)]
    assert order.index(2) == MAX_PASSED - 50
