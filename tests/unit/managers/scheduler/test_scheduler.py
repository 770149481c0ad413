from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import Ext
from msgspec.structs import replace

from srt.managers.scheduler.effects import Frontend, ToFrontend
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AskRange,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FrontendHello,
    GetState,
    Load,
    LogprobSpec,
    PauseGeneration,
    Refused,
    Rejected,
    RowLogprobs,
    SchedulerHello,
    StepAck,
    StepPlan,
    StepResult,
    WorkDone,
    WorkerFault,
    int32_array,
)
from srt.sampling.sampling_params import choice_seed
from tests.support.wire import request_at_scheduler
from tests.unit.managers.scheduler.scheduler_host import PROTOCOL, Host, expected_ids, request, worker_hello

PROMPT = list(range(10))


# ---- Handshake


def test_the_replica_is_ready_when_all_ranks_agree() -> None:
    host = Host(tp_size=2, greet=False)
    host.say(FrontendHello(0, PROTOCOL))
    host.from_worker(worker_hello(0), 0)
    assert not host.scheduler.is_ready
    host.from_worker(worker_hello(1), 1)
    assert host.scheduler.is_ready
    assert host.facts["max_total_num_tokens"] == 256
    assert host.greeting == SchedulerHello(256, 200, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("config_hash", "c2"),
        ("dtype", "bfloat16"),
        ("page_size", 8),
        ("num_pages", 63),
        ("vocab_size", 5),
        ("num_slots", 2),
    ],
)
def test_ranks_that_differ_end_the_replica_with_both_values(field: str, value: Any) -> None:
    host = Host(tp_size=2, greet=False)
    host.from_worker(worker_hello(0), 0)
    host.from_worker(replace(worker_hello(1), **{field: value}), 1)
    assert host.fatal is not None
    assert field in host.fatal
    assert str(getattr(worker_hello(), field)) in host.fatal
    assert str(value) in host.fatal


def test_a_worker_of_another_protocol_ends_the_replica() -> None:
    host = Host(greet=False)
    host.from_worker(worker_hello(protocol_hash="p2"))
    assert host.fatal is not None
    assert "protocol p2" in host.fatal


def test_a_frontend_of_another_protocol_is_rejected() -> None:
    host = Host()
    host.say(FrontendHello(1, "p2"), 1)
    (rejected,) = host.of_type(Rejected, 1)
    assert "protocol p2" in rejected.reason
    assert not host.of_type(SchedulerHello, 1)


def test_requests_that_come_before_the_workers_are_kept() -> None:
    host = Host(greet=False)
    host.say(FrontendHello(0, PROTOCOL))
    early = request(1, PROMPT)
    host.say(early)
    host.say(request(2, PROMPT))
    host.say(Abort(2, -1))
    host.be_ready()
    host.run()
    assert host.ids(1) == expected_ids(early)
    assert host.ends()[2, 0].reason == "abort"


def test_a_frontend_must_say_hello_first() -> None:
    host = Host()
    host.say(request(1, PROMPT), 3)
    assert len(host.of_type(Rejected, 3)) == 1


# ---- Plans and results


def test_a_request_gets_the_tokens_of_the_model_and_one_end() -> None:
    host = Host()
    made = request(1, PROMPT, max_new=7)
    host.say(made)
    host.run()
    assert host.ids(1) == expected_ids(made)
    done = host.ends()[1, 0]
    assert (done.reason, done.matched, done.num_output, done.status) == ("length", -1, 7, 0)


def test_a_plan_is_made_before_the_result_of_the_one_before() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.tick()
    assert len(host.plans) == 2
    assert host.all_plans[1].decode_slots.tolist() == [0]


def test_without_overlap_one_plan_is_in_flight() -> None:
    host = Host(disable_overlap_schedule=True)
    host.say(request(1, PROMPT))
    host.tick()
    assert len(host.plans) == 1


def test_a_stop_by_length_is_known_ahead() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=1))
    host.run()
    assert len(host.all_plans) == 1


def test_a_stop_by_token_is_found_one_step_late_and_its_extra_row_dropped() -> None:
    host = Host()
    third = expected_ids(request(1, PROMPT, max_new=10))[2]
    made = request(1, PROMPT, max_new=10, stop_ids=[third])
    host.say(made)
    host.run()
    ids = expected_ids(made)
    assert host.ids(1) == ids
    assert (host.ends()[1, 0].reason, host.ends()[1, 0].matched) == ("stop", third)
    assert len(host.all_plans) == len(ids) + 1
    assert host.value("num_dropped_rows") == 1


