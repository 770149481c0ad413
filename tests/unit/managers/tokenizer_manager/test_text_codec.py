"""What a client may do to a prompt's and an output's tokens by way of text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from srt.managers.tokenizer_manager.api_types import GenerateInput, RequestError
from srt.managers.tokenizer_manager.text_codec import TextCodec
from srt.sampling.sampling_params import SamplingParams
from srt.utils.tokenizer import Tokenizer, load_tokenizer


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer, None, context_length=512, vocab_size=tokenizer.vocab_size)


@pytest.fixture(scope="module")
def tokenizer(qwen3_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(qwen3_checkpoint)


# ---- Words that are not generated


def test_a_word_is_forbidden_at_the_beginning_of_a_text_and_behind_a_space(tokenizer: Tokenizer) -> None:
    the, spaced_the = tokenizer.encode("the"), tokenizer.encode(" the")
    assert len(the) == len(spaced_the) == 1
    assert codec_of(tokenizer).forbidden_ids(("the",)) == (*the, *spaced_the)
    assert codec_of(tokenizer).forbidden_ids((" the", "the")) == (*the, *spaced_the)


def test_a_form_behind_a_space_that_is_more_tokens_is_none_of_the_words(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" !")) > 1
    assert codec_of(tokenizer).forbidden_ids(("!",)) == tuple(tokenizer.encode("!"))


def test_where_every_text_begins_with_a_space_the_word_has_one_form() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    assert codec_of(Tokenizer(backend, {})).forbidden_ids(("the",)) == (0,)


@pytest.mark.parametrize(("word", "num_tokens"), [("hello", 3), ("  ", 0)])
def test_a_word_that_is_not_one_token_is_refused_with_what_would_work(
    tokenizer: Tokenizer, word: str, num_tokens: int
) -> None:
    with pytest.raises(
        RequestError, match=f"^bad_words has '{word}', which is {num_tokens} tokens, .*logit_bias"
    ) as caught:
        codec_of(tokenizer).forbidden_ids(("the", word))
    assert (caught.value.status, caught.value.parameter) == (400, "bad_words")


def test_words_are_those_of_each_request(tokenizer: Tokenizer) -> None:
    codec = codec_of(tokenizer)
    first, second = codec.forbidden_ids(("the",)), codec.forbidden_ids(("in",))
    assert not set(first) & set(second)
    assert (codec.forbidden_ids(("the",)), codec.forbidden_ids(())) == (first, ())


# ---- The end of a prompt that is too long


def prompt_ids(codec: TextCodec, num_kept: int | None, **given: Any) -> list[int]:
    request = GenerateInput(SamplingParams(), **given)
    return list(asyncio.run(codec.prompt_ids(request, num_kept)))


def test_the_last_tokens_are_kept_with_those_that_the_tokenizer_puts_around_a_text() -> None:
    codec = codec_of(bracketed_tokenizer())
    assert prompt_ids(codec, None, text="abcd") == [1, 3, 4, 5, 6, 2]
    assert prompt_ids(codec, 4, text="abcd") == [1, 5, 6, 2]
    assert prompt_ids(codec, 3, text="abcd") == [1, 6, 2]
    assert prompt_ids(codec, 6, text="abcd") == prompt_ids(codec, 99, text="abcd") == [1, 3, 4, 5, 6, 2]
    assert prompt_ids(codec, 2, text="abcd", add_special_tokens=False) == [5, 6]
    assert prompt_ids(codec, 2, input_ids=[1, 3, 4, 5]) == [4, 5]
    assert prompt_ids(codec, 9, input_ids=[1, 3, 4, 5]) == [1, 3, 4, 5]


def test_something_of_a_text_must_be_kept() -> None:
    with pytest.raises(RequestError, match=r"^truncate_prompt_tokens must be above 2, .* not 2") as caught:
        prompt_ids(codec_of(bracketed_tokenizer()), 2, text="abcd")
    assert (caught.value.status, caught.value.parameter) == (400, "truncate_prompt_tokens")


def test_a_text_that_is_cut_may_be_longer_than_any_prompt() -> None:
    codec = codec_of(bracketed_tokenizer())
    text = "abcd" * 40_000
    with pytest.raises(RequestError, match=r"^text has more than 1024 tokens"):
        prompt_ids(codec, None, text=text)
    assert prompt_ids(codec, 5, text=text) == [1, 4, 5, 6, 2]


def bracketed_tokenizer() -> Tokenizer:
    """A token for each of a, b, c and d, <s> before a text and </s> behind it."""
    backend = tokenizers.Tokenizer(models.BPE({"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "d": 6}, []))
    backend.add_special_tokens(["<s>", "</s>"])
    around = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return Tokenizer(backend, {})
