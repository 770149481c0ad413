"""What a client may ask, and every way to ask it wrongly."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from srt.sampling.parameter_checks import MAX_STOP_REGEX_CHARS, ParameterError
from srt.sampling.sampling_params import (
    ALIASES,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS_ENTRIES,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
    choice_seed,
)

NOT_INTEGERS: list[Any] = ["1", 1.5, 1.0, True, [], {}]
NOT_NUMBERS: list[Any] = ["1", True, [], {}, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)]
NOT_BOOLEANS: list[Any] = [0, 1, "true", [], {}]
NOT_STRINGS: list[Any] = [1, True, {}, [1], ["a", None], [["a"]]]

WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [*NOT_INTEGERS, -1, 1 << 31, 10**5000],
    "temperature": [*NOT_NUMBERS, -0.1, 1001],
    "top_k": [*NOT_INTEGERS, -2],
    "top_p": [*NOT_NUMBERS, 0, -0.5, 1.01],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 2.1],
    "min_new_tokens": [*NOT_INTEGERS, -1],
    "stop": [*NOT_STRINGS, "", ["a", ""], ["x"] * (MAX_STOPS + 1), "x" * (MAX_STOP_CHARS + 1), "\ud800"],
    "stop_token_ids": ["1", 1.5, True, [True], ["1"], [1.0], {}, [1] * (MAX_STOP_TOKEN_IDS + 1)],
    "stop_regex": [
        *NOT_STRINGS,
        "",
        "(",
        "[a",
        r"(a)\1",
        "(?=a)",
        "a*",
        "$",
        ["a", "*"],
        ["x"] * (MAX_STOPS + 1),
        "x" * (MAX_STOP_REGEX_CHARS + 1),
        "((a{1000}){1000}){1000}",
        "\ud800",
    ],
    "ignore_eos": NOT_BOOLEANS,
    "skip_special_tokens": NOT_BOOLEANS,
    "spaces_between_special_tokens": NOT_BOOLEANS,
    "no_stop_trim": NOT_BOOLEANS,
    "include_stop_str_in_output": NOT_BOOLEANS,
    "bad_words": [*NOT_STRINGS, "", ["a", ""], ["x"] * (MAX_BAD_WORDS + 1), "x" * (MAX_BAD_WORD_CHARS + 1), "\ud800"],
    "logit_bias": [
        1,
        "x",
        [],
        [1],
        True,
        {"x": 1},
        {"-1": 1},
        {"1.0": 1},
        {"٣": 1},
        {1: "x"},
        {1: True},
        {1: None},
        {1: 101},
        {1: float("nan")},
        {"1" * 4000: 1},
        dict.fromkeys(range(MAX_BIAS_ENTRIES + 1), 0),
    ],
    "n": [*NOT_INTEGERS, 0, -1, MAX_CHOICES + 1],
    "sampling_seed": [*NOT_INTEGERS, 1 << 64, -(1 << 63) - 1],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_a_wrong_value_is_refused_by_the_parameters_name_in_a_short_sentence(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_dict({name: value})
    assert caught.value.name == name
    assert str(caught.value).startswith(name)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # can be sent to the client


def test_every_parameter_has_wrong_values_in_the_table() -> None:
    assert {*WRONG, "may_shorten", "constraint"} - ALIASES.keys() == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", ["may_shorten", "temprature", "", "max_tokens", "__class__"])
def test_an_unknown_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_dict({name: 1})
    assert caught.value.name == name


@pytest.mark.parametrize(
    "name",
    ["beam_width", "structured_outputs", "custom_params", "watermark", "stream_interval"],
)
def test_an_unsupported_parameter_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    neutral: Any
    for neutral in (None, False, "", {}):
        SamplingParams.from_dict({name: neutral})
    with pytest.raises(ParameterError, match=f"{name} is not supported"):
        SamplingParams.from_dict({name: "x"})


@pytest.mark.parametrize("name", sorted(WRONG))
def test_null_means_default(name: str) -> None:
    assert SamplingParams.from_dict({name: None}) == SamplingParams.from_dict({})
    assert SamplingParams.from_dict({"temperature": None}, {"temperature": 0.5}).temperature == 0.5


def test_what_is_given_wins_over_the_models_defaults() -> None:
    params = SamplingParams.from_dict({"top_k": 5}, {"top_k": 20, "temperature": 0.6})
    assert (params.top_k, params.temperature) == (5, 0.6)


@pytest.mark.parametrize("given", [None, [], "x", 1])
def test_parameters_that_are_no_object_are_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match="sampling_params must be an object"):
        SamplingParams.from_dict(given)


def test_an_output_limit_is_a_wish_only_if_it_was_asked_for() -> None:
    assert SamplingParams.from_dict({"max_new_tokens": 128}).may_shorten is False
    assert SamplingParams.from_dict({}).may_shorten is True
    assert SamplingParams.from_dict({}).max_new_tokens == 128
    assert SamplingParams.from_dict({}, default_max_new_tokens=16).max_new_tokens == 16
    assert SamplingParams.from_dict({}, default_max_new_tokens=None).max_new_tokens is None


def test_a_minimum_above_the_maximum_is_refused_and_above_the_default_it_raises_it() -> None:
    with pytest.raises(ParameterError, match="min_new_tokens must not exceed max_new_tokens"):
        SamplingParams.from_dict({"min_new_tokens": 9, "max_new_tokens": 8})
    assert SamplingParams.from_dict({"min_new_tokens": 200}).max_new_tokens == 200


@pytest.mark.parametrize(
    ("name", "written", "held"),
    [
        ("top_k", 0, -1),
        ("top_k", 1 << 30, -1),
        ("stop", "x", ("x",)),
        ("stop_token_ids", 7, (7,)),
        ("stop_regex", "a+", ("a+",)),
        ("logit_bias", {"7": 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
        ("sampling_seed", -1, (1 << 64) - 1),
        ("temperature", 0, 0.0),
    ],
)
def test_two_ways_to_write_a_value_mean_the_same(name: str, written: Any, held: Any) -> None:
    assert getattr(SamplingParams.from_dict({name: written}), name) == held


@pytest.mark.parametrize("given", [{"stop_token_ids": [100]}, {"stop_token_ids": [-1]}, {"logit_bias": {"100": 1}}])
def test_a_token_outside_the_vocabulary_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="outside the vocabulary of 100") as caught:
        SamplingParams.from_dict(given).check_vocabulary(100)
    assert caught.value.name in given
    SamplingParams.from_dict({"stop_token_ids": [0, 99], "logit_bias": {"99": 1}}).check_vocabulary(100)


def test_the_engine_gets_eos_and_stop_ids_in_order_and_eos_only_if_it_is_not_ignored() -> None:
    spec = SamplingParams.from_dict({"stop_token_ids": [9, 3, 9]}).spec(5, eos_ids=(7, 3))
    assert spec.stop_ids.tolist() == [3, 7, 9]
    assert spec.max_new_tokens == 5
    assert SamplingParams.from_dict({"ignore_eos": True}).spec(5, eos_ids=(7,)).stop_ids.tolist() == []


def test_a_temperature_next_to_zero_is_greedy() -> None:
    assert SamplingParams.from_dict({"temperature": 1e-7}).spec(1, ()).temperature == 0.0
    assert SamplingParams.from_dict({"temperature": 1e-5}).spec(1, ()).temperature == 1e-5


def test_biases_reach_the_engine_as_two_aligned_columns() -> None:
    spec = SamplingParams.from_dict({"logit_bias": {"9": 1.5, "2": -100}}).spec(1, ())
    assert spec.bias_ids.tolist() == [2, 9]
    assert spec.bias_values.tolist() == [-100.0, 1.5]
    assert (spec.bias_ids.dtype, spec.bias_values.dtype) == (np.int32, np.float32)


def test_forbidden_tokens_reach_the_engine_as_biases_and_win_over_others() -> None:
    spec = SamplingParams.from_dict({"logit_bias": {"9": 1.5, "2": 3}}).spec(1, (), (9, 4))
    assert spec.bias_ids.tolist() == [2, 9, 4]
    assert spec.bias_values.tolist() == [3.0, float("-inf"), float("-inf")]


def test_the_stop_is_kept_by_either_name_and_two_that_differ_are_refused() -> None:
    name = "include_stop_str_in_output"
    assert SamplingParams.from_dict({name: True}).no_stop_trim is True
    assert SamplingParams.from_dict({name: True, "no_stop_trim": True}).no_stop_trim is True
    assert SamplingParams.from_dict({name: False}).no_stop_trim is False
    with pytest.raises(ParameterError, match="two names of one parameter") as caught:
        SamplingParams.from_dict({name: False, "no_stop_trim": True})
    assert caught.value.name == name


def test_choices_draw_with_different_seeds_and_the_first_with_the_requests_own() -> None:
    seeds = [choice_seed(5, choice) for choice in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert seeds == [choice_seed(5, choice) for choice in range(100)]
