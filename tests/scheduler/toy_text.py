"""A toy tokenizer, and the text that an answer's ids must become: said the slow way, over the whole answer, from the ids alone.

Its tokens are letters, spaces, halves of characters, bytes that are no text, and special ones that are not shown; in its other
form, words with a mark for the space before them, which its decoder drops at the beginning of a text.
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from srt.sampling.sampling_params import SamplingParams
from srt.utils.text_stream import ByteLevelStream, ByteTable, CompletingStream, TextStream, TextTable, WindowStream
from tests.scheduler.traffic import Choice

BROKEN = "\ufffd"
SPECIAL = "<s>"
MOST_IDS = 1000  # of a vocabulary
PIECES = (
    *(b"a", b"\xc3", b"\xa9", b"ab", b" ", b"\xe2\x82", b"\xac", b"b"),
    *(
        b"ba",
        b"\xf0\x9f",
        b"\x98\x80",
        b"cab",
        b"\xff",
        b" the",
        b"\n",
        b"\xe2\x82\xac",
        b"aab",
        b"a b",
        b"",
        b"bb",
        b"c",
        b"ca",
    ),
)
IS_SPECIAL = PIECES.index(b"")
WORDS = ("▁a", "b", "▁the", "c", "▁b", "ab", "▁", "ca", "▁ab", "bb")
# As it is asked for, and as Python's own engine reads the same.
EXPRESSIONS = (
    ("[ab]a+b", "[ab]a+b"),
    ("b$", r"b\Z"),
    ("a.?c", "a.?c"),
    (r"\bab", r"\bab"),
    ("(the|ab) b", "(the|ab) b"),
)


class ToyTokenizer:
    """What the streams need of a tokenizer's backend."""

    def __init__(self) -> None:
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        self._characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
        self._tables = [
            (table, TextTable(table))
            for table in (
                ByteTable(self, frozenset()),
                ByteTable(self, frozenset(range(IS_SPECIAL, MOST_IDS, len(PIECES)))),
            )
        ]

    def id_to_token(self, token_id: int) -> str:
        if token_id % len(PIECES) == IS_SPECIAL:
            return SPECIAL
        return "".join(self._characters[byte] for byte in PIECES[token_id % len(PIECES)])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Of words."""
        return "".join([WORDS[token_id % len(WORDS)] for token_id in ids]).replace("▁", " ").removeprefix(" ")

    def stream(self, prompt_ids: Sequence[int], text_request: TextRequest) -> TextStream:
        if text_request.is_of_words:
            return WindowStream(self, prompt_ids, True, frozenset())
        bytes_of, texts = self._tables[text_request.params.skip_special_tokens]
        unfinished = self._tables[False][0].unfinished(prompt_ids)
        return CompletingStream(bytes_of, texts, unfinished) if unfinished else ByteLevelStream(bytes_of, texts)


@cache
def toy_tokenizer() -> ToyTokenizer:
    return ToyTokenizer()


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a client asks of the text of a request."""

    params: SamplingParams
    is_of_words: bool = False
    wants_tokens: bool = True
    wants_prompt_ids: bool = False

    @property
    def has_stops(self) -> bool:
        return bool(self.params.stop or self.params.stop_regex)


