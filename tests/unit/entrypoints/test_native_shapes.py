"""The native JSON, both ways."""

from __future__ import annotations

import re
from typing import Any

import pytest

from srt.entrypoints.native_shapes import NativeAnswer, NativeCall, parse_generate
from srt.managers.tokenizer_manager.api_types import ChoiceTimes, ChoiceUpdate, Finish, RequestError, TokenLogprob
from srt.sampling.sampling_params import SamplingParams


def parse(**body: Any) -> NativeCall:
    return parse_generate(body, SamplingParams.from_dict)


def update(text: str, ids: tuple[int, ...], so_far: int, index: int = 0, **more: Any) -> ChoiceUpdate:
    return ChoiceUpdate(
        index=index,
        text=text,
        ids=ids,
        prompt_tokens=3,
        completion_tokens=so_far,
        cached_tokens=0,
        seed=7,
        rid="r",
        **more,
    )


def answer_to(call: NativeCall, **options: Any) -> NativeAnswer:
    ticks = iter(range(100))
    return NativeAnswer(
        call,
        lambda token_id: f"<{token_id}>",
        num_drafts=0,
        weight_version=lambda: "default",
        now=lambda: float(next(ticks)),
        **options,
    )


def test_one_text_is_one_input() -> None:
    call = parse(text="hi", sampling_params={"temperature": 0}, rid="a", cache_salt="s")
    assert not call.is_list
    (one,) = call.inputs
    assert (one.text, one.input_ids, one.rid, one.cache_salt, one.params.temperature) == ("hi", None, "a", "s", 0.0)


def test_a_list_of_prompts_is_a_batch_and_lists_spread_over_it() -> None:
    call = parse(
        input_ids=[[1, 2], [3]],
        sampling_params=[{"n": 2}, {"top_k": 5}],
        rid="batch",
        return_logprob=[False, True],
        top_logprobs_num=[0, 2],
        logprob_start_len=[-1, 0],
        priority=[1, -1],
    )
    assert call.is_list
    assert [one.priority for one in call.inputs] == [1, -1]
    assert [one.input_ids for one in call.inputs] == [[1, 2], [3]]
    assert [one.rid for one in call.inputs] == ["batch_0", "batch_1"]
    assert [one.params.n for one in call.inputs] == [2, 1]
    assert [one.logprobs.output for one in call.inputs] == [False, True]
    assert (call.inputs[1].logprobs.top, call.inputs[1].logprobs.prompt_start) == (2, 0)


def test_null_and_fields_without_meaning_are_as_if_absent() -> None:
    assert parse(text="hi", rid=None, image_data=None, log_metrics=True, session_id="", lora_path=[]) == parse(
        text="hi"
    )


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        ({}, "text", "text or input_ids is required."),
        ({"text": "a", "input_ids": [1]}, "input_ids", "exclude each other"),
        ({"text": 3}, "text", "text must be a string or a list of strings."),
        ({"text": ["a", 3]}, "text", "text must be a string or a list of strings."),
        ({"text": []}, "text", "must not be an empty list"),
        ({"input_ids": [1, "b"]}, "input_ids", "must be a list of integers or a list of lists of integers."),
        ({"input_ids": [True]}, "input_ids", "must be a list of integers"),
        ({"text": "a", "stream": "yes"}, "stream", "stream must be true or false."),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature", "must be a number, not a string"),
        ({"text": "a", "sampling_params": {"heat": 1}}, "heat", "is not a known sampling parameter"),
        ({"text": "a", "sampling_params": {"regex": 7}}, "regex", "must be a string"),
        ({"text": "a", "sampling_params": 3}, "sampling_params", "must be an object or a list of objects."),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "only if the prompt is a list"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "one entry per prompt (2), not 1"),
        ({"text": "a", "image_data": "x"}, "image_data", "image_data is not supported yet."),
        ({"text": "a", "bogus": 1}, "bogus", "bogus is not a known parameter."),
        ({"text": ["a"] * 4097}, "text", "may have at most 4096 prompts"),
        ({"text": ["a"] * 33, "sampling_params": {"n": 128}}, "sampling_params", "4224 choices in all"),
        ({"text": "a", "rid": ""}, "rid", "must not be empty"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "must be different for each prompt of a batch"),
        ({"text": "a", "logprob_start_len": -2, "return_logprob": True}, "logprob_start_len", "at least -1"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "needs return_logprob"),
        ({"text": "a", "top_logprobs_num": 1000, "return_logprob": True}, "top_logprobs_num", "at most 128"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], parameter: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        parse(**body)
    assert (caught.value.status, caught.value.parameter) == (400, parameter)


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_generate([1, 2], SamplingParams.from_dict)


