"""Masks and matchers: what a row may draw, how it ends, and how it goes back."""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from srt.constrained import matcher as matcher_module
from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import Constraint
from srt.constrained.matcher import GrammarError, Grammars, MaskFiller, Matcher
from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import Tokenizer
from tests.support.random_schemas import draw_answer
from tests.unit.constrained.conftest import EOS_IDS, PADDED_SIZE

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


def matcher_of(vocabulary: Vocabulary, kind: str, content: str) -> Matcher:
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint(kind, content), vocabulary))
    return grammars.matcher("key")


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_masks_of_many_rows_are_filled_at_their_places(vocabulary: Vocabulary) -> None:
    filler = MaskFiller(vocabulary, num_threads=2)
    matchers = [matcher_of(vocabulary, "choice", f'["{word}"]') for word in ("cat", "dog", "sun")]
    masks = np.full((6, vocabulary.mask_words), -1, np.int32)
    assert filler.fill([(5, matchers[0]), (0, matchers[1]), (3, matchers[2])], masks) == []
    for row, matcher in ((5, matchers[0]), (0, matchers[1]), (3, matchers[2])):
        assert bits(masks[row]) == matcher.allowed_ids().tolist() != []
    assert all((masks[row] == -1).all() for row in (1, 2, 4))


def test_draws_are_allowed_tokens_of_which_each_comes(vocabulary: Vocabulary) -> None:
    matcher, draws = matcher_of(vocabulary, "regex", "[0-9]{3}|x"), random.Random(1)
    assert {matcher.draw(draws) for _ in range(500)} == set(matcher.allowed_ids().tolist())
    ended = matcher_of(vocabulary, "regex", "x")
    while not ended.has_ended:
        token = ended.draw(draws)
        assert token is not None and ended.accept(token)
    assert ended.draw(draws) is None


def test_padding_is_never_allowed(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    masks = np.full((1, vocabulary.mask_words), -1, np.int32)
    MaskFiller(vocabulary, 1).fill([(0, matcher_of(vocabulary, "regex", "(?s:.*)"))], masks)
    allowed = bits(masks[0])
    assert max(allowed) < tokenizer.vocab_size < PADDED_SIZE
    assert set(EOS_IDS) <= set(allowed)
    assert not (tokenizer.special_ids - set(EOS_IDS)) & set(allowed)


@pytest.mark.parametrize("wrong", [np.zeros((2, 3), np.int32), np.zeros(67, np.int32), np.zeros((1, 67), np.int64)])
def test_a_buffer_of_another_shape_is_refused(vocabulary: Vocabulary, wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"masks must be contiguous int32 \[rows, 67\]"):
        MaskFiller(vocabulary, 1).fill([(0, matcher_of(vocabulary, "regex", "a"))], wrong)


def test_a_finished_row_allows_only_the_end(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, "choice", '["cat"]')
    assert not matcher.may_end and not matcher.is_finished
    assert matcher.accept_all(tokenizer.encode("cat")) == len(tokenizer.encode("cat"))
    masks = np.full((1, vocabulary.mask_words), -1, np.int32)
    filler = MaskFiller(vocabulary, 1)
    for _ in range(2):
        assert matcher.is_finished and matcher.may_end and matcher.error is None
        assert filler.fill([(0, matcher)], masks) == []
        assert bits(masks[0]) == sorted(EOS_IDS)
        matcher.accept(EOS_IDS[0])
    assert matcher.has_ended


def test_a_choice_may_be_the_beginning_of_another_and_one_of_thousands(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    choices = ["", "a", "ab", 'say "x"\n', "größe", *(f"x{i}" for i in range(5000))]
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint("choice", json.dumps(choices)), vocabulary))
    for text in [*choices[:5], "x0", "x4999", "b", "x5000"]:
        matcher = grammars.matcher("key")
        ids = tokenizer.encode(text, add_special_tokens=False)
        is_allowed = matcher.accept_all(ids) == len(ids) and matcher.may_end
        assert is_allowed == (text in choices), text


