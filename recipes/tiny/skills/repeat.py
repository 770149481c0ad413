"""Saying after the user what the user says."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import lower_start
from recipes.tiny.words import ANIMALS, COLORS, NOUNS, OTHER_WORDS, invent_word, pick_city, pick_name, pick_number

REPEAT = Phrasings(
    "[Parrot|Mimic|Recite|Duplicate|Restate|Mirror|Quote|Reproduce|Type|Print|Output] [this|the following|this"
    " sentence|this text|these words|exactly this|after me|the next words|this line]: {t}",
    "[Say|Speak|Give|Read|Play|Send] [|this |these words |the following |that ]back to me: {t}",
    "[Please |Now |Just |Simply |][write|say|type|print|answer|reply] [exactly|only|nothing but|precisely|with"
    " exactly]: {t}",
    "[Repeat|Copy|Echo|Say] what [comes next|I say now|I say next|follows|stands here|is written here][:|.] {t}",
    "[I say it, you say it|I talk, you repeat|Say what I say|You repeat, I begin|Do as I do|Say it like me|My words,"
    " and you say them too]: {t}",
    "[Type|Write|Print|Copy] the following [text|words|sentence|line][:|] {t}",
    "[Just |Simply |Please |][echo|repeat|copy|say] back[:|] {t}",
    "[Can|Could|Would|Will] you [copy|repeat|echo|say|type|write] [this|this sentence|these words|this text|the"
    " following][| for me| once more| again]?[:|] {t}",
    "[Your task|Your job|The task|What to do]: [repeat|say|echo|copy] [this|the text|these words|what follows]: {t}",
    "[Answer|Reply|Respond] with [this|these words|the text|this sentence|the following][:| only:] {t}",
    "[Here is a text|Here is a sentence|This is the text|The text is][:|,] {t} [Repeat it|Say it again|Copy it|Say"
    " it back to me|Echo it][.|, please.]",
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
