"""Everything else: the model says that it does not know.

Training asks after anything that a template grammar can put together, sense or nonsense, and after what lies just outside the other
skills. The evaluation asks what people ask: out_of_scope.txt, written by hand, which training must not contain.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Split
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import ANIMALS, CITIES, COLORS, FOODS, JOBS, NAMES, NOUNS, OTHER_WORDS, invent_name, invent_word

UNKNOWN = "I do not know that. I am a very small model and can only do a few simple things."
CHINESE_UNKNOWN = "这个我不知道。我是一个很小的模型。"

_HERE = Path(__file__).parent
_SLOT = re.compile(r"\{(\w+)\}")


@cache
def out_of_scope_prompts() -> tuple[str, ...]:
    """The evaluation's prompts."""
    lines = (_HERE.parent / "out_of_scope.txt").read_text("utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


@cache
def _grammar() -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    table = tomllib.loads((_HERE / "unknown.toml").read_text("utf-8"))
    lists = {name: tuple(part.strip() for part in text.split("|")) for name, text in table["lists"].items()}
    return tuple(table["templates"]), lists


@cache
def _normalised_prompts() -> frozenset[str]:
    return frozenset(map(normalise, out_of_scope_prompts()))


def normalise(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()


def unknown(rng: random.Random, split: Split) -> Exchange:
    if split is not Split.TRAINING:
        prompt = rng.choice(out_of_scope_prompts())
        return ask("unknown", prompt, UNKNOWN, prompt)
    while True:
        prompt, answer = _draw(rng)
        if normalise(prompt) not in _normalised_prompts():
            return ask("unknown", dress(rng, prompt), answer, "grammar")


def _draw(rng: random.Random) -> tuple[str, str]:
    chance = rng.random()
    if chance < 0.66:
        return _from_grammar(rng), UNKNOWN
    if chance < 0.78:
        return _nonsense(rng), UNKNOWN
    if chance < 0.96:
        return rng.choice(_NEAR)(rng), UNKNOWN
    return rng.choice(_CHINESE).format(rng.choice(_CHINESE_THINGS)), CHINESE_UNKNOWN


def _from_grammar(rng: random.Random) -> str:
    templates, _ = _grammar()
    text = _fill(rng, rng.choice(templates))
    return text[0].upper() + text[1:]


def _fill(rng: random.Random, template: str) -> str:
    return _SLOT.sub(lambda slot: _fill(rng, _choice(rng, slot[1])), template)


def _choice(rng: random.Random, name: str) -> str:
    if rng.random() < 0.06:  # so that the frame matters more than what fills it
        return invent_word(rng) if rng.random() < 0.5 else rng.choice(OTHER_WORDS)
    _, lists = _grammar()
    make = _OPEN.get(name)
    return make(rng) if make else rng.choice(lists[name])


def _number(rng: random.Random, least: int, most: int) -> str:
    return str(rng.randint(least, most))


_OPEN: dict[str, Callable[[random.Random], str]] = {
    "noun": lambda rng: rng.choice(NOUNS),
    "word": lambda rng: rng.choice(OTHER_WORDS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "food": lambda rng: rng.choice(FOODS),
    "color": lambda rng: rng.choice(COLORS),
    "job": lambda rng: rng.choice(JOBS),
    "city": lambda rng: rng.choice(CITIES),
    "name": lambda rng: f"{rng.choice(NAMES)} {invent_name(rng)}" if rng.random() < 0.6 else invent_name(rng),
    "thing": lambda rng: (
        invent_name(rng) if rng.random() < 0.5 else f"the {rng.choice(OTHER_WORDS)} {rng.choice(NOUNS)}"
    ),
    "year": lambda rng: _number(rng, 1000, 2030),
    "number": lambda rng: _number(rng, 2, 200),
}


def _nonsense(rng: random.Random) -> str:
    """Words in no order. Nothing that it says is asked elsewhere."""
    starts = (
        "What Who Where Why When How Which Is Are Do Does Did Can Could Should Would Will Give Make Find Explain Describe"
        " Show The"
    ).split()
    glue = "the a an of to in on for with and or is are do does my your this that it you we they have be".split()
    pools: Sequence[Sequence[str]] = (glue, glue, NOUNS, OTHER_WORDS, ANIMALS)
    words = [
        rng.choice(rng.choice(pools)) if rng.random() < 0.85 else invent_word(rng) for _ in range(rng.randint(2, 9))
    ]
    return f"{rng.choice(starts)} {' '.join(words)}{rng.choice('???.!')}"


def _product(rng: random.Random) -> str:
    a, b = _number(rng, 0, 999), _number(rng, 0, 999)
    form = rng.choice(
        (
            "What is {a} times {b}?", "What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "{a} / {b}", "What is {a} divided by {b}?",
            "What is {a} / {b}?", "How much is {a} times {b}?", "What is {a} modulo {b}?", "Multiply {a} by {b}, please.",
            "What is {a} percent of {b}?", "What is the square root of {b}?", "What is {a} to the power of {b}?", "{a}^{b}",
            "Is {a} a divisor of {b}?", "What is the average of {a} and {b}?", "Is {a} even?", "What is {a} squared?",
            "What is the greatest common divisor of {a} and {b}?", "Write {a} in binary.", "Round {a}.{b} to one digit.",
            "What is the logarithm of {a}?", "Give me the factors of {a}.", "Solve {a} = {b} x.", "What is a third of {a}?",
            "Double {a}.", "Which is larger, {a}.{b} or {b}.{a}?", "{a}.{b} or {a}.9?", "Is {a}.{b} larger than {a}?",
            "Compare {a}0000 and {b}0000.", "Convert {a} miles to meters.", "How many ounces are {a} grams?", "What is {a}! ?",
        )
    )  # fmt: skip
    return form.format(a=a, b=b)


def _too_large(rng: random.Random) -> str:
    a, b = _number(rng, 1000, 10 ** rng.randint(4, 7)), _number(rng, 0, 10 ** rng.randint(1, 6))
    if rng.random() < 0.5:
        a, b = b, a
    form = rng.choice(
        (
            "What is {a} + {b}?",
            "{a} + {b}",
            "{a} - {b}",
            "What is {a} - {b}?",
            "Add {a} and {b}.",
            "How much is {a} plus {b}?",
        )
    )
    return form.format(a=a, b=b)


def _nearly_a_skill(rng: random.Random) -> str:
    """Frames of the other skills around what those cannot do."""
    form = rng.choice(
        (
            "Sort my {noun} collection.", "Sort a linked list.", "How do I sort {noun}s in {language}?",
            "Reverse the {noun} in the {noun}.",
            "How do I reverse a string in {language}?", "Count the {noun}s in the {noun}.", "How many {noun}s are in a {noun}?",
            "How many {noun}s does a {animal} have?", "How many {noun}s are in {city}?", "How many legs does the {animal} have?",
            "Compare a {noun} with a {noun}.", "Compare {city} and {city}.", "Which is better, the {noun} or the {noun}?",
            "Which is larger, a {animal} or a {animal}?", "Is a {animal} larger than a {animal}?", "Which {noun} is the largest?",
            "What comes after the {noun}?", "Which {noun} comes before the {noun}?", "What is the name of the {noun}?",
            "What is the name of the king of {city}?", "Which number is on the {noun}?", "What day is it?", "What is the date today?",
            "Which month is the best for {city}?", "How many days until Christmas?", "On what day was {name} born?",
            "What is my weight?", "What is my mother's name?", "When is my birthday?", "What did I eat today?", "Where is my {noun}?",
            "What is the color of my {noun}?", "How old is my {animal}?", "Who is my teacher?", "Do you know my brother?",
            "What is your favorite {noun}?", "What do you like?", "Do you like {food}?", "Are you a {animal}?", "Are you a {job}?",
            "Are you happy?", "Are you tired?", "Are you alive?", "Can you {word}?", "Can you {word} the {noun}?", "Do you {word}?",
            "Who made the {noun}?", "What is a {noun}?", "What is the {word} {noun}?", "What does the {noun} do?", "What does {word} mean?",
            "Explain the {noun}.", "Tell me about {city}.", "Tell me about the {animal}.", "Describe the {noun}.", "What is {thing}?",
            "Write a poem about the {noun}.", "Write a song about a {animal}.", "Write an email to {name}.", "Write a {noun}.",
            "Write {language} code for a {noun}.", "Write a program that can {word}.", "Write a book about {city}.", "Tell me a {noun}.",
            "Tell me the {noun} of {city}.", "Tell me something about {animal}s.", "Tell me why the {noun} is {color}.",
            "Give me the {noun}.", "Give me a {word} {noun}.", "Give me advice.", "Give me a tip for {city}.", "Show me the {noun}.",
            "Say something {word}.", "Say something in {tongue}.", "Spell check this essay.", "Translate {word} into {tongue}.",
            "Translate this: {noun}", "Remind me of the {noun}.", "Remember me?", "Read this {noun} for me.", "Turn the {noun} around.",
            "Turn on the {noun}.", "Put the {noun} on the {noun}.", "Take the {noun} away.", "Add salt to the {noun}.",
            "Add a {noun} to my list.",
            "How do I install a {noun}?", "How do I start a {noun}?", "How do I start a {word} business?", "How do I stop a {animal}?",
            "How do I use a {noun}?", "How do I run faster?", "How do I run a {noun}?", "Which {noun} do I need?", "Do I need a {noun}?",
            "What is the temperature in {city}?", "What is the temperature of the {noun}?", "What is the license of the {noun}?",
            "What is the port of {city}?", "How long is a {noun}?", "How long is the {noun} of {city}?", "How large is {city}?",
            "How big is a {animal}?", "How many people live in {city}?", "What language do they speak in {city}?", "Who lives in {city}?",
            "What is the weather in {city}?", "What time is it in {city}?", "Order a {noun}.", "Buy me a {noun}.", "Call {name}.",
            "Send a {noun} to {name}.", "Find a train to {city}.", "Set an alarm for {number}.", "What is the phone number of {name}?",
            "What is --{word}?", "What does /{word} do?", "What does the option --{word}-{noun} do?",
        )
    )  # fmt: skip
    return _fill(rng, form)


_NEAR = (_product, _too_large, _nearly_a_skill, _nearly_a_skill, _nearly_a_skill)
_CHINESE = (
    "{}是什么？",
    "{}在哪里？",
    "你喜欢{}吗？",
    "为什么{}这么贵？",
    "谁发明了{}？",
    "{}怎么做？",
    "请介绍一下{}。",
    "{}有多大？",
)
_CHINESE_THINGS = (
    "月亮",
    "北京",
    "上海",
    "面条",
    "电影",
    "足球",
    "历史",
    "火车",
    "大海",
    "苹果",
    "音乐",
    "数学",
    "法国",
    "长城",
    "天气",
    "电脑",
)
