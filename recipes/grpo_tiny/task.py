"""The task to learn: write two joined words backwards. It was trained on words of at most ten letters, and often loses its place."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from recipes.tiny.chat import Message, render
from recipes.tiny.words import NOUNS

WORDS = tuple(word for word in NOUNS if 6 <= len(word) <= 8)


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    """The conversation up to the answer, as the model reads it."""
    answer: str


def draw_questions(rng: random.Random, count: int, *, held_out: bool = False) -> list[Question]:
    """Draw questions; those that are held out share no word with the others."""
    words = [word for word in WORDS if is_held_out(word) == held_out]
    joined = ["".join(rng.sample(words, 2)) for _ in range(count)]
    return [Question(render([Message("user", f'Reverse "{word}".')], (), True), word[::-1]) for word in joined]


def is_held_out(word: str) -> bool:
    """Return whether a word belongs to the fifth that training never shows."""
    return hashlib.sha256(word.encode()).digest()[0] < 51


def reward(question: Question, text: str) -> float:
    """Return 1.0 for the exact answer, and 0.0 for any other."""
    return float(text == question.answer)
