from __future__ import annotations

from msgspec.structs import replace

from srt.protocol.messages import AckBatch, AskRange, FrontendHello, LogprobSpec
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, expected_ids, request, worker_hello

LONG = 40


def run_without_ack(host: Host) -> None:
    host.run(acknowledge=False)


def test_after_eight_unacknowledged_batches_nothing_is_sent() -> None:
    host = Host()
    host.say(request(1, [1, 2, 3], max_new=LONG))
    run_without_ack(host)
    assert [batch.number for batch in host.batches()] == list(range(8))
    assert not host.ends()


def test_an_acknowledgement_brings_one_range_with_all_that_was_missed() -> None:
    host = Host()
    made = request(1, [1, 2, 3], max_new=LONG)
    host.say(made)
    run_without_ack(host)
    host.say(AckBatch(0))
    host.tick()
    last = host.batches()[-1]
    assert (last.number, last.first.tolist(), last.counts.tolist()) == (8, [8], [LONG - 8])
    assert host.ids(1) == expected_ids(made)
    assert host.ends()[1, 0].num_output == LONG


def test_a_catch_up_batch_lists_requests_in_order_of_arrival_whoever_ended_first() -> None:
    host = Host()
    long, short = request(1, [1, 2, 3], max_new=LONG), request(2, [4, 5, 6], max_new=12)
    host.say(long)
    host.say(short)
    while len(host.batches()) < 8 or host.value("num_running") == 2:
        host.tick()
        host.answer()
    host.say(AckBatch(7))
    host.tick()
    batch = host.batches()[-1]
    assert batch.rids.tolist() == [1, 2]
    assert batch.counts.tolist()[0] > 1
    host.say(AckBatch(8))
    host.run()
    assert host.ids(1) == expected_ids(long)
    assert host.ids(2) == expected_ids(short)


def test_a_slow_frontend_does_not_hold_up_another() -> None:
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(1, [1, 2, 3], max_new=LONG))
    host.say(request(1, [4, 5, 6], max_new=LONG, label="other"), 1)
    host.tick()
    while host.plans:
        host.answer()
        host.tick()
        host.acknowledge(1)
    host.tick()
    assert len(host.batches(0)) == 8
    assert len(host.ids(1, frontend=1)) == LONG
    assert host.ends(1)[1, 0].reason == "length"


def test_a_request_is_kept_until_its_end_is_acknowledged() -> None:
    host = Host()
    host.say(request(1, [1, 2, 3], max_new=1))
    run_without_ack(host)
    assert host.value("live_requests_of_frontend_0") == 1
    host.acknowledge()
    assert host.value("live_requests_of_frontend_0") == 0


def test_an_older_acknowledgement_does_not_forget_an_end_that_is_sent_again() -> None:
    host = Host()
    host.say(request(1, [1, 2, 3], max_new=2))
    run_without_ack(host)
    host.say(AskRange(1, 0, 0))
    host.tick()
    first, again = [batch.number for batch in host.batches() if batch.done]
    host.say(AckBatch(first))
    assert host.value("live_requests_of_frontend_0") == 1
    host.say(AckBatch(again))
    assert host.value("live_requests_of_frontend_0") == 0


def test_a_running_requests_range_can_be_asked_for_again() -> None:
    host = Host()
    made = request(1, [1, 2, 3], max_new=LONG)
    host.say(made)
    host.tick()
    for _ in range(5):
        host.answer()
        host.tick()
    host.say(AskRange(1, 0, 1))
    host.tick()
    assert host.batches()[-1].first.tolist() == [1]
    assert host.batches()[-1].ids.tolist() == expected_ids(made)[1:5]


def test_logprobs_travel_with_their_tokens_and_come_again_until_they_are_acknowledged() -> None:
    host = Host()
    host.say(request(1, [1, 2, 3], max_new=4, logprobs=LogprobSpec(output=True)))
    host.tick()
    for _ in range(3):
        host.answer()
        host.tick()
    parts = [part for batch in host.batches() for part in batch.logprobs]
    assert [(part.first, part.is_prompt, part.rid) for part in parts] == [(i, False, 1) for i in range(3)]
    host.say(AckBatch(0))
    host.say(AskRange(1, 0, 0))
    host.tick()
    assert [part.first for part in host.batches()[-1].logprobs] == [1, 2]


def test_no_batch_is_sent_when_nothing_is_new() -> None:
    host = Host()
    host.tick()
    host.tick()
    assert not host.batches()


def test_each_frontend_gets_its_own_requests_in_one_batch_a_step() -> None:
    host = Host(hello=replace(worker_hello(), num_slots=8))
    host.say(FrontendHello(1, PROTOCOL), 1)
    for rid in range(3):
        host.say(request(rid, [rid, 1, 2], label=f"a{rid}"))
        host.say(request(rid, [rid, 3, 4], label=f"b{rid}"), 1)
    host.tick()
    host.answer()
    host.tick()
    assert host.batches(0)[0].rids.tolist() == host.batches(1)[0].rids.tolist() == [0, 1, 2]
    assert host.batches(0)[0].ids.tolist() != host.batches(1)[0].ids.tolist()


def test_a_frontend_that_reads_nothing_changes_nothing_for_others_and_costs_only_what_its_own_requests_hold() -> None:
    """The same traffic twice; one time the second frontend never acknowledges."""
    hosts = []
    for is_slow in (False, True):
        host = Host(hello=worker_hello(num_slots=4))
        host.say(FrontendHello(1, PROTOCOL), frontend=1)
        for rid in range(1, 13):
            host.say(request(rid, [rid] * 5, max_new=20), frontend=rid % 2)
        host.tick()
        while host.plans:
            host.answer()
            host.tick()
            host.acknowledge(0)
            if not is_slow:
                host.acknowledge(1)
            host.tick()
        hosts.append(host)
    quick, slow = hosts
    assert [(p.decode_slots.tolist(), p.extend_slots.tolist()) for p in slow.all_plans] == [
        (p.decode_slots.tolist(), p.extend_slots.tolist()) for p in quick.all_plans
    ]
    assert [(b.number, b.ids.tolist()) for b in slow.batches(0)] == [
        (b.number, b.ids.tolist()) for b in quick.batches(0)
    ]
    assert len(slow.batches(1)) == 8
    state = slow.state().values
    assert (state["live_requests_of_frontend_0"], state["live_requests_of_frontend_1"]) == (0, 6)
    assert (state["num_running"], state["num_waiting"], state["num_pinned"]) == (0, 0, 0)