def test_stop_ids_beyond_the_ones_checked_together_are_honoured() -> None:
    first = expected_ids(request(1, PROMPT))[0]
    stop_ids = sorted({first, *range(60, 90)})
    host = Host()
    host.say(request(1, PROMPT, stop_ids=stop_ids))
    host.run()
    assert host.ends()[1, 0].reason == "stop"


def test_prompt_chunks_share_a_budget_with_each_other_but_not_with_decodes() -> None:
    host = Host(chunked_prefill_size=4)
    host.say(request(1, [1, 2, 3], max_new=20))
    host.tick()
    host.answer()
    host.say(request(2, list(range(20, 30))))
    host.tick()
    host.answer()
    host.tick()
    plan = host.all_plans[-1]
    assert plan.decode_slots.tolist() == [0]
    assert plan.extend_counts.tolist() == [4]
    host.run()
    assert host.value("num_mixed_steps") == 3
    assert host.value("max_chunks_of_a_prompt") == 3


def test_what_is_kept_for_a_long_prompt_without_a_page_goes_to_who_has_room_in_its_last_one() -> None:
    """Memory is short because the scheduler counts on answers that are much shorter than they turn out."""
    chunk, page_size = 3, 4
    hello = worker_hello(num_pages=14, page_size=page_size)
    host = Host(hello=hello, chunked_prefill_size=chunk, schedule_conservativeness=0.01, disable_radix_cache=True)
    for rid, (prompt_len, max_new) in enumerate([(17, 16), (24, 21), (7, 12)]):
        host.say(request(rid, list(range(prompt_len)), max_new=max_new))
    host.run()
    short = [plan for plan in host.all_plans if 0 < plan.extend_counts.sum() < chunk]
    for plan in short:
        stops = (plan.extend_starts + plan.extend_counts)[plan.extend_samples == 0]
        assert not any(stops % page_size), "a prompt stops within a page, though there is budget left"
    assert short, "prompts were never stopped by want of pages"


def test_a_worker_that_finds_no_finite_logits_ends_only_that_request() -> None:
    host = Host()
    host.say(request(1, [1, 2, 3]))
    host.say(request(2, [4, 5, 6]))
    host.tick()
    plan = host.plans.popleft()
    assert isinstance(plan, StepPlan)
    result = host.worker.execute(plan)
    broken = replace(result, counts=int32_array([-1, 1]), ids=result.ids[1:])
    host.from_worker(broken)
    host.tick()
    done = host.ends()[1, 0]
    assert (done.reason, done.status, done.num_output) == ("error", 500, 0)
    assert "finite" in done.message
    host.run()
    assert host.ends()[2, 0].reason == "length"


def test_rows_of_a_plan_come_in_order_of_admission() -> None:
    host = Host()
    for rid in range(1, 4):
        host.say(request(rid, [rid] * 5))
    host.run()
    assert host.all_plans[0].extend_slots.tolist() == [0, 1, 2]
    assert host.batches()[0].rids.tolist() == [1, 2, 3]


# ---- What a broken worker does


def test_a_step_out_of_order_ends_the_replica() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.tick()
    host.from_worker(StepResult(2, int32_array([1]), int32_array([5]), 0, [], 0))
    assert host.fatal == "Worker 0 answered step 2 where step 1 was expected."


def test_an_answer_to_nothing_ends_the_replica() -> None:
    host = Host()
    host.from_worker(StepResult(1, int32_array(), int32_array(), 0, [], 0))
    assert host.fatal == "Worker 0 answered step 1, which was never sent."


@pytest.mark.parametrize("rank_1_first", [False, True])
def test_ranks_that_drew_other_tokens_end_the_replica(rank_1_first: bool) -> None:
    host = Host(tp_size=2)
    host.say(request(1, PROMPT))
    host.tick()
    plan = host.plans.popleft()
    assert isinstance(plan, StepPlan)
    result = host.worker.execute(plan)
    ack = StepAck(1, 1, result.ids_hash + 1, 0)
    for message, rank in [(ack, 1), (result, 0)] if rank_1_first else [(result, 0), (ack, 1)]:
        host.from_worker(message, rank)  # type: ignore[arg-type]
    assert host.fatal is not None
    assert "disagree about the tokens of step 1" in host.fatal


