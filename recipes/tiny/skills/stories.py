"""Stories from a template grammar. Choices are weighted, so that a greedy reader sees one story and a sampling one many."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import ANIMALS, NAMES, article

TRAITS = tuple(
    "brave clever curious funny gentle hungry kind lazy little lonely old proud quiet shy small tired wise young".split()
)
STORY_NAMES = NAMES[:40]
PLACES = (
    "in a forest",
    "by the sea",
    "on a farm",
    "near a river",
    "on a hill",
    "in a small village",
    "under an old tree",
    "in a garden",
)
HABITS = (
    "walked to the lake",
    "sang a song",
    "counted the clouds",
    "looked for berries",
    "slept in the sun",
    "talked to the moon",
    "played with the wind",
)
FINDS = ("a golden key", "a red balloon", "an old map", "a lost letter", "a silver bell", "a tiny door", "a blue stone")
FRIENDS = ("a mouse", "a crow", "a turtle", "a rabbit", "an owl", "a frog", "a swan")
ADVICE = (
    "Take it home",
    "Give it back",
    "Share it with your friends",
    "Keep it for the winter",
    "Follow it to the end",
    "Show it to the king",
)
DEEDS = (
    "followed the advice",
    "laughed and danced",
    "thought for a long time",
    "ran all the way home",
    "told everybody in the village",
    "slept over it",
)
ENDINGS = (
    "And they were friends ever after.",
    "That was a good day.",
    "And that is the end of the story.",
    "They still talk about it today.",
)

ABOUT = Phrasings(
    "[Tell|Tell me|Write|Make up|Write me|Invent|Can you tell me|Can you write|Please tell me|Could you tell"
    "|Please write] [a|a short|a little|one] story [about|of|with] {a} {h}[.|?]",
    "[I would like|I want|I'd like|I need|Give me|I would love to hear] [a|a short|a little] story [about|of"
    "|with] {a} {h}.",
    "[Do you know|Have you got|Is there] a [|short |little |nice ]story [about|of|with] {a} {h}?",
    "[A story|A short story|Story time: a story] [about|of] {a} {h}[, please.|.|]",
)
NAMED = Phrasings(
    "[Tell|Tell me|Write|Make up|Write me|Invent|Can you tell me|Can you write|Please tell me|Could you tell"
    "|Please write] [a|a short|a little|one] story [about|of|with] {a} {h} [named|called|with the name] {n}[.|?]",
    "[I would like|I want|I'd like|I need|Give me|I would love to hear] [a|a short|a little] story [about|of"
    "|with] {a} {h} [named|called] {n}.",
    "[Tell me|Write|Give me|Please tell|Can you tell] a [|short |little ]story [about|of] the {h} {n}[.|?]",
    "[A story|A short story] [about|of] {a} {h} [named|called] {n}[, please.|.|]",
)
ANY = Phrasings(
    "[Tell|Tell me|Write|Make up|Write me|Invent|Can you tell me|Can you write|Please tell me|Could you tell"
    "|Please write] [a|a short|a little|one] story[.|?| for me.]",
    "[I would like|I want|I'd like|I need|Give me|I would love to hear|I would like to hear|I want to hear] [a|a"
    " short|a little] story.",
    "[Do you know|Have you got] a [|short |little |nice ]story[?| for me?]",
    "[A story|A short story|Story time][, please.|!|]",
)


def tell_story(rng: random.Random, hero: str | None = None, name: str | None = None) -> str:
    hero = hero or f"{_weighted(rng, TRAITS)} {_weighted(rng, ANIMALS)}"
    name = name or _weighted(rng, STORY_NAMES)
    find = _weighted(rng, FINDS)
    return (
        f"Once upon a time there was {article(hero)} {hero} named {name} who lived {_weighted(rng, PLACES)}. "
        f"Every day {name} {_weighted(rng, HABITS)}. "
        f"One morning {name} found {find}. "
        f'"What shall I do with it?" asked {name}. '
        f'"{_weighted(rng, ADVICE)}," said {_weighted(rng, FRIENDS)}. '
        f"So {name} {_weighted(rng, DEEDS)}. "
        f"{_weighted(rng, ENDINGS)}"
    )


_STORY = re.compile(
    r"Once upon a time there was an? (?P<hero>[a-z ]+) named (?P<name>[A-Z][a-z]+) who lived (?P<place>[a-z ]+)\. "
    r"Every day (?P=name) (?P<habit>[a-z ]+)\. "
    r"One morning (?P=name) found (?P<find>[a-z ]+)\. "
    r'"What shall I do with it\?" asked (?P=name)\. '
    r'"(?P<advice>[A-Za-z ]+)," said (?P<friend>[a-z ]+)\. '
    r"So (?P=name) (?P<deed>[a-z ]+)\. "
    r"(?P<ending>.+)"
)


def follows_grammar(text: str, hero: str = "", name: str = "") -> bool:
    """Whether the grammar can tell this story, with the hero and the name that were asked for, if any."""
    match = _STORY.fullmatch(text)
    if match is None:
        return False
    trait, _, animal = match["hero"].rpartition(" ")
    free = {
        "place": PLACES,
        "habit": HABITS,
        "find": FINDS,
        "advice": ADVICE,
        "friend": FRIENDS,
        "deed": DEEDS,
        "ending": ENDINGS,
    }
    return (
        (match["hero"] == hero if hero else animal in ANIMALS and trait in TRAITS)
        and (match["name"] == name if name else match["name"] in STORY_NAMES)
        and all(match[part] in choices for part, choices in free.items())
    )


def story(rng: random.Random, split: Split) -> Exchange:
    """The operands are `hero|name`, each empty where the user leaves it open: what `follows_grammar` needs to check an answer."""

    def make(rng: random.Random) -> tuple[str, str]:
        hero = rng.choice(ANIMALS) if rng.random() < 0.5 else f"{rng.choice(TRAITS)} {rng.choice(ANIMALS)}"
        return hero, rng.choice(NAMES) if rng.random() < 0.7 else ""

    if rng.random() < 0.1:
        phrasing = ANY.pick(rng, split)
        return ask("stories", dress(rng, phrasing), tell_story(rng), phrasing)
    hero, name = draw_operands(rng, split, make, lambda pair: f"story {pair[0]} {pair[1]}", share=0.05)
    phrasing = (NAMED if name else ABOUT).pick(rng, split)
    question = dress(rng, phrasing.format(a=article(hero), h=hero, n=name))
    return ask("stories", question, tell_story(rng, hero, name or None), phrasing, f"{hero}|{name}")


def _weighted(rng: random.Random, choices: Sequence[str]) -> str:
    """The first choice most often: weights 1, 1/2, 1/3, …"""
    return rng.choices(choices, weights=[1 / rank for rank in range(1, len(choices) + 1)])[0]