@pytest.mark.parametrize("text", ["12", "7"])
@pytest.mark.parametrize("kind", ["[0-9]+", "12|7"], ids=["may go on", "is finished"])
def test_rollback_takes_back_as_many_tokens_as_were_accepted(
    vocabulary: Vocabulary, tokenizer: Tokenizer, kind: str, text: str
) -> None:
    """The library does not count a token that ends a finished text."""
    ids = [*tokenizer.encode(text), EOS_IDS[1]]
    for num_back in range(len(ids) + 1):
        matcher = matcher_of(vocabulary, "regex", kind)
        before: list[list[int]] = []
        for token_id in ids:
            before.append(matcher.allowed_ids().tolist())
            assert matcher.accept(token_id)
        assert matcher.has_ended
        assert matcher.accept_all([ids[0]]) == matcher.accept_all([EOS_IDS[0]]) == 0
        matcher.rollback(num_back)
        if num_back:
            assert matcher.allowed_ids().tolist() == before[-num_back]
        assert matcher.accept_all(ids[len(ids) - num_back :]) == num_back
        assert matcher.error is None
        assert matcher.has_ended


def test_going_back_too_far_is_an_error(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, "regex", "[a-z]+")
    matcher.accept_all(tokenizer.encode("a"))
    with pytest.raises(ValueError, match="2 tokens cannot be taken back"):
        matcher.rollback(2)


def test_a_token_that_is_not_allowed_changes_nothing(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, "regex", "[0-9]{3}")
    one, letter = tokenizer.encode("1")[0], tokenizer.encode("x")[0]
    assert matcher.accept_all([one, letter, one]) == 1
    assert not matcher.accept(EOS_IDS[0]) and not matcher.accept(PADDED_SIZE - 1)
    assert matcher.error is None and matcher.accept_all([one, one]) == 2 and matcher.is_finished


def test_matchers_of_one_grammar_do_not_disturb_each_other(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint("json_schema", SCHEMA), vocabulary))
    alone = [draw_answer(grammars.matcher("key"), random.Random(seed)) for seed in range(6)]
    together = [grammars.matcher("key") for _ in range(6)]
    draws = [random.Random(seed) for seed in range(6)]
    grammars.release("key")
    ids: list[list[int]] = [[] for _ in together]
    filler = MaskFiller(vocabulary, 2)
    masks = np.zeros((6, vocabulary.mask_words), np.int32)
    for _ in range(300):
        assert filler.fill(list(enumerate(together)), masks) == []
        for row, matcher in enumerate(together):
            if not matcher.has_ended:
                allowed = bits(masks[row])
                token_id = allowed[draws[row].randrange(len(allowed))]
                assert matcher.accept(token_id)
                ids[row] += [token_id] * (not matcher.has_ended)
    assert ids == [answer.ids for answer in alone]


def test_a_resumed_answer_goes_on_where_it_was(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint("json_schema", SCHEMA), vocabulary))
    answer = draw_answer(grammars.matcher("key"), random.Random(1))
    for cut in range(len(answer.ids)):
        first, resumed = grammars.matcher("key"), grammars.matcher("key")
        assert all(first.accept(token_id) for token_id in answer.ids[:cut])
        assert resumed.accept_all(answer.ids[:cut]) == cut
        assert first.allowed_ids().tolist() == resumed.allowed_ids().tolist()