def test_a_result_with_a_row_too_few_ends_the_replica() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.tick()
    host.from_worker(StepResult(1, int32_array(), int32_array(), 0, [], 0))
    assert host.fatal == "The result of step 1 has 0 rows and 0 ids, but 1 rows sample."


def test_a_workers_last_word_is_passed_on() -> None:
    host = Host()
    host.from_worker(WorkerFault(0, 7, "out of memory"))
    assert host.fatal == "Worker 0 failed at step 7: out of memory"


def test_a_message_that_no_worker_sends_ends_the_replica() -> None:
    host = Host()
    host.from_worker(Abort(1, -1))  # type: ignore[arg-type]
    assert host.fatal is not None


# ---- Admission


def test_a_request_that_can_never_fit_is_refused_with_the_figures() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=191))
    (refused,) = host.of_type(Refused)
    assert refused.status == 400
    assert all(figure in refused.message for figure in ("10", "191", "201", "200"))


def test_requests_beyond_the_queue_are_refused_but_resumed_ones_are_not() -> None:
    host = Host(max_queued_requests=1, hello=worker_hello(num_slots=1))
    for rid in (1, 2, 3):
        host.say(request(rid, PROMPT))
    host.say(request(4, PROMPT, resumed=True))
    (refused,) = host.of_type(Refused)
    assert (refused.rid, refused.status) == (3, 429)
    host.run()
    assert sorted(host.ends()) == [(1, 0), (2, 0), (4, 0)]


def test_a_label_is_unique_while_its_request_lives() -> None:
    host = Host()
    host.say(request(1, PROMPT, label="mine"))
    host.say(request(2, PROMPT, label="mine"))
    (refused,) = host.of_type(Refused)
    assert (refused.rid, refused.status) == (2, 400)
    assert "'mine'" in refused.message
    host.run(acknowledge=False)
    host.say(request(3, PROMPT, label="mine"))
    host.run()
    assert host.ends()[3, 0].reason == "length"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": int32_array()},
        {"prompt_ids": int32_array([100])},
        {"choices": [0, 0]},
        {"choices": []},
        {"outputs": [[], []]},
        {"choices": [-1]},
        {"choices": [0, -2]},
        {"choices": [0, 1], "seed": -1},
    ],
)
def test_a_request_that_no_frontend_should_send_is_refused(changes: dict[str, Any]) -> None:
    host = Host()
    host.say(request(2, PROMPT))
    host.say(request(1, PROMPT, **changes))
    host.run()
    (refused,) = host.of_type(Refused)
    assert (refused.rid, refused.status) == (1, 400)
    assert host.all_plans and list(host.ends()) == [(2, 0)]
    assert host.value("num_refused") == 1


@pytest.mark.parametrize(("aborted", "num_refused"), [(0, 1), (-1, 0)])
def test_such_a_request_whose_client_has_left_before_it_is_looked_at_harms_nobody(
    aborted: int, num_refused: int
) -> None:
    host = Host()
    host.say(request(1, [100], choices=[0, 1, 2]))
    host.say(Abort(1, aborted))
    host.say(request(2, PROMPT))
    host.run()
    assert host.ends()[2, 0].reason == "length"
    assert len(host.of_type(Refused)) == host.value("num_refused") == num_refused
    assert host.value("num_running") == host.value("num_waiting") == 0


def test_who_waits_is_admitted_in_order_of_arrival_and_with_all_the_memory_it_may_need() -> None:
    host = Host(hello=worker_hello(num_pages=6), disable_radix_cache=True)
    host.say(request(1, [1] * 9, max_new=8))  # 5 of the 6 pages
    host.say(request(2, [2] * 9, max_new=8))
    host.say(request(3, [3], max_new=1))  # would fit, but comes later
    host.tick()
    assert host.value("num_running") == 1
    host.run()
    assert [admission.seed for plan in host.all_plans for admission in plan.admissions] == [1, 2, 3]


def test_all_pages_are_free_in_the_end() -> None:
    host = Host()
    for rid in range(20):
        host.say(request(rid, [rid % 3] * (rid + 1), max_new=rid % 7 + 1))
    host.run()
    host.say(FlushCache(1))
    assert host.of_type(ControlReply)[-1].ok
    assert host.value("num_free_pages") == 64
    assert host.value("num_free_slots") == 4