def test_chunks_carry_the_text_so_far() -> None:
    answer = answer_to(parse(text="hi", stream=True))
    index = answer.add(0, update("a", (1,), 1))
    first = answer.chunk(index)
    assert (first["text"], first["output_ids"], first["meta_info"]["finish_reason"]) == ("a", [1], None)
    assert "index" not in first
    assert "e2e_latency" not in first["meta_info"]
    answer.add(0, update("b", (2,), 2, finish=Finish("length", length=2), times=ChoiceTimes(0.25, 0.0)))
    last = answer.chunk(index)
    assert (last["text"], last["output_ids"]) == ("ab", [1, 2])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert last["meta_info"]["e2e_latency"] == 1.0
    again = answer.result()
    assert last["meta_info"].pop("response_sent_to_client_ts") < again["meta_info"].pop("response_sent_to_client_ts")
    assert last == again


def test_moments_are_told_on_the_clock_of_the_world_and_what_nobody_measured_is_null() -> None:
    answer = answer_to(parse(text="hi"))
    measured = ChoiceTimes(arrived_s=0.5, sent_s=0.25, first_token_s=2.0, last_token_s=3.0, queue_s=1.0)
    answer.add(0, update("ab", (1, 2), 2, finish=Finish("stop"), times=measured))
    meta = answer.result()["meta_info"]
    zero = meta["request_received_ts"]  # at 0.0 of the test's clock
    assert meta["queue_time"] == 1.0
    assert meta["forward_entry_time"] - zero == pytest.approx(0.5 + 0.25 + 1.0)
    assert meta["prefill_finished_time"] - zero == pytest.approx(0.5 + 2.0)
    assert meta["decode_throughput"] == 1.0
    answer = answer_to(parse(text="hi"))
    answer.add(0, update("", (), 0, finish=Finish("abort"), times=ChoiceTimes(0.5, 0.25)))
    meta = answer.result()["meta_info"]
    for name in ("queue_time", "forward_entry_time", "prefill_finished_time", "first_token_latency"):
        assert meta[name] is None


def test_incremental_chunks_carry_what_is_new() -> None:
    call = parse(text="hi", stream=True, return_logprob=True)
    answer = answer_to(call, incremental=True)
    for at, letter in enumerate("abcd"):
        answer.add(0, update(letter, (at,), at + 1, output_logprobs=(TokenLogprob(-1.0 * at, at),)))
        if at == 1:
            assert answer.chunk(0)["text"] == "ab"
    chunk = answer.chunk(0)
    assert (chunk["text"], chunk["output_ids"]) == ("cd", [2, 3])
    assert chunk["meta_info"]["output_token_logprobs"] == [[-2.0, 2, None], [-3.0, 3, None]]
    assert chunk["meta_info"]["output_token_logprobs_length"] == 4
    assert answer.result()["text"] == "abcd"


def test_choices_and_batches_make_one_flat_list() -> None:
    call = parse(text=["x", "y"], sampling_params={"n": 2})
    answer = answer_to(call)
    indices = []
    for prompt in (1, 0):
        for choice in (0, 1):
            indices.append(answer.add(prompt, update(f"{prompt}{choice}", (1,), 1, choice, finish=Finish("stop"))))
    assert indices == [2, 3, 0, 1]
    assert [part["text"] for part in answer.result()] == ["00", "01", "10", "11"]
    assert answer.chunk(3)["index"] == 3


def test_logprobs_are_rows_of_value_id_and_text() -> None:
    call = parse(
        text="x",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        token_ids_logprob=[9],
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    )
    answer = answer_to(call)
    answer.add(
        0,
        update(
            "a",
            (5,),
            1,
            finish=Finish("stop", matched=5),
            output_logprobs=(TokenLogprob(-0.5, 5, ((-0.1, 6),), ((-2.0, 9),)),),
            prompt_logprobs=(TokenLogprob(None, 1), TokenLogprob(-1.0, 2, ((-0.2, 3),), ((-3.0, 9),))),
            prompt_ids=(1, 2),
        ),
    )
    result = answer.result()
    meta = result["meta_info"]
    assert result["prompt_token_ids"] == [1, 2]
    assert meta["finish_reason"] == {"type": "stop", "matched": 5}
    assert meta["input_token_logprobs"] == [[None, 1, "<1>"], [-1.0, 2, "<2>"]]
    assert meta["input_top_logprobs"] == [None, [[-0.2, 3, "<3>"]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-3.0, 9, "<9>"]]]
    assert meta["output_token_logprobs"] == [[-0.5, 5, "<5>"]]
    assert meta["output_top_logprobs"] == [[[-0.1, 6, "<6>"]]]
    assert meta["output_token_ids_logprobs"] == [[[-2.0, 9, "<9>"]]]


def test_a_batch_may_have_only_so_many_stop_expressions() -> None:
    """Compiling one takes a millisecond or more, on the event loop."""
    params = [{"stop_regex": [f"a{i}x{j}" for j in range(32)]} for i in range(9)]
    with pytest.raises(RequestError, match="stop_regex may have at most 256 expressions in a batch, not 288"):
        parse(text=["hi"] * 9, sampling_params=params)
    assert len(parse(text=["hi"] * 9, sampling_params=params[0]).inputs) == 9


def test_a_stop_expression_that_needs_much_memory_is_refused() -> None:
    with pytest.raises(RequestError, match="stop_regex has an expression that cannot be compiled"):
        parse(text="hi", sampling_params={"stop_regex": r"\pL{1000}"})