class ToyAnswer:
    """The text of a choice of which all ids are known."""

    __slots__ = ("_before", "_ends", "_parts", "_text", "_text_request", "begin", "stop", "stop_tokens", "text_to_stop")

    def __init__(self, choice: Choice, text_request: TextRequest) -> None:
        self._text_request = text_request
        silent = () if text_request.params.no_stop_trim else choice.request.sampling.stop_ids.tolist()
        table = _table(text_request.is_of_words, text_request.params.skip_special_tokens)
        if silent:
            table = table.copy()
            for token_id in silent:
                table[token_id] = b""
        self._parts = [table[token_id] for token_id in choice.answer.ids]
        self._before = b"" if text_request.is_of_words else _unfinished(choice.request.prompt_ids[-4:].tolist())
        self._ends: list[int] = []  # of the text that is certain with so many tokens
        self._text = ""
        self.begin = 0  # of the text in which stops count
        self.stop: str | None = None
        self.stop_tokens = -1  # with so many of the tokens it is complete
        self.text_to_stop = ""
        if text_request.has_stops:
            self._find_stop(len(choice.answer.ids))

    @property
    def text(self) -> str:
        self._text = self._text or self._decode(len(self._parts))
        return self._text

    def _end(self, num_tokens: int) -> int:
        if not self._ends:
            self._measure()
        return self._ends[num_tokens]

    def _measure(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._before)
        is_begun, is_whole, length = not self._before, not self._before, 0
        self._ends.append(0)
        for part in self._parts:
            if is_whole and part.isascii():
                length += len(part)
            else:
                more = decoder.decode(part)
                is_whole = not decoder.getstate()[0]
                if more and not is_begun:
                    more, is_begun = more.removeprefix(BROKEN), True
                length += len(more)
            self._ends.append(length)

    def shown(self, num_tokens: int) -> str | None:
        """What may be seen of so many tokens, while others may follow; None where an expression may hold back more or less."""
        end = self._end(num_tokens)
        if self._text_request.params.stop_regex:
            return None
        text, longest = self.text[self.begin : end], 0
        if num_tokens > self._text_request.params.min_new_tokens:
            for stop in self._text_request.params.stop:
                sizes = range(1, min(len(stop), len(text) + 1))
                longest = max([longest, *(size for size in sizes if text.endswith(stop[:size]))])
        return self.text[: end - longest]

    def whole(self, num_tokens: int) -> tuple[str, str | None]:
        """Of so many tokens behind which there are no more; and the stop that was found with the end of the text."""
        text = self.text if num_tokens == len(self._parts) else self._decode(num_tokens)
        if len(text) > self._end(num_tokens) and num_tokens >= self._text_request.params.min_new_tokens:
            found = self._stop_at(text, len(text))  # by the character that was broken off
            if found is not None:
                return text if self._text_request.params.no_stop_trim else text[: found[0]], found[1]
        return text, None

    def _decode(self, num_tokens: int) -> str:
        text = (self._before + b"".join(self._parts[:num_tokens])).decode(errors="replace")
        return text.removeprefix(BROKEN) if self._before else text  # what the prompt broke off is not the answer's

    def _find_stop(self, num_ids: int) -> None:
        self.begin = self._end(min(self._text_request.params.min_new_tokens, num_ids))
        for num_tokens in range(self._text_request.params.min_new_tokens + 1, num_ids + 1):
            for end in range(self._end(num_tokens - 1) + 1, self._end(num_tokens) + 1):
                found = self._stop_at(self.text, end)
                if found is not None:
                    start, self.stop = found
                    self.stop_tokens = num_tokens
                    self.text_to_stop = self.text[: end if self._text_request.params.no_stop_trim else start]
                    return

    def _stop_at(self, text: str, end: int) -> tuple[int, str] | None:
        """Of the stops that are complete at this end of the text: where the longest begins."""
        found: list[tuple[int, str]] = []
        for stop in self._text_request.params.stop:
            if text[self.begin : end].endswith(stop):
                found.append((end - len(stop), stop))
        for stop in self._text_request.params.stop_regex:
            match = _expression(stop).search(text, self.begin, end)
            if match is not None:
                found.append((match.start(), stop))
        return min(found, key=lambda one: one[0], default=None)


def draw_text_request(rng: random.Random, choices: list[Choice], stop_share: float) -> TextRequest:
    """Stops are mostly pieces of what the first choice says."""
    sampling = choices[0].request.sampling
    plain = SamplingParams(max_new_tokens=sampling.max_new_tokens, min_new_tokens=sampling.min_new_tokens)
    if rng.random() >= 0.6:
        return PLAIN if not sampling.min_new_tokens else TextRequest(plain)
    is_of_words = rng.random() < 0.1
    wants_prompt_ids = rng.random() < 0.2
    wants_tokens = sampling.max_new_tokens > 1 or rng.random() < 0.1
    stops, expressions = list[str](), list[str]()
    if rng.random() < stop_share:
        text = ToyAnswer(choices[0], TextRequest(plain, is_of_words)).text
        for _ in range(rng.choice((1, 1, 2, 4))):
            first = rng.randrange(len(text) + 1)
            stops.append(text[first : first + rng.choice((1, 2, 3, 5))] or "never")
        if rng.random() < 0.7:
            stops, expressions = stops[1:], [rng.choice(EXPRESSIONS)[0]]
        if stops and len(stops[-1]) > 2:
            stops.append(stops[-1][1:])  # two that end at the same place
    params = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop=tuple(dict.fromkeys(stops)),
        stop_regex=tuple(expressions),
        no_stop_trim=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.5,
    )
    return TextRequest(params, is_of_words, wants_tokens, wants_prompt_ids)


PLAIN = TextRequest(SamplingParams())


@cache
def _expression(stop: str) -> re.Pattern[str]:
    return re.compile(dict(EXPRESSIONS)[stop], re.ASCII)


@cache
def _table(is_of_words: bool, skips_special: bool) -> list[bytes]:
    """The bytes of each token."""
    if is_of_words:
        return [word.replace("▁", " ").encode() for word in WORDS] * (MOST_IDS // len(WORDS) + 1)
    special = b"" if skips_special else SPECIAL.encode()
    return [*PIECES[:IS_SPECIAL], special, *PIECES[IS_SPECIAL + 1 :]] * (MOST_IDS // len(PIECES) + 1)


def _unfinished(last_ids: list[int]) -> bytes:
    """The beginning of a character that the prompt ends with: the answer may complete it."""
    table = _table(False, False)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join([table[token_id] for token_id in last_ids]))
    return decoder.getstate()[0]