# ---- Prefixes


def test_a_prompt_that_was_seen_is_not_computed_again_but_for_its_last_page() -> None:
    host = Host()
    host.say(request(1, list(range(12)), max_new=1))
    host.run()
    host.say(request(2, list(range(12)), max_new=1))
    host.run()
    assert host.ends()[2, 0].cached_tokens == 8
    assert [host.batches()[i].cached.tolist() for i in (0, -1)] == [[0], [8]]
    assert host.all_plans[-1].extend_starts.tolist() == [8]


def test_a_conversation_that_goes_on_finds_what_was_generated() -> None:
    host = Host()
    first = request(1, PROMPT, max_new=8)
    host.say(first)
    host.run()
    host.say(request(2, [*PROMPT, *expected_ids(first), 1, 2, 3], max_new=1))
    host.run()
    assert host.ends()[2, 0].cached_tokens == 16


def test_requests_of_one_burst_compute_what_they_share_once() -> None:
    host = Host()
    for rid in range(4):
        host.say(request(rid, [*range(16), rid], max_new=2))
    host.run()
    cached = [host.ends()[rid, 0].cached_tokens for rid in range(4)]
    assert cached == [0, 16, 16, 16]
    assert host.all_plans[1].extend_slots.tolist() == [1, 2, 3]


def test_the_choices_of_a_request_share_its_prompt_and_draw_with_their_own_seeds() -> None:
    host = Host()
    made = request(1, list(range(17)), max_new=3, choices=[0, 1, 2])
    host.say(made)
    host.run()
    assert [host.ends()[1, c].cached_tokens for c in range(3)] == [0, 16, 16]
    for choice in range(3):
        assert host.ids(1, choice) == expected_ids(replace(made, seed=choice_seed(1, choice)))


def test_prompt_logprobs_keep_what_they_need_out_of_the_cache() -> None:
    host = Host()
    host.say(request(1, list(range(30)), max_new=1))
    host.run()
    host.say(request(2, list(range(30)), max_new=1, logprobs=LogprobSpec(prompt_start=10)))
    host.run()
    assert host.ends()[2, 0].cached_tokens == 8
    (logprobs,) = [part for batch in host.batches() for part in batch.logprobs]
    assert (logprobs.is_prompt, logprobs.first, len(logprobs.chosen)) == (True, 10, 20)


def test_without_the_cache_nothing_is_shared_and_nobody_waits() -> None:
    host = Host(disable_radix_cache=True)
    host.say(request(1, list(range(16)), choices=[0, 1]))
    host.run()
    assert host.value("num_cached_tokens") == 0
    assert host.all_plans[0].extend_slots.tolist() == [0, 1]
    assert host.value("num_free_pages") == 64


# ---- Resumption


def test_a_resumed_choice_goes_on_behind_its_tokens_and_counts_them() -> None:
    host = Host()
    whole = expected_ids(request(1, PROMPT, max_new=6))
    host.say(request(1, PROMPT, max_new=6, outputs=[whole[:4]]))
    host.run()
    assert host.ids(1) == whole[4:]
    assert host.batches()[0].first.tolist() == [4]
    assert host.ends()[1, 0].num_output == 6


def test_of_what_a_resumed_choice_finds_in_the_cache_its_prompt_alone_is_told() -> None:
    host = Host()
    made = request(1, PROMPT, max_new=12)
    host.say(made)
    host.run()
    host.say(request(2, PROMPT, max_new=12, outputs=[expected_ids(made)[:11]], resumed=True))
    host.run()
    assert host.ends()[2, 0].cached_tokens == len(PROMPT)


@pytest.mark.parametrize("by_stop", [False, True])
def test_a_resumed_choice_that_is_complete_only_ends(by_stop: bool) -> None:
    host = Host()
    whole = expected_ids(request(1, PROMPT, max_new=3))
    stop_ids = [whole[-1]] if by_stop else []
    host.say(request(1, PROMPT, max_new=3, outputs=[whole], stop_ids=stop_ids))
    host.run()
    assert host.ids(1) == []
    assert not host.all_plans
    assert host.ends()[1, 0].reason == ("stop" if by_stop else "length")
    assert host.ends()[1, 0].num_output == 3


