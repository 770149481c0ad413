"""What is refused when a request's message is built: the tokens that it forbids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from srt.managers.tokenizer_manager.api_types import GenerateInput, RequestError
from srt.managers.tokenizer_manager.model_facts import ModelFacts
from srt.managers.tokenizer_manager.request_checks import build_request
from srt.protocol.messages import GenerateRequest, SchedulerHello
from srt.sampling.sampling_params import MAX_BIAS_ENTRIES, SamplingParams


def build(params: SamplingParams, forbidden_ids: Sequence[int], vocab_size: int = 10) -> GenerateRequest:
    model = ModelFacts("/m", ("LlamaForCausalLM",), "llama", 256, vocab_size, (0,), {}, False)
    limits = SchedulerHello(max_total_num_tokens=256, max_request_tokens=256, page_size=16)
    request = GenerateInput(params, input_ids=[1])
    return build_request(request, [1], rid=0, label="", seed=0, model=model, limits=limits, forbidden_ids=forbidden_ids)


def test_forbidden_tokens_have_a_bias_of_minus_infinity() -> None:
    sampling = build(SamplingParams(), (3, 4)).sampling
    assert sampling.bias_ids.tolist() == [3, 4]
    assert np.isneginf(sampling.bias_values).all()


def test_words_and_biases_have_one_table() -> None:
    params = SamplingParams(logit_bias=tuple((token_id, 1.0) for token_id in range(MAX_BIAS_ENTRIES)))
    assert len(build(params, (0, 1), 2000).sampling.bias_ids) == MAX_BIAS_ENTRIES
    with pytest.raises(RequestError, match=rf"^bad_words and logit_bias may name at most {MAX_BIAS_ENTRIES} tokens"):
        build(params, (1999,), 2000)


def test_a_word_that_the_model_has_no_logit_of_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^bad_words has the token id 10, outside the vocabulary of 10\."):
        build(SamplingParams(), (10,))


def test_something_is_left_to_draw_also_while_stops_are_held_back() -> None:
    build(SamplingParams(), range(1, 10))
    for params, forbidden in ((SamplingParams(), range(10)), (SamplingParams(min_new_tokens=1), range(1, 10))):
        with pytest.raises(
            RequestError, match=r"^bad_words must leave at least one of the vocabulary's 10 tokens to draw\."
        ):
            build(params, forbidden)
