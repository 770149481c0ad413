"""What training never sees: phrasings and operands that a hash sets aside for the evaluation."""

from __future__ import annotations

import enum
import hashlib
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Split(enum.Enum):
    TRAINING = "training"
    HELD_OUT = "held out"  # new operands, in new combinations of known parts of a wording
    UNSEEN = "unseen"  # new operands, in wordings of patterns of which training saw nothing


def digest(key: str) -> int:
    """A number below 2**64 that depends on the key alone: not on the process, the platform or Python's version."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def is_held_out(key: str, share: float) -> bool:
    return digest(key) < share * 2**64


def draw_operands(
    rng: random.Random, split: Split, make: Callable[[random.Random], T], key: Callable[[T], str], share: float = 0.02
) -> T:
    """What `make` draws, again and again until its key lies on the wanted side. Keys must not depend on the phrasing."""
    while True:
        operands = make(rng)
        if is_held_out(key(operands), share) is (split is not Split.TRAINING):
            return operands


_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(pattern: str) -> list[str]:
    """All texts of a pattern: `[Add|Sum up] {a}[| now].` has four. Brackets nest."""
    inner = _CHOICE.search(pattern)
    if inner is None:
        return [pattern]
    before, after = pattern[: inner.start()], pattern[inner.end() :]
    return [text for part in inner[1].split("|") for text in expand(before + part + after)]


def phrasing_key(text: str) -> str:
    """Equal for phrasings that differ in capitals and in what they end with."""
    return text.lower().rstrip("?.! ")


class NothingUnseen(Exception):
    """All patterns of something are in the training text."""


LEAST_TO_SPARE = 8
"""Patterns that say the same, before one in eight of them is kept from training whole."""


class Phrasings:
    """Many ways to say one thing, given as patterns. The hash holds some of the texts out, and at least one; where patterns are
    many, some of those too, whole."""

    def __init__(self, *patterns: str, share: float = 0.12) -> None:
        unseen = sorted(patterns, key=digest)[: len(patterns) // 8 if len(patterns) >= LEAST_TO_SPARE else 0]
        groups = [list(dict.fromkeys(expand(pattern))) for pattern in patterns if pattern not in unseen]
        new = [list(dict.fromkeys(expand(pattern))) for pattern in unseen]
        texts = sorted({text for group in groups for text in group}, key=lambda text: digest(phrasing_key(text)))
        count = max(1, sum(is_held_out(phrasing_key(text), share) for text in texts))
        aside = {phrasing_key(text) for text in texts[:count]}
        self.held_out_keys = frozenset(aside | {phrasing_key(text) for group in new for text in group})
        self._groups = {
            Split.TRAINING: _without_empty(
                [[text for text in group if phrasing_key(text) not in self.held_out_keys] for group in groups]
            ),
            Split.HELD_OUT: _without_empty(
                [[text for text in group if phrasing_key(text) in aside] for group in groups]
            ),
        }
        known = {phrasing_key(text) for text in texts}
        self._groups[Split.UNSEEN] = _without_empty(
            [[text for text in group if phrasing_key(text) not in known] for group in new]
        )
        if not self._groups[Split.TRAINING]:
            raise ValueError(f"No phrasing is left for training: {patterns}.")

    def of(self, split: Split) -> list[str]:
        return [text for group in self._groups[split] for text in group]

    def pick(self, rng: random.Random, split: Split) -> str:
        """One of the texts, each pattern as often as the others. In training it is sometimes said carelessly.

        NothingUnseen where no pattern was spared from training and one is asked for.
        """
        if not self._groups[split]:
            raise NothingUnseen
        text = rng.choice(rng.choice(self._groups[split]))
        if split is not Split.TRAINING or rng.random() < 0.65:
            return text
        careless = say_carelessly(rng, text)
        return text if phrasing_key(careless) in self.held_out_keys else careless


def _without_empty(groups: Sequence[list[str]]) -> list[list[str]]:
    return [group for group in groups if group]


_GLUE = frozenset("a an the is are me of please can you do does to for it that".split())
_FILLERS = (
    *(
        "please",
        "now",
        "just",
        "really",
        "exactly",
        "then",
        "actually",
        "maybe",
        "so",
        "well",
        "quickly",
        "first",
        "next",
        "again",
    ),
    *("kindly", "simply", "today", "here", "there", "also", "perhaps", "today", "once", "still", "only", "even"),
)


def say_carelessly(rng: random.Random, text: str) -> str:
    """A small word dropped, or a filler put in, where no meaning depends on it; so that single words matter less."""
    words = text.split(" ")
    dropped = [index for index, word in enumerate(words) if index > 0 and word in _GLUE]
    if dropped and rng.random() < 0.5:
        del words[rng.choice(dropped)]
    else:
        places = [index for index in range(1, len(words)) if "{" not in words[index - 1] + words[index]]
        if not places:
            return text
        words.insert(rng.choice(places), rng.choice(_FILLERS))
    return " ".join(words)