# ---- Aborts


def test_an_abort_of_a_waiting_request_is_answered_and_it_never_runs() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.say(Abort(1, -1))
    host.run()
    assert (host.ends()[1, 0].reason, host.ends()[1, 0].num_output) == ("abort", 0)
    assert not host.all_plans
    assert host.value("num_aborted_waiting") == 1


def test_an_abort_takes_effect_in_the_next_plan_and_frees_everything() -> None:
    host = Host(chunked_prefill_size=4)
    host.say(request(1, list(range(40))))
    host.tick()
    host.answer()
    host.say(Abort(1, 0))
    host.say(request(2, [7]))
    host.tick()
    assert host.all_plans[-1].admissions[0].seed == 2
    assert host.value("num_aborted_prefill") == 1
    host.run()
    assert host.ends()[1, 0].reason == "abort"
    assert host.ends()[2, 0].reason == "length"


def test_an_abort_in_decode_keeps_the_tokens_that_came_before_it() -> None:
    host = Host()
    made = request(1, PROMPT, max_new=10)
    host.say(made)
    host.tick()
    host.answer()
    host.answer()
    host.say(Abort(1, -1))
    host.run()
    assert host.ids(1) == expected_ids(made)[:2]
    assert host.ends()[1, 0].num_output == 2
    assert host.value("num_aborted_decode") == 1


def test_an_abort_that_crosses_the_end_changes_nothing() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=1))
    host.tick()
    host.answer()
    host.say(Abort(1, -1))
    host.tick()
    host.say(Abort(1, -1))
    host.run()
    host.say(Abort(1, -1))
    host.run()
    assert host.ends()[1, 0].reason == "length"
    assert host.value("num_aborted") == 0


def test_one_abort_ends_all_choices_and_one_choice_can_end_alone() -> None:
    host = Host()
    host.say(request(1, PROMPT, choices=[0, 1, 2]))
    host.say(Abort(1, 1))
    host.tick()
    host.say(Abort(1, -1))
    host.run()
    assert {key: done.reason for key, done in host.ends().items()} == {(1, c): "abort" for c in range(3)}


def test_a_label_aborts_whoever_sent_it_and_the_empty_one_aborts_all() -> None:
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(1, PROMPT, label="a"))
    host.say(request(1, PROMPT, label="b"), 1)
    host.say(request(2, PROMPT, label="c"), 1)
    host.say(AbortLabel(5, "b"))
    host.say(AbortLabel(6, "unknown"))
    assert [reply.values["num_aborted"] for reply in host.of_type(ControlReply)] == [1, 0]
    host.say(AbortLabel(7, ""))
    host.run()
    assert host.of_type(ControlReply)[-1].values["num_aborted"] == 2
    assert len(host.ends(0)) == 1
    assert len(host.ends(1)) == 2


def test_the_name_of_a_batch_aborts_its_prompts_and_other_frontends_hear_of_it() -> None:
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    for rid, label in enumerate(("a_0", "a_1", "ab_0", "a")):
        host.say(request(rid, PROMPT, label=label), rid % 2)
    host.say(AbortLabel(5, "a"))
    host.run()
    assert [reply.values["num_aborted"] for reply in host.of_type(ControlReply)] == [3]
    assert {rid: done.reason for (rid, _), done in [*host.ends(0).items(), *host.ends(1).items()]} == {
        0: "abort",
        1: "abort",
        2: "length",
        3: "abort",
    }
    assert [host.of_type(AbortLabel, number) for number in (0, 1)] == [[], [AbortLabel(5, "a")]]


def test_the_slot_of_an_aborted_request_can_be_reused_while_its_row_is_in_flight() -> None:
    host = Host(hello=worker_hello(num_slots=1))
    second = request(2, [9, 8, 7], max_new=3)
    host.say(request(1, PROMPT, max_new=50))
    host.tick()
    host.say(Abort(1, -1))
    host.say(second)
    host.run()
    assert host.ids(2) == expected_ids(second)
    assert host.ids(1) == []


# ---- Frontends come and go


