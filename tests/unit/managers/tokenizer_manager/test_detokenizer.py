"""Text that grows token by token, and the stops in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.managers.tokenizer_manager.detokenizer import OutputText
from srt.managers.tokenizer_manager.stop_matcher import MAX_REGEX_MATCH, StopMatcher, longest_match
from srt.sampling.sampling_params import SamplingParams
from srt.utils.text_stream import TextStream
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import Characters


def output(stream: TextStream | None = None, stop_ids: Sequence[int] = (), **params: Any) -> OutputText:
    return OutputText(stream or Characters(), SamplingParams.from_dict(params), frozenset(stop_ids))


def run(text: OutputText, pieces: Sequence[str]) -> tuple[list[str], int, str | None]:
    """(what was shown after each piece, tokens that count, the stop)."""
    shown, num_tokens = [], 0
    for piece in pieces:
        delta = text.push([ord(character) for character in piece])
        shown.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.stop is not None:
            return shown, num_tokens, delta.stop
    delta = text.finish()
    return [*shown, delta.text], num_tokens, delta.stop


def test_without_stops_everything_is_shown_at_once() -> None:
    assert run(output(), ["ab", "c"]) == (["ab", "c", ""], 3, None)


def test_the_longest_beginning_of_a_stop_is_held_back_and_shown_when_it_comes_to_nothing() -> None:
    assert run(output(stop="<end>"), ["a<e", "n", "x", "<"]) == (["a", "", "<enx", "", "<"], 6, None)


def test_a_stop_is_cut_off_and_the_tokens_behind_it_do_not_count() -> None:
    assert run(output(stop="<end>"), ["a<e", "nd>bc"]) == (["a", ""], 6, "<end>")


def test_with_no_stop_trim_the_text_ends_with_the_stop() -> None:
    shown, num_tokens, stop = run(output(stop="<end>", no_stop_trim=True), ["a<e", "nd>bc"])
    assert ("".join(shown), num_tokens, stop) == ("a<end>", 6, "<end>")


def test_the_stop_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    assert run(output(stop=["bcd", "c"]), ["abcd"]) == (["ab"], 3, "c")
    assert run(output(stop=["c", "abc", "bc"]), ["xabc"]) == (["x"], 4, "abc")


def test_a_beginning_within_a_beginning_is_not_lost() -> None:
    shown, _, stop = run(output(stop="aab"), list("xaaab"))
    assert ("".join(shown), stop) == ("xa", "aab")


def test_a_stop_counts_only_in_the_text_behind_the_minimum_of_tokens() -> None:
    shown, num_tokens, stop = run(output(stop="b", min_new_tokens=2), list("abcb"))
    assert ("".join(shown), num_tokens, stop) == ("abc", 4, "b")
    shown, num_tokens, stop = run(output(stop="bc", min_new_tokens=2), list("abcbc"))
    assert ("".join(shown), num_tokens, stop) == ("abc", 5, "bc")


def test_the_id_that_ends_a_choice_is_no_text_unless_nothing_is_trimmed() -> None:
    assert run(output(stop_ids=[ord("!")]), ["ab!"]) == (["ab", ""], 3, None)
    assert run(output(stop_ids=[ord("!")], no_stop_trim=True), ["ab!"]) == (["ab!", ""], 3, None)


def test_a_stop_may_be_completed_by_the_last_unfinished_character() -> None:
    class Unfinished(Characters):
        def finish(self) -> str:
            return "\N{REPLACEMENT CHARACTER}"

    shown, num_tokens, stop = run(output(Unfinished(), stop="a\N{REPLACEMENT CHARACTER}"), ["xa"])
    assert ("".join(shown), num_tokens, stop) == ("x", 2, "a\N{REPLACEMENT CHARACTER}")


def test_an_expression_stops_at_the_shortest_text_in_which_it_is_found() -> None:
    assert run(output(stop_regex=r"\d+"), ["ab123"]) == (["ab"], 3, r"\d+")
    assert run(output(stop_regex=r"[0-9]{3}"), ["a1", "23b"]) == (["", "a"], 4, r"[0-9]{3}")


def test_an_expression_holds_back_no_more_than_it_can_match() -> None:
    assert run(output(stop_regex="[0-9]{3}"), ["abcd", "e"]) == (["ab", "c", "de"], 5, None)


def test_anchors_and_word_boundaries_see_the_text_that_was_shown_already() -> None:
    assert run(output(stop_regex="^b"), list("ab"))[2] is None
    assert run(output(stop_regex="^a"), list("ab"))[2] == "^a"
    assert run(output(stop_regex=r"\bb"), list("ab b"))[1:] == (4, r"\bb")
    assert run(output(stop_regex=r"(?m)^b"), list("b"))[2] is not None
    assert run(output(stop_regex=r"(?m)^b"), list("a\nb"))[1] == 3
    assert run(output(stop_regex="b$"), ["abc"])[1:] == (2, "b$")


def test_a_match_longer_than_the_window_does_not_count() -> None:
    fits, too_long = "a" + "x" * (MAX_REGEX_MATCH - 2) + "b", "a" + "x" * (MAX_REGEX_MATCH - 1) + "b"
    shown, num_tokens, stop = run(output(stop_regex="a.*b"), list("--" + fits))
    assert ("".join(shown), num_tokens, stop) == ("--", len(fits) + 2, "a.*b")
    assert run(output(stop_regex="a.*b"), list(too_long))[2] is None


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("abc", 3),
        ("a|bcd", 3),
        ("a{2,5}", 5),
        ("a+", MAX_REGEX_MATCH),
        (r"\d{3}-\d{2}", 6),
        (r"(?i)ab", 2),
        ("a{,3}", MAX_REGEX_MATCH),
        (r"\pL", MAX_REGEX_MATCH),
        (r"\Qa+\E", MAX_REGEX_MATCH),
        (r"\bx", 1),
    ],
)
def test_the_longest_match_of_an_expression_is_not_underestimated(pattern: str, most: int) -> None:
    assert longest_match(pattern) == most


def first_stop(text: str, strings: Sequence[str], patterns: Sequence[str]) -> tuple[str, int, str | None]:
    """The slow, obvious version: (the text before the stop, characters that count, the stop)."""
    for end in range(1, len(text) + 1):
        found = [(end - len(stop), stop) for stop in strings if text[:end].endswith(stop)]
        found += [(match.start(), p) for p in patterns if (match := re.search(p, text[:end])) is not None]
        if found:
            start, stop = min(found, key=lambda one: one[0])
            return text[:start], end, stop
    return text, len(text), None


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.text("ab1 \n", max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@settings(max_examples=200, deadline=None)
@given(
    pieces=cut_texts(),
    strings=st.lists(st.text("ab1 ", min_size=1, max_size=5), max_size=3),
    patterns=st.lists(
        st.sampled_from(["a+b", "1{2,3}", r"\bb", "b$", "^a", r"a.?1", "(ab|ba)1"]), max_size=2, unique=True
    ),
)
def test_where_a_text_stops_does_not_depend_on_how_it_is_cut(
    pieces: list[str], strings: list[str], patterns: list[str]
) -> None:
    shown, num_tokens, stop = run(output(stop=strings, stop_regex=patterns), pieces)
    expected_text, expected_tokens, expected_stop = first_stop("".join(pieces), strings, patterns)
    assert ("".join(shown), num_tokens, stop is None) == (expected_text, expected_tokens, expected_stop is None)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab1", max_size=20), stops=st.lists(st.text("ab1", min_size=2, max_size=5), min_size=1, max_size=3))
def test_all_is_shown_but_the_longest_ending_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops), (), keep_match=False)
    shown = ""
    for end, character in enumerate(text, 1):
        piece, stop = matcher.push(character)
        shown += piece
        if stop is not None:
            return
        begun = [size for size in range(end + 1) if any(one.startswith(text[end - size : end]) for one in stops)]
        assert shown == text[: end - max(begun)]


@pytest.fixture(scope="module")
def tokenizer(qwen3_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(qwen3_checkpoint)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_text_of_one_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Any ids at all: broken characters, special tokens, ids without a token."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = tokenizer.text_stream([], skip)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_no_piece_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    stream = tokenizer.text_stream([])
    pieces = [*map(stream.push, tokenizer.encode(text)), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "é€".encode()[:4])
    stream = tokenizer.text_stream([])
    assert [stream.push(i) for i in ids] == ["", "é", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("character", ["é", "€", "🙂"])
def test_a_character_that_the_prompt_begins_is_the_answers_if_it_completes_it(
    tokenizer: Tokenizer, character: str
) -> None:
    data = character.encode()
    for cut in range(1, len(data)):
        prompt, rest = byte_ids(tokenizer, b"a" + data[:cut]), byte_ids(tokenizer, data[cut:] + b"b")
        assert written(tokenizer, prompt, rest) == character + "b"
        assert written(tokenizer, prompt, byte_ids(tokenizer, b"b")) == "b"
        assert written(tokenizer, prompt, byte_ids(tokenizer, data[:1] + b"b")) == "\N{REPLACEMENT CHARACTER}b"
        assert written(tokenizer, prompt, []) == ""


def written(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The answer's text, pushed one by one and all at once."""
    one_by_one, at_once = tokenizer.text_stream(prompt), tokenizer.text_stream(prompt)
    text = "".join([*map(one_by_one.push, answer), one_by_one.finish()])
    assert at_once.push_all(answer) + at_once.finish() == text
    return text


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens of single bytes."""
    id_of: Callable[[int], int] = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}.__getitem__  # type: ignore[assignment]
    return [id_of(bytes([byte])) for byte in data]  # type: ignore[arg-type]
