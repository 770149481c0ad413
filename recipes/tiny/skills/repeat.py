"""Saying after the user what the user says."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import lower_start
from recipes.tiny.words import ANIMALS, COLORS, NOUNS, OTHER_WORDS, invent_word, pick_city, pick_name, pick_number

REPEAT = Phrasings(
    "[Repeat|Say|Echo|Copy|Write|Please repeat|Please say|Can you repeat|Can you say|Now repeat|Now say] [this"
    "|after me|the following|exactly this|this text|this again|what I say|these words|this for me|word for"
    " word]: {t}",
    "[Repeat|Say|Echo|Copy|Please repeat|Can you repeat|Can you say] [this|after me|the following|what"
    " follows][?|!] {t}",
    "[Repeat|Echo|Please repeat|Copy|Repeat exactly|Say again]: {t}",
    "[I want you to|You should|Now you should|You must|Will you] [repeat|say|echo|copy] [this|the following"
    "|after me|these words]: {t}",
)


def repeat(rng: random.Random, split: Split) -> Exchange:
    text = draw_operands(rng, split, _text, lambda text: f"repeat {text}")
    phrasing = REPEAT.pick(rng, split)
    opening = lower_start(phrasing) if rng.random() < 0.15 else phrasing
    # A word without a capital is only sure to be copied from quotes, but people leave them out.
    bare = text[0].isupper() or (split is Split.TRAINING and rng.random() < 0.3)
    shown = text if bare and rng.random() < 0.7 else f'"{text}"'
    return ask("repeat", opening.format(t=shown), text, phrasing, text)


def _text(rng: random.Random) -> str:
    """A sentence with a capital, or words, names and numbers without sense."""
    if rng.random() < 0.5:
        return rng.choice(_SENTENCES)(rng)
    if rng.random() < 0.25:
        return (
            rng.choice(_SENTENCES)(rng)
            .rstrip("!.")
            .replace("The ", "the ")
            .replace("My ", "my ")
            .replace("We ", "we ")
            .replace("Hello", "hello")
        )
    return " ".join(_part(rng) for _ in range(rng.randint(1, 6)))


def _part(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(NOUNS)
    if chance < 0.6:
        return rng.choice(OTHER_WORDS)
    if chance < 0.75:
        return invent_word(rng)
    return pick_name(rng) if chance < 0.87 else str(pick_number(rng))


_SENTENCES = (
    lambda rng: f"The {rng.choice(COLORS)} {rng.choice(ANIMALS)} likes the {rng.choice(NOUNS)}.",
    lambda rng: f"My {rng.choice(NOUNS)} is {rng.choice(OTHER_WORDS)}.",
    lambda rng: f"{pick_name(rng)} lives in {pick_city(rng)}.",
    lambda rng: f"I have {pick_number(rng, 2)} {rng.choice(COLORS)} {rng.choice(NOUNS)}s.",
    lambda rng: f"The {rng.choice(NOUNS)} and the {rng.choice(NOUNS)} are {rng.choice(OTHER_WORDS)}!",
    lambda rng: f"Hello, {pick_name(rng)}.",
    lambda rng: f"We saw a {rng.choice(ANIMALS)} near the {rng.choice(NOUNS)} in {pick_city(rng)}.",
    lambda rng: (
        f"{pick_name(rng)} and {pick_name(rng)} {rng.choice(('sing', 'dance', 'read', 'walk', 'sleep'))} today."
    ),
)