def test_a_row_over_a_limit_says_so_and_allows_only_the_end(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """It has compiled and has a first mask; only its first token asks for too much."""
    grammars = Grammars(vocabulary)
    rules = range(3000)
    grammars.compile("key", "start: " + " | ".join(f"r{i}" for i in rules) + "".join(f'\nr{i}: "{i}"' for i in rules))
    matcher = grammars.matcher("key")
    masks = np.full((1, vocabulary.mask_words), -1, np.int32)
    filler = MaskFiller(vocabulary, 1)
    assert filler.fill([(0, matcher)], masks) == [] and matcher.error is None
    assert not matcher.accept(tokenizer.encode("1")[0])
    assert matcher.error is not None and "max is 2000" in matcher.error
    assert filler.fill([(0, matcher)], masks) == [(0, matcher.error)]
    assert bits(masks[0]) == sorted(EOS_IDS)
    assert not matcher.accept(EOS_IDS[0]) and not matcher.is_finished and not matcher.may_end
    assert len(matcher.allowed_ids()) == 0


def test_a_grammar_that_served_long_is_compiled_anew(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lexer would grow to a limit at which all of its rows fail."""
    monkeypatch.setattr(matcher_module, "WORN_TOKENS", 100)
    grammars = Grammars(vocabulary)
    for key in ("busy", "idle"):
        grammars.compile(key, "start: /[a-z]*/")
    first, idle = grammars._compiled["busy"], grammars._compiled["idle"]
    row = grammars.matcher("busy")
    for _ in range(40):
        answer = draw_answer(grammars.matcher("busy"), random.Random(len(row.allowed_ids())), most=20)
        assert answer.error is None
    grammars.renew_worn()
    assert grammars._compiled["busy"] is not first and grammars._compiled["idle"] is idle
    assert first.num_tokens >= 100 and grammars._compiled["busy"].num_tokens == 0
    assert row.allowed_ids().tolist() == grammars.matcher("busy").allowed_ids().tolist()
    monkeypatch.undo()
    renewed = grammars._compiled["busy"]
    grammars.renew_worn()
    assert grammars._compiled["busy"] is renewed


def test_a_grammar_that_does_not_compile_is_not_kept(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    with pytest.raises(GrammarError, match="unknown name"):
        grammars.compile("key", "start: a")
    assert "key" not in grammars and len(grammars) == 0
    with pytest.raises(KeyError):
        grammars.matcher("key")


def test_compiling_lets_other_threads_run(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this switch interval no thread gives up the GIL by itself: another one runs if the library's call releases it.

    The operating system may give the other thread no core during one call, so there are many.
    """
    text = (
        "start: " + " | ".join(f"R{i}" for i in range(400)) + "".join(f"\nR{i}: /x{{{i}}}[a-f]*y/" for i in range(400))
    )
    grammars = Grammars(vocabulary)
    compile_in_library = LLMatcher
    may_run, has_run, ran_during_calls = threading.Event(), threading.Event(), []

    def run() -> None:
        may_run.wait()
        has_run.set()

    def observed(*args: Any, **options: Any) -> LLMatcher:
        may_run.set()
        compiled = compile_in_library(*args, **options)
        ran_during_calls.append(has_run.is_set())
        return compiled

    monkeypatch.setattr(matcher_module, "LLMatcher", observed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        while not any(ran_during_calls) and len(ran_during_calls) < 100:
            may_run.clear()
            has_run.clear()
            thread = threading.Thread(target=run)
            thread.start()
            grammars.compile(str(len(ran_during_calls)), text)
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert any(ran_during_calls) and "0" in grammars


def test_a_vocabulary_needs_a_token_that_ends_texts(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token that ends a text"):
        Vocabulary(tokenizer, tokenizer.vocab_size, [])


def test_a_tokenizer_may_be_larger_than_the_model(tokenizer: Tokenizer) -> None:
    small = Vocabulary(tokenizer, 1000, EOS_IDS)
    matcher = matcher_of(small, "regex", "[a-z ]{1,60}")
    answer = draw_answer(matcher, random.Random(0))
    assert answer.error is None and max(answer.ids) < 1000 and small.mask_words == 32


def test_the_tokenizer_of_the_model_is_what_splits_forced_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    answer = draw_answer(matcher_of(vocabulary, "choice", f'["{text}"]'), random.Random(3))
    usual = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(answer.ids) == text
    assert answer.ids[: len(usual) // 3] == usual[: len(usual) // 3]  # the library leaves the rest open


def test_forced_texts_allow_the_tokens_that_the_tokenizer_finds_in_place(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    """This tokenizer makes one token of a name between quotes only, and the library asks for the name alone."""
    names = ("thing", "quantity")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(names)}
    grammars = Grammars(vocabulary)
    grammars.compile("key", try_constraint(Constraint("json_schema", json.dumps(schema)), vocabulary))
    matcher = grammars.matcher("key")
    for token_id in tokenizer.encode('{"thing": 1, "quantity": 2}', add_special_tokens=False):
        assert token_id in matcher.allowed_ids(), tokenizer.token_bytes(token_id)
        assert matcher.accept(token_id)
