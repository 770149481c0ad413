"""The ledger against a scheduler that sends ranges twice, too early, late, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.managers.tokenizer_manager.api_types import TokenLogprob
from srt.managers.tokenizer_manager.request_ledger import (
    ChoiceEnded,
    Effect,
    NewTokens,
    RequestLedger,
    RequestRefused,
    Send,
)
from srt.protocol.link_errors import LinkBroken
from srt.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    AckBatch,
    AskRange,
    GenerateRequest,
    LastWord,
    LogprobSpec,
    Refused,
    RequestDone,
    SamplingSpec,
    TokenBatch,
    TokenLogprobs,
    int32_array,
)

Range = tuple[int, int, int, list[int]]  # rid, choice, first, ids


def new_request(
    rid: int = 1,
    choices: Sequence[int] = (0,),
    logprobs: LogprobSpec | None = None,
    stop_ids: Sequence[int] = (),
    max_new_tokens: int = 100,
    prompt_ids: Sequence[int] = (5, 6, 7),
) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        label=f"label {rid}",
        prompt_ids=int32_array(prompt_ids),
        choices=int32_array(choices),
        output_ids=[int32_array() for _ in choices],
        sampling=SamplingSpec(max_new_tokens=max_new_tokens, stop_ids=int32_array(stop_ids)),
        logprobs=logprobs or LogprobSpec(),
        seed=3,
    )


def batch(
    *ranges: Range,
    number: int = 0,
    done: Sequence[RequestDone] = (),
    logprobs: Sequence[TokenLogprobs] = (),
    cached: int = 0,
) -> TokenBatch:
    return TokenBatch(
        number=number,
        rids=np.asarray([r[0] for r in ranges], np.int64),
        choices=int32_array([r[1] for r in ranges]),
        first=int32_array([r[2] for r in ranges]),
        counts=int32_array([len(r[3]) for r in ranges]),
        cached=int32_array([cached] * len(ranges)),
        ids=int32_array([i for r in ranges for i in r[3]]),
        logprobs=list(logprobs),
        done=list(done),
    )


def done(rid: int = 1, choice: int = 0, num_output: int = 0, reason: str = "length") -> RequestDone:
    return RequestDone(rid, choice, reason, -1, num_output, 0)


def output_logprobs(first: int, values: Sequence[float], choice: int = 0) -> TokenLogprobs:
    empty = np.zeros(0, np.float32)
    return TokenLogprobs(1, choice, False, first, np.asarray(values, np.float32), int32_array(), empty, empty)


def prompt_logprobs(first: int, values: Sequence[float]) -> TokenLogprobs:
    empty = np.zeros(0, np.float32)
    return TokenLogprobs(1, 0, True, first, np.asarray(values, np.float32), int32_array(), empty, empty)


def ledger_with(*requests: GenerateRequest) -> RequestLedger:
    ledger = RequestLedger()
    for request in requests:
        assert ledger.add(request) == [Send(request)]
    return ledger


def is_empty(ledger: RequestLedger) -> bool:
    return not (
        ledger.num_requests
        or ledger.num_choices
        or ledger.num_tokens
        or any(map(ledger.has_label, ["label 1", "label 2"]))
    )


def sent(effects: Iterable[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_tokens_are_handed_on_once_and_the_end_behind_them() -> None:
    ledger = ledger_with(new_request())
    assert ledger.handle(batch((1, 0, 0, [10, 11]))) == [NewTokens(1, 0, [10, 11])]
    end = done(num_output=3)
    assert ledger.handle(batch((1, 0, 2, [12]), done=[end])) == [NewTokens(1, 0, [12]), ChoiceEnded(1, 0, end)]
    assert is_empty(ledger)


def test_what_one_effect_says_may_end_others_before_they_are_made() -> None:
    ledger = ledger_with(new_request(), new_request(2), new_request(3))
    ends = [done(2, num_output=1), done(3, num_output=1)]
    effects = ledger.effects_of(batch((1, 0, 0, [10]), (2, 0, 0, [20]), (3, 0, 0, [30]), done=ends))
    assert next(effects) == NewTokens(1, 0, [10])
    ledger.end(2)
    assert next(effects) == NewTokens(3, 0, [30])
    ledger.end(3)
    assert list(effects) == []
    assert (ledger.live_rids(), ledger.num_surplus_tokens) == ([1], 1)


def test_news_carry_the_reader_that_the_request_was_added_with() -> None:
    ledger, reader = RequestLedger(), object()
    ledger.add(new_request(), reader)
    for ids, first in (([10], 0), ([11], 1)):
        (news,) = ledger.handle(batch((1, 0, first, ids)))
        assert isinstance(news, NewTokens) and news.reader is reader


def test_tokens_that_are_known_are_dropped_and_the_rest_of_their_range_is_taken() -> None:
    ledger = ledger_with(new_request())
    ledger.handle(batch((1, 0, 0, [10, 11])))
    assert ledger.handle(batch((1, 0, 0, [10, 11]))) == []
    assert ledger.handle(batch((1, 0, 1, [11, 12]))) == [NewTokens(1, 0, [12])]
    assert ledger.num_surplus_tokens == 3


def test_a_gap_is_asked_for_once_until_it_is_filled() -> None:
    ledger = ledger_with(new_request())
    ledger.handle(batch((1, 0, 0, [10])))
    assert ledger.handle(batch((1, 0, 3, [13]))) == [Send(AskRange(1, 0, 1))]
    assert ledger.handle(batch((1, 0, 4, [14]))) == []
    assert ledger.handle(batch((1, 0, 1, [11, 12, 13, 14, 15]))) == [NewTokens(1, 0, [11, 12, 13, 14, 15])]
    assert ledger.handle(batch((1, 0, 7, [17]))) == [Send(AskRange(1, 0, 6))]


def test_an_end_that_comes_before_its_last_tokens_waits_for_them() -> None:
    ledger = ledger_with(new_request())
    end = done(num_output=3)
    assert ledger.handle(batch((1, 0, 2, [12]), done=[end])) == [Send(AskRange(1, 0, 0))]
    assert ledger.handle(batch((1, 0, 0, [10, 11, 12]), done=[end])) == [
        NewTokens(1, 0, [10, 11, 12]),
        ChoiceEnded(1, 0, end),
    ]
    assert is_empty(ledger)


def test_batches_are_acknowledged_together_and_behind_what_a_gap_asks_for() -> None:
    ledger = ledger_with(new_request())
    assert ledger.acknowledge() == []
    effects = ledger.handle(batch((1, 0, 2, [12]), number=0)) + ledger.handle(batch((1, 0, 3, [13]), number=1))
    assert sent(effects + ledger.acknowledge()) == [AskRange(1, 0, 0), AckBatch(1)]
    assert ledger.acknowledge() == []
    assert ledger.num_unacknowledged == 0


def test_an_empty_batch_is_acknowledged_too() -> None:
    ledger = RequestLedger()
    ledger.handle(batch(number=4))
    assert sent(ledger.acknowledge()) == [AckBatch(4)]


def test_choices_end_one_by_one() -> None:
    ledger = ledger_with(new_request(choices=(0, 1)))
    ledger.handle(batch((1, 0, 0, [10]), (1, 1, 0, [20]), done=[done(choice=1, num_output=1)]))
    assert (ledger.num_requests, ledger.num_choices, ledger.has_label("label 1")) == (1, 1, True)
    ledger.handle(batch((1, 0, 1, [11]), done=[done(num_output=2)]))
    assert is_empty(ledger)


def test_what_is_ended_here_is_aborted_there_and_later_news_of_it_is_dropped() -> None:
    ledger = ledger_with(new_request(choices=(0, 1)))
    ledger.handle(batch((1, 0, 0, [10])))
    assert ledger.end(1, 0) == [Send(Abort(1, 0))]
    assert ledger.end(1, 0) == []
    assert ledger.handle(batch((1, 0, 1, [11]), (1, 1, 0, [20]), done=[done(num_output=2)])) == [NewTokens(1, 1, [20])]
    assert ledger.end(1) == [Send(Abort(1, -1))]
    assert ledger.end(1) == []
    late = batch((1, 1, 1, [21]), done=[done(choice=1)], logprobs=[output_logprobs(0, [0.5])])
    assert ledger.handle(late) == []
    assert ledger.handle(Refused(1, 400, "no")) == []
    assert is_empty(ledger)


def test_a_refusal_ends_the_request() -> None:
    ledger = ledger_with(new_request(choices=(0, 1)))
    assert ledger.handle(Refused(1, 429, "full")) == [RequestRefused(1, 429, "full")]
    assert is_empty(ledger)


def test_a_label_is_free_again_after_its_request() -> None:
    ledger = ledger_with(new_request())
    assert ledger.has_label("label 1")
    ledger.end(1)
    assert not ledger.has_label("label 1")


def test_tokens_wait_for_their_logprobs() -> None:
    ledger = ledger_with(new_request(logprobs=LogprobSpec(output=True)))
    assert ledger.handle(batch((1, 0, 0, [10, 11]))) == []
    rows = tuple(TokenLogprob(value, token) for value, token in [(-0.5, 10), (-1.0, 11)])
    assert ledger.handle(batch(logprobs=[output_logprobs(0, [-0.5, -1.0])])) == [NewTokens(1, 0, [10, 11], rows)]


def test_logprobs_that_come_twice_or_behind_a_gap_count_once() -> None:
    ledger = ledger_with(new_request(logprobs=LogprobSpec(output=True)))
    ledger.handle(batch((1, 0, 0, [10]), logprobs=[output_logprobs(0, [-0.5])]))
    behind_a_gap = batch((1, 0, 2, [12]), logprobs=[output_logprobs(2, [-2.0])])
    assert ledger.handle(behind_a_gap) == [Send(AskRange(1, 0, 1))]
    again = batch((1, 0, 1, [11, 12]), logprobs=[output_logprobs(0, [-0.5, -1.0]), output_logprobs(2, [-2.0])])
    rows = (TokenLogprob(-1.0, 11), TokenLogprob(-2.0, 12))
    assert ledger.handle(again) == [NewTokens(1, 0, [11, 12], rows)]


def test_the_prompts_logprobs_come_whole_with_the_first_tokens_of_each_choice() -> None:
    ledger = ledger_with(new_request(choices=(0, 1), logprobs=LogprobSpec(prompt_start=0)))
    assert ledger.handle(batch(logprobs=[prompt_logprobs(0, [float("nan"), -1.0])])) == []
    assert ledger.handle(batch((1, 0, 0, [10]))) == []
    rows = (TokenLogprob(None, 5), TokenLogprob(-1.0, 6), TokenLogprob(-2.0, 7))
    assert ledger.handle(batch(logprobs=[prompt_logprobs(1, [-1.0, -2.0])])) == [NewTokens(1, 0, [10], (), rows)]
    assert ledger.handle(batch((1, 0, 1, [11]), (1, 1, 0, [20]))) == [
        NewTokens(1, 0, [11]),
        NewTokens(1, 1, [20], (), rows),
    ]


def test_the_best_and_the_asked_for_tokens_stand_beside_each_token() -> None:
    ledger = ledger_with(new_request(logprobs=LogprobSpec(output=True, top=2, ids=int32_array([8, 9]))))
    message = TokenLogprobs(
        1,
        0,
        False,
        0,
        np.asarray([-0.5, -1.5], np.float32),
        int32_array([1, 2, 3, 4]),
        np.asarray([-0.25, -0.5, -0.125, -0.75], np.float32),
        np.asarray([-8.0, -9.0, -8.5, -9.5], np.float32),
    )
    (news,) = ledger.handle(batch((1, 0, 0, [2, 5]), logprobs=[message]))
    assert isinstance(news, NewTokens)
    assert news.logprobs == (
        TokenLogprob(-0.5, 2, ((-0.25, 1), (-0.5, 2)), ((-8.0, 8), (-9.0, 9))),
        TokenLogprob(-1.5, 5, ((-0.125, 3), (-0.75, 4)), ((-8.5, 8), (-9.5, 9))),
    )


def test_an_end_does_not_wait_for_logprobs() -> None:
    ledger = ledger_with(new_request(logprobs=LogprobSpec(output=True, prompt_start=0)))
    end = done(num_output=1, reason="abort")
    assert ledger.handle(batch((1, 0, 0, [10]), done=[end])) == [NewTokens(1, 0, [10]), ChoiceEnded(1, 0, end)]


def test_a_batch_that_contradicts_itself_breaks_the_link() -> None:
    ledger = ledger_with(new_request())
    good = batch((1, 0, 0, [10, 11]))
    for wrong in (
        TokenBatch(0, good.rids, good.choices, good.first, int32_array([3]), good.cached, good.ids, [], []),
        TokenBatch(0, good.rids, good.choices, good.first, good.counts, int32_array(), good.ids, [], []),
        TokenBatch(0, good.rids, good.choices, int32_array(), good.counts, good.cached, good.ids, [], []),
    ):
        with pytest.raises(LinkBroken):
            ledger.handle(wrong)


def test_a_new_scheduler_is_asked_to_go_on_behind_what_is_here() -> None:
    first, second = new_request(1, choices=(0, 1, 2)), new_request(2)
    ledger = ledger_with(first, second)
    ledger.handle(batch((1, 0, 0, [10, 11]), (1, 2, 0, [30]), number=7, done=[done(choice=1)]))
    ledger.acknowledge()
    one, two = sent(ledger.resume())
    assert isinstance(one, GenerateRequest)
    assert isinstance(two, GenerateRequest)
    assert one.choices.tolist() == [0, 2]
    assert [ids.tolist() for ids in one.output_ids] == [[10, 11], [30]]
    assert (one.label, one.seed, one.prompt_ids.tolist()) == (first.label, first.seed, [5, 6, 7])
    assert [ids.tolist() for ids in two.output_ids] == [[]]
    assert ledger.handle(batch((1, 0, 2, [12]), number=0)) == [NewTokens(1, 0, [12])]
    assert sent(ledger.acknowledge()) == [AckBatch(0)]


def test_a_resubmission_asks_only_for_logprobs_that_are_missing() -> None:
    ledger = ledger_with(new_request(logprobs=LogprobSpec(output=True, prompt_start=0)))
    ledger.handle(batch(logprobs=[prompt_logprobs(0, [float("nan"), -1.0])]))
    (again,) = sent(ledger.resume())
    assert isinstance(again, GenerateRequest)
    assert again.logprobs.prompt_start == 2
    ledger.handle(batch((1, 0, 0, [10, 11]), logprobs=[prompt_logprobs(2, [-2.0]), output_logprobs(0, [-0.5])]))
    (again,) = sent(ledger.resume())
    assert isinstance(again, GenerateRequest)
    assert again.logprobs.prompt_start == -1
    assert again.output_ids[0].tolist() == [10]  # the other token has no logprob yet: it is drawn again


def test_how_much_of_the_prompt_was_cached_stays_as_it_was_said_with_the_first_tokens() -> None:
    ledger = ledger_with(new_request(1), new_request(2))
    assert ledger.handle(batch((1, 0, 0, [10]), cached=2)) == [NewTokens(1, 0, [10], cached=2)]
    list(ledger.resume())
    again = batch((1, 0, 1, [11]), (2, 0, 0, [20]), cached=3)
    assert ledger.handle(again) == [NewTokens(1, 0, [11], cached=2), NewTokens(2, 0, [20], cached=3)]
    ends = [done(1, num_output=2), done(2, num_output=1)]
    told = [one.done.cached_tokens for one in ledger.handle(batch(done=ends)) if isinstance(one, ChoiceEnded)]
    assert told == [2, 3]


def last_word(*keys: tuple[int, int], is_alone: bool = False) -> LastWord:
    return LastWord(np.array([rid for rid, _ in keys], np.int64), int32_array([choice for _, choice in keys]), is_alone)


def deaths(ledger: RequestLedger, *words: LastWord, by_request: bool = True) -> list[Effect]:
    """What the ledger wants when the last of these schedulers has a successor."""
    effects: list[Effect] = []
    for word in words:
        ledger.record_last_word(word)
        ledger.record_death(by_request=by_request)
        effects = list(ledger.resume())
    return effects


def suspects(effects: list[Effect]) -> list[int]:
    return [one.rid for one in sent(effects) if isinstance(one, GenerateRequest) and one.suspect]


def test_who_was_in_flight_at_two_deaths_is_a_suspect() -> None:
    ledger = ledger_with(new_request(1), new_request(2), new_request(3))
    assert suspects(deaths(ledger, last_word((1, 0), (2, 0)))) == []
    assert suspects(deaths(ledger, last_word((2, 0), (3, 0), (9, 0)))) == [2]
    assert suspects(deaths(ledger, last_word((3, 0)), by_request=False)) == [2]  # somebody else killed that one
    assert suspects(deaths(ledger, last_word((3, 0)))) == [2, 3]


def test_who_asks_again_what_killed_an_engine_twice_is_a_suspect_from_the_start() -> None:
    ledger = ledger_with(new_request(1))
    alone = last_word((1, 0), is_alone=True)
    (ended,) = deaths(ledger, alone, alone)
    assert isinstance(ended, ChoiceEnded)
    again, other = new_request(2), new_request(3, prompt_ids=(8, 8))
    assert suspects(ledger.add(again)) == [2]
    assert suspects(ledger.add(other)) == []
    assert suspects(deaths(ledger, last_word((3, 0)), by_request=False)) == [2]
    ended, *_ = deaths(ledger, last_word((2, 0), is_alone=True))
    assert isinstance(ended, ChoiceEnded)
    assert ended.done.status == 500


def test_a_death_without_last_words_makes_nobody_a_suspect() -> None:
    ledger = ledger_with(new_request(1))
    deaths(ledger, last_word((1, 0)))
    ledger.record_death(by_request=True)
    assert suspects(list(ledger.resume())) == []


def test_who_was_alone_at_two_deaths_ends_and_the_others_go_on() -> None:
    ledger = ledger_with(new_request(1, choices=(0, 1)), new_request(2))
    alone = last_word((1, 1), is_alone=True)
    assert suspects(deaths(ledger, last_word((1, 0), (1, 1), (2, 0)), alone)) == [1]
    ended, first, second = deaths(ledger, alone)
    assert isinstance(ended, ChoiceEnded)
    assert (ended.rid, ended.choice, ended.done.reason, ended.done.status) == (1, 1, "error", 500)
    assert "died twice while it ran this request" in ended.done.message
    assert [one.choices.tolist() for one in sent([first, second]) if isinstance(one, GenerateRequest)] == [[0], [0]]


ALONE = last_word((1, 0), is_alone=True)


@pytest.mark.parametrize("num_tokens", [TRIAL_TOKENS, TRIAL_TOKENS + 1])
def test_deaths_count_together_only_where_the_request_came_hardly_any_further(num_tokens: int) -> None:
    ledger = ledger_with(new_request())
    ledger.handle(batch((1, 0, 0, list(range(10)))))
    assert suspects(deaths(ledger, ALONE)) == []
    ledger.handle(batch((1, 0, 10, list(range(num_tokens)))))
    (effect,) = deaths(ledger, ALONE)
    assert isinstance(effect, ChoiceEnded if num_tokens == TRIAL_TOKENS else Send)
    assert suspects([effect]) == []


def test_who_gets_further_than_a_trial_takes_is_no_suspect_any_more() -> None:
    ledger = ledger_with(new_request(1), new_request(2))
    both = last_word((1, 0), (2, 0))
    assert suspects(deaths(ledger, both, both)) == [1, 2]
    ledger.handle(batch((1, 0, 0, list(range(TRIAL_TOKENS + 1)))))
    assert suspects(deaths(ledger, last_word((2, 0)))) == [2]
    assert suspects(deaths(ledger, last_word((1, 0)))) == [2]  # its first death again
    assert suspects(deaths(ledger, last_word((1, 0)))) == [1, 2]


def test_who_asks_again_what_killed_engines_late_is_a_suspect_until_it_is_further_than_that() -> None:
    late = batch((1, 0, 0, list(range(30))))
    for further in (0, TRIAL_TOKENS + 1):
        ledger = ledger_with(new_request(1))
        ledger.handle(late)
        deaths(ledger, ALONE, ALONE)
        assert suspects(ledger.add(new_request(2))) == [2]
        ledger.handle(batch((2, 0, 0, list(range(30 + further)))))
        (effect,) = deaths(ledger, last_word((2, 0), is_alone=True))
        assert isinstance(effect, Send if further else ChoiceEnded)
        assert suspects([effect]) == []


@pytest.mark.parametrize(
    ("ids", "reason", "matched"), [([10, 99], "stop", 99), ([10, 11, 12], "length", -1)], ids=["stop", "length"]
)
def test_a_choice_of_which_only_the_end_was_lost_ends_without_a_resubmission(
    ids: list[int], reason: str, matched: int
) -> None:
    ledger = ledger_with(new_request(stop_ids=[99], max_new_tokens=3))
    ledger.handle(batch((1, 0, 0, ids)))
    (end,) = ledger.resume()
    assert isinstance(end, ChoiceEnded)
    assert (end.done.reason, end.done.matched, end.done.num_output) == (reason, matched, len(ids))
    assert is_empty(ledger)


def test_what_was_aborted_by_its_name_ends_with_its_scheduler_and_others_go_on() -> None:
    ledger = ledger_with(new_request(1, choices=(0, 1), max_new_tokens=2), new_request(2))
    assert ledger.named("label 1") == [1]
    assert ledger.named("") == [1, 2]
    for rid in (1, 9):
        ledger.record_aborted(rid)
    ledger.handle(batch((1, 0, 0, [10]), (1, 1, 0, [11, 12])))
    first, second, other = ledger.resume()
    assert isinstance(first, ChoiceEnded)
    assert (first.done.reason, first.done.num_output) == ("abort", 1)
    assert isinstance(second, ChoiceEnded)
    assert (second.done.reason, second.done.num_output) == ("length", 2)  # it had all that it was to have
    assert [one.rid for one in sent([other]) if isinstance(one, GenerateRequest)] == [2]
    assert ledger.live_rids() == [2]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_the_order_every_token_is_handed_on_exactly_once(data: st.DataObject) -> None:
    """A scheduler that forgets, repeats and runs ahead, but answers every AskRange, and may be replaced."""
    outputs = {
        (rid, choice): [rid * 1000 + choice * 100 + i for i in range(data.draw(st.integers(1, 12)))]
        for rid in (1, 2)
        for choice in (0, 1)
    }
    ledger = ledger_with(new_request(1, choices=(0, 1)), new_request(2, choices=(0, 1)))
    received: dict[tuple[int, int], list[int]] = {key: [] for key in outputs}
    ended: list[tuple[int, int]] = []
    asked: dict[tuple[int, int], int] = {}

    def take(effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case NewTokens(rid, choice, ids):
                    received[rid, choice] += ids
                case ChoiceEnded(rid, choice):
                    ended.append((rid, choice))
                case Send(AskRange(rid, choice, first)):
                    asked[rid, choice] = first
                case Send(AckBatch()):
                    pass
                case _:
                    raise AssertionError(effect)

    def send(key: tuple[int, int], first: int, end: int) -> None:
        is_whole = end == len(outputs[key])
        ends = [done(*key, num_output=end)] if is_whole else []
        take(ledger.handle(batch((*key, first, outputs[key][first:end]), done=ends)))
        take(ledger.acknowledge())

    keys = sorted(outputs)
    for _ in range(data.draw(st.integers(0, 30))):
        key = data.draw(st.sampled_from(keys))
        answers = data.draw(st.booleans())
        if asked and answers:
            asked_key, first = asked.popitem()
            send(asked_key, first, len(outputs[asked_key]))
        elif data.draw(st.integers(0, 9)) == 0:
            asked.clear()
            for effect in ledger.resume():
                assert isinstance(effect, Send)
                assert isinstance(effect.message, GenerateRequest)
        else:
            first = data.draw(st.integers(0, len(outputs[key])))
            send(key, first, data.draw(st.integers(first, len(outputs[key]))))
        for one, ids in received.items():
            assert ids == outputs[one][: len(ids)]
    for key in keys:
        send(key, len(outputs[key]), len(outputs[key]))  # everything was sent, as far as the scheduler knows
    for key, first in list(asked.items()):
        send(key, first, len(outputs[key]))
    assert received == outputs
    assert sorted(ended) == keys
    assert is_empty(ledger)
