"""What a client may do to a prompt's and an output's tokens by way of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from srt.managers.io_struct import RequestError
from srt.managers.text_codec import TextCodec
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
        RequestError, match=f"^bad_words has '{word}', which is {num_tokens} tokens: .*logit_bias"
    ) as caught:
        codec_of(tokenizer).forbidden_ids(("the", word))
    assert (caught.value.status, caught.value.parameter) == (400, "bad_words")


def test_words_are_those_of_each_request(tokenizer: Tokenizer) -> None:
    codec = codec_of(tokenizer)
    first, second = codec.forbidden_ids(("the",)), codec.forbidden_ids(("in",))
    assert not set(first) & set(second)
    assert (codec.forbidden_ids(("the",)), codec.forbidden_ids(())) == (first, ())