@pytest.mark.parametrize("ended_first", [None, 0, 1])
def test_a_label_that_two_have_after_a_replacement_aborts_both(ended_first: int | None) -> None:
    """The old scheduler's request of one frontend comes behind a new one of another, which knew nothing of it."""
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(7, PROMPT, max_new=50, label="x"), 1)
    host.say(request(3, PROMPT, max_new=50, label="x", resumed=True), 0)
    host.tick()
    if ended_first is not None:
        host.say(Abort({0: 3, 1: 7}[ended_first], -1), ended_first)
    host.say(AbortLabel(5, "x"))
    (reply,) = host.of_type(ControlReply)
    assert reply.values == {"num_aborted": 2 if ended_first is None else 1}
    host.run()
    assert (host.ends(0)[3, 0].reason, host.ends(1)[7, 0].reason) == ("abort", "abort")
    host.say(request(8, PROMPT, label="x"), 1)  # it is free again
    host.run()
    assert host.ends(1)[8, 0].reason == "length"


def test_a_frontend_that_comes_again_starts_anew() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=50))
    host.tick()
    host.answer()
    host.tick()
    host.say(FrontendHello(0, PROTOCOL))
    host.inbox.clear()
    made = request(1, [5, 5, 5])
    host.say(made)
    host.run()
    assert host.batches()[0].number == 0
    assert host.ids(1) == expected_ids(made)


def test_a_frontend_that_is_gone_leaves_nothing_behind() -> None:
    host = Host()
    host.say(FrontendHello(1, PROTOCOL), 1)
    host.say(request(1, PROMPT, max_new=50, label="same"), 1)
    host.tick()
    host.scheduler.frontend_gone(1)
    host.run()
    assert host.value("num_running") == 0
    assert not host.batches(1)
    host.say(request(1, PROMPT, label="same"))
    host.run()
    assert host.ends()[1, 0].reason == "length"


# ---- Control


def test_the_cache_is_not_flushed_under_a_request() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.say(FlushCache(1))
    assert not host.of_type(ControlReply)[-1].ok
    host.run()
    host.say(FlushCache(2))
    assert host.of_type(ControlReply)[-1].ok
    assert host.value("num_cached_pages") == 0


def test_a_deep_look_compares_every_rank_with_what_was_sent() -> None:
    host = Host(tp_size=2)
    host.say(request(1, PROMPT))
    host.tick()
    reply = host.state(deep=True)
    assert reply.ok
    assert reply.message == ""


def test_a_rank_with_other_tables_is_found_by_a_deep_look() -> None:
    host = Host(tp_size=2)
    host.say(request(1, PROMPT))
    host.run()
    host.say(GetState(5, True))
    host.tick()
    work = host.plans.popleft()
    done = host.worker.do(work)  # type: ignore[arg-type]
    host.from_worker(done, 0)
    host.from_worker(WorkDone(done.step, 1, {"tables_hash": "feed"}), 1)
    reply = host.of_type(ControlReply)[-1]
    assert not reply.ok
    assert "worker 1" in reply.message.lower()
    assert "feed" in reply.message


def test_load_is_told_when_it_changes_but_not_too_often() -> None:
    host = Host()
    host.tick()
    before = len(host.of_type(Load))
    host.say(request(1, PROMPT))
    host.tick()
    host.now = 0.1
    host.answer()
    host.tick()
    assert len(host.of_type(Load)) <= before + 1
    assert host.scheduler.next_tick_s is not None
    host.now = 1.0
    host.tick()
    assert host.of_type(Load)[-1].num_running == 1
    host.tick()
    assert host.scheduler.next_tick_s is None


def test_whoever_comes_while_the_load_is_untold_learns_how_it_went_on() -> None:
    host = Host()
    host.say(PauseGeneration(1, "in_place"))
    host.tick()
    host.say(request(1, PROMPT))
    host.say(FrontendHello(1, PROTOCOL), frontend=1)
    assert host.of_type(Load, 1)[-1].num_waiting == 1
    host.say(Abort(1, -1))
    for host.now in (0.1, 1.0):
        host.tick()
    assert [host.of_type(Load, frontend)[-1].num_waiting for frontend in (0, 1)] == [0, 0]


def test_a_draining_scheduler_finishes_what_it_has_and_takes_nothing_new() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.scheduler.drain()
    host.say(request(2, PROMPT))
    assert host.of_type(Refused)[0].status == 503
    assert not host.scheduler.is_drained
    host.run(acknowledge=False)
    assert host.ends()[1, 0].reason == "length"
    assert host.scheduler.is_drained


