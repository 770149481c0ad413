"""The parts of structured output in a worker: the vocabulary, compiled grammars by key, and a matcher for each constrained row.

A matcher knows only the grammar. `tp_worker/constrained_rows.py` decides what a row may draw, with min_new_tokens taken into account.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from srt.constrained.vocabulary import Vocabulary

# The same in the process that tries constraints as in workers. A step that needs more than these ends its row with an error. Those of a
# step are less than the library's own: with them the worst mask of hostile constraints took 4.5 ms instead of 20, and of 60 ordinary
# schemas none reached them.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
)


# The library's lexer keeps each state that it ever met, shares them among the matchers of a grammar, and refuses all of them at
# `max_lexer_states`. An expression with very many states met 250,000 within 17,700 tokens of a vocabulary of 151,936.
WORN_TOKENS: Final = 4_000


class GrammarError(Exception):
    """A grammar that does not compile. The message is the library's, in one line."""


class Grammars:
    """The compiled grammars of one process, by key. `compile` may run in any thread and releases the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiled: dict[str, _Compiled] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._compiled

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, key: str, text: str) -> None:
        """Compile the grammar and keep it under `key`; raise GrammarError. One that is kept already is not compiled again."""
        if key not in self._compiled:
            self._compiled[key] = _Compiled(self.vocabulary, text)

    def renew_worn(self) -> None:
        """Compile grammars anew whose matchers have accepted many tokens, for the matchers to come.

        Call it now and then in the thread that compiles: every fifty steps is enough. Without it a grammar that serves for long
        takes up to half a gigabyte, and then fails.
        """
        for key, compiled in list(self._compiled.items()):
            if compiled.num_tokens >= WORN_TOKENS:
                renewed = _Compiled(self.vocabulary, compiled.text)
                if key in self._compiled:  # it may have been released in the meantime
                    self._compiled[key] = renewed

    def release(self, key: str) -> None:
        """Forget a grammar. Matchers that were made of it go on."""
        self._compiled.pop(key, None)

    def matcher(self, key: str) -> Matcher:
        """Return a matcher at the beginning of an answer. KeyError if the grammar was not compiled or is released."""
        return Matcher(self._compiled[key], self.vocabulary.eos_ids)


class _Compiled:
    """A compiled grammar, and how much it was used."""

    __slots__ = ("library", "num_tokens", "text")

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.text = text
        self.num_tokens = 0
        self.library = LLMatcher(vocabulary.library, text, log_level=0, limits=LIMITS)
        if self.library.is_error():
            raise GrammarError(_first_line(self.library.get_error()))


class Matcher:
    """The state of one answer: which tokens may come next.

    A token that ends the text is counted here and not by the library, which counts it at some times only: `rollback` takes back
    exactly as many tokens as were accepted.
    """

    __slots__ = ("_compiled", "_eos_ids", "_has_ended", "_library")

    def __init__(self, compiled: _Compiled, eos_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._library = compiled.library.deep_copy()
        self._eos_ids = eos_ids
        self._has_ended = False

    @property
    def error(self) -> str | None:
        """The reason why no token can be allowed any more: a limit was exceeded. Ask after each fill and accept."""
        return _first_line(self._library.get_error()) if self._library.is_error() else None

    @property
    def has_ended(self) -> bool:
        """True if a token that ends the text was accepted."""
        return self._has_ended

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete and nothing but its end may follow, or has followed."""
        return self._has_ended or (self._library.is_stopped() and not self._library.is_error())

    @property
    def may_end(self) -> bool:
        """True if the answer is complete as it is, though it may go on."""
        return self._has_ended or (self._library.is_accepting() and not self._library.is_error())

    def allowed_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of the tokens that may come next: none in case of an error. Slower than `MaskFiller`, which steps use."""
        return np.flatnonzero(np.unpackbits(self._mask(), bitorder="little"))

    def draw(self, draws: random.Random) -> int | None:
        """Return one of the tokens that may come next, None if there is none. They are not equally likely, which makes this quick."""
        mask = self._mask()
        places = np.flatnonzero(mask)
        if not len(places):
            return None
        place = int(places[draws.randrange(len(places))])
        return 8 * place + draws.choice([bit for bit in range(8) if mask[place] >> bit & 1])

    def _mask(self) -> npt.NDArray[np.uint8]:
        """Return a bit for each token, eight in a byte; all are 0 in case of an error."""
        if not self._has_ended:
            mask = np.frombuffer(self._library.compute_bitmask(), np.uint8)
            if not self._library.is_error():
                return mask
        return np.zeros(0, np.uint8)

    def accept(self, token_id: int) -> bool:
        """Advance by a token. False, and no change, if it is not allowed; also if the matcher has an `error`, which this may cause."""
        return self.accept_all((token_id,)) == 1

    def accept_all(self, token_ids: Iterable[int]) -> int:
        """Advance by these tokens and return how many of them were allowed. The first that is not ends it."""
        accepted = 0
        for token_id in token_ids:
            if self._has_ended:
                break
            if token_id in self._eos_ids and self.may_end:
                self._has_ended = True
            elif self._library.is_stopped() or not self._library.try_consume_tokens([token_id]):
                break
            accepted += 1
        self._compiled.num_tokens += accepted
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted. ValueError if there were not so many."""
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens and not self._library.rollback(num_tokens):
            raise ValueError(f"{num_tokens} tokens cannot be taken back: {self.error}")


class MaskFiller:
    """Fills the masks of a step's rows, on threads of its own, with the GIL released."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int | None = None) -> None:
        """Start the threads. None: four fifths of the cores, at most 32."""
        self._vocabulary = vocabulary
        self._pool = LLExecutor(num_threads)
        eos = np.zeros(vocabulary.mask_words * 32, np.uint8)
        eos[list(vocabulary.eos_ids)] = 1
        self._only_eos = np.packbits(eos, bitorder="little").view(np.int32)

    def fill(self, rows: Sequence[tuple[int, Matcher]], masks: npt.NDArray[np.int32]) -> list[tuple[int, str]]:
        """Write the mask of each (row, matcher) into `masks[row]`; return rows that cannot go on, with the reason.

        masks: int32 [rows, vocabulary.mask_words], contiguous. Bit i of word w allows token 32 w + i. Rows not named are left alone.
        A row that is finished or cannot go on allows only the tokens that end a text.
        """
        words = self._vocabulary.mask_words
        if masks.dtype != np.int32 or masks.ndim != 2 or masks.shape[1] != words or not masks.flags.c_contiguous:
            raise ValueError(f"masks must be contiguous int32 [rows, {words}], not {masks.dtype} {masks.shape}")
        running = []
        for row, matcher in rows:
            if matcher._has_ended or matcher._library.is_stopped():
                masks[row] = self._only_eos
            else:
                running.append((matcher._library, row))
        if running:
            self._pool.unsafe_compute_mask_ptr(running, masks.ctypes.data, words * 4, len(masks))
        return [(row, error) for row, matcher in rows if (error := matcher.error) is not None]


def _first_line(message: str) -> str:
    """Return the library's message without its dump of the parser's state."""
    lines = message.strip().partition("<state>")[0].strip().splitlines()
    return " ".join(" ".join(lines).split()).partition(" while processing ")[0][:300]
