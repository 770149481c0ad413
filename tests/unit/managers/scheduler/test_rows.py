"""Rows that get several ids in one step, or none; and pipelines, where a row is out for several steps."""

from __future__ import annotations

from msgspec.structs import replace

from srt.protocol.messages import StepPlan, StepResult, int32_array
from tests.unit.managers.scheduler.scheduler_host import Host, request, worker_hello


class Guesser(Host):
    """A replica whose decodes bring up to four ids; the test says which."""

    def __init__(self) -> None:
        super().__init__(hello=worker_hello(max_row_tokens=4))
        self.next_step = 1

    def bring(self, *rows: list[int]) -> None:
        """The result of the oldest step in flight."""
        counts, ids = [len(row) for row in rows], [token for row in rows for token in row]
        self.from_worker(StepResult(self.next_step, int32_array(counts), int32_array(ids), 0, [], 1000))
        self.next_step += 1
        self.tick()
        self.acknowledge()


def test_a_row_may_bring_several_ids_or_none() -> None:
    host = Guesser()
    host.say(request(1, [1, 2, 3], max_new=8))
    host.tick()
    for row in ([10], [11, 12, 13], [], [14, 15, 16, 17]):
        host.bring(row)
    assert host.ids(1) == [10, 11, 12, 13, 14, 15, 16, 17]
    done = host.ends()[1, 0]
    assert done.reason == "length"
    assert (done.num_verified, done.num_verified_ids) == (3, 7)
    assert (host.value("num_verified_rows"), host.value("num_verified_ids")) == (3, 7)
    assert host.fatal is None


def test_ids_behind_a_stop_are_dropped() -> None:
    host = Guesser()
    host.say(request(1, [1, 2, 3], max_new=20, stop_ids=[9]))
    host.say(request(2, [4, 5, 6], max_new=20))
    host.tick()
    host.bring([10], [20])
    host.bring([11, 9, 12], [21])
    host.bring([13, 14], [22, 23])
    assert host.ids(1) == [10, 11, 9]
    assert host.ids(2) == [20, 21, 22, 23]
    assert host.ends()[1, 0].matched == 9


def test_ids_beyond_the_length_are_dropped() -> None:
    host = Guesser()
    host.say(request(1, [1, 2, 3], max_new=3))
    host.tick()
    host.bring([10])
    host.bring([11, 12, 13, 14])
    assert host.ids(1) == [10, 11, 12]


def test_more_ids_than_a_row_may_have_break_the_replica() -> None:
    host = Guesser()
    host.say(request(1, [1, 2, 3], max_new=20))
    host.tick()
    host.bring([10, 11])
    assert host.fatal is not None and "counts" in host.fatal


def test_pages_are_there_for_all_that_a_row_may_bring() -> None:
    host = Guesser()
    host.say(request(1, [1, 2, 3], max_new=40))
    host.tick()  # two steps are out: 3 positions, and 4 at most
    assert host.value("num_free_pages") == 62
    host.bring([10])  # and 4 more
    assert host.value("num_free_pages") == 61
    host.bring([])
    host.bring([])
    assert host.value("num_free_pages") == 61


def test_where_pages_are_short_rows_bring_no_drafts() -> None:
    """Two rows that may bring four ids each have one page left for both, but each has room for one id."""
    hello = worker_hello(max_row_tokens=4, num_pages=3, page_size=16, max_request_tokens=32)
    host = Host(hello=hello, schedule_conservativeness=0.01, disable_radix_cache=True)
    for rid in (1, 2):
        host.say(request(rid, [rid] * 13, max_new=10))
    host.tick()
    host.answer()
    host.tick()
    sections = [plan.sections[0] for plan in host.plans if isinstance(plan, StepPlan)]
    assert [(len(section.decode_slots), section.row_tokens) for section in sections][1:] == [(2, 1)]
    assert host.value("num_preempted") == 0


def test_in_a_pipeline_a_row_waits_until_it_has_left_it() -> None:
    host = Host(hello=worker_hello(num_stages=3))
    for rid in (1, 2):
        host.say(request(rid, [rid] * 5, max_new=4))
    host.tick()
    assert len(host.plans) == 1  # both are in there
    host.answer()
    host.tick()
    slots = [plan.sections[0].decode_slots.tolist() for plan in host.plans if isinstance(plan, StepPlan)]
    assert slots == [[0], [1]]  # each step has its share
    host.run()
    assert sorted(host.ends()) == [(1, 0), (2, 0)]


def test_a_pipeline_that_is_full_needs_no_results_to_go_on() -> None:
    host = Host(hello=worker_hello(num_stages=2))
    for rid in (1, 2):
        host.say(request(rid, [rid] * 5, max_new=9))
    host.tick()
    host.answer()
    host.tick()
    slots = [plan.sections[0].decode_slots.tolist() for plan in host.plans if isinstance(plan, StepPlan)]
    assert slots == [[0], [1], [0]]


def test_in_a_pipeline_the_chunks_of_a_prompt_follow_each_other() -> None:
    """Each stage runs them in their order, so a chunk need not wait until the one before has left the pipeline."""
    host = Host(hello=worker_hello(num_stages=2), chunked_prefill_size=4)
    host.say(request(1, [7] * 14, max_new=2))
    host.tick()
    starts = [plan.sections[0].extend_starts.tolist() for plan in host.plans if isinstance(plan, StepPlan)]
    assert starts == [[0], [4], [8]]
    host.run()
    assert sorted(host.ends()) == [(1, 0)]


def test_in_a_pipeline_last_tokens_are_shared_out_evenly_too() -> None:
    """Those whose last token is under way want nothing more, and are no reason for others to wait."""
    host = Host(hello=worker_hello(num_stages=4, num_slots=16))
    for rid in range(16):
        host.say(request(rid + 1, [rid] * 5, max_new=2))
    host.tick()
    host.answer()
    host.tick()
    assert [len(plan.sections[0].decode_slots) for plan in host.plans if isinstance(plan, StepPlan)] == [4] * 4


def test_ranks_must_agree_about_rows_and_stages() -> None:
    host = Host(tp_size=2, greet=False)
    host.from_worker(host.hello, 0)
    host.from_worker(replace(host.hello, rank=1, num_stages=2), 1)
    assert host.fatal is not None and "num_stages" in host.fatal