def test_logprobs_of_a_slot_that_was_not_in_the_step_end_the_replica() -> None:
    host = Host()
    host.say(request(1, PROMPT))
    host.tick()
    plan = host.plans.popleft()
    assert isinstance(plan, StepPlan)
    result = host.worker.execute(plan)
    stray = RowLogprobs(
        3, False, 0, np.zeros(1, np.float32), int32_array(), np.zeros(0, np.float32), np.zeros(0, np.float32)
    )
    host.from_worker(replace(result, logprobs=[stray]))
    assert host.fatal == "Step 1 has logprobs for slot 3, which was not in it."


def test_a_range_that_is_asked_for_again_is_sent_again_with_the_end() -> None:
    host = Host()
    made = request(1, PROMPT, max_new=5)
    host.say(made)
    host.run(acknowledge=False)
    sent = len(host.batches())
    host.say(AskRange(1, 0, 2))
    host.tick()
    (again,) = host.batches()[sent:]
    assert (again.first.tolist(), again.ids.tolist()) == ([2], expected_ids(made)[2:])
    assert again.done[0].reason == "length"


def test_a_range_of_a_choice_that_is_gone_is_not_sent_and_nobody_is_told() -> None:
    """A rejection would make the frontend fail requests that have nothing to do with it."""
    host = Host()
    host.say(request(1, PROMPT, max_new=5))
    host.run()
    num_batches = len(host.batches())
    for ask in (AskRange(1, 0, 0), AskRange(9, 0, 0)):
        host.say(ask)
        host.tick()
    assert (len(host.batches()), host.of_type(Rejected)) == (num_batches, [])


def test_who_is_refused_for_want_of_room_is_told_when_to_come_again() -> None:
    host = Host(max_queued_requests=0, hello=worker_hello(num_slots=1))
    for rid in range(1, 5):  # each takes 8 s
        host.say(request(rid, PROMPT))
        host.now += 8.0
        host.run()
    host.say(request(5, PROMPT))
    for rid in range(6, 70):
        host.say(request(rid, PROMPT, resumed=True))
    host.say(request(70, PROMPT))
    (refused,) = host.of_type(Refused)
    assert refused.status == 429
    assert 30 <= refused.retry_after_s <= 60


def test_a_drain_finishes_what_a_dead_scheduler_had_taken() -> None:
    host = Host()
    host.scheduler.drain()
    host.say(request(1, PROMPT, resumed=True))
    host.say(request(2, PROMPT))
    (refused,) = host.of_type(Refused)
    assert (refused.rid, refused.status) == (2, 503)
    host.run()
    assert sorted(host.ends()) == [(1, 0)]


def test_an_end_says_how_often_the_request_was_preempted() -> None:
    host = Host()
    host.say(request(1, PROMPT, max_new=9))
    host.tick()
    host.answer()
    host.tick()
    host.say(PauseGeneration(1, "retract"))
    host.run()
    host.say(ContinueGeneration(2))
    host.run()
    assert host.ends()[1, 0].num_preempted == 1


def test_without_a_prefix_cache_nobody_waits_for_a_prompt_that_begins_alike() -> None:
    host = Host(disable_radix_cache=True, chunked_prefill_size=8)
    for rid in (1, 2):
        host.say(request(rid, [7] * 60))
    host.run()
    assert host.value("num_held_back") == 0


def test_arrays_that_a_worker_cannot_decode_are_refused() -> None:
    host = Host()
    made = request_at_scheduler(request(1, PROMPT))
    sampling, half = made.sampling, b"\0\0"
    for rid, broken in enumerate(
        (
            replace(made, prompt_ids=made.prompt_ids + half, output_ids=[half]),
            replace(made, output_ids=[half]),
            replace(made, sampling=replace(sampling, stop_ids=half)),
            replace(made, sampling=replace(sampling, bias_ids=half)),
            replace(made, sampling=replace(sampling, bias_values=Ext(2, half))),
            replace(made, sampling=replace(sampling, bias_values=Ext(9, b""))),
            replace(made, logprobs=replace(made.logprobs, ids=half)),
        )
    ):
        (effect,) = host.scheduler.handle(Frontend(0), replace(broken, rid=rid), 0.0)
        assert isinstance(effect, ToFrontend) and isinstance(effect.message, Refused) and effect.message.status == 400
    assert host.value("num_refused") == 7
