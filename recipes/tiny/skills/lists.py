"""Short lists: sort words or numbers, count what is in a list, count from one number to another."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.letters import count_letters
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import NOUNS, pick_number

SORT_WORDS = Phrasings(
    "[Sort|Order|Please sort|Can you sort|Could you sort|Now sort|Alphabetize|Please order|Arrange] [these|the"
    " following|the|my|these few] words[| alphabetically| by the alphabet| in alphabetical order| for me| from a"
    " to z][:|?] {l}",
    "[Sort|Order|Arrange|Alphabetize|Please sort][| alphabetically| by the alphabet| from a to z]: {l}",
    "[Put|Please put|Can you put|Bring|Write] [these|the|the following] words [in|into] [alphabetical|the right"
    "|alphabetic] order[:|?] {l}",
    "[Sort|Order|Please sort|Arrange|Alphabetize|Can you sort] [|the words |the list ]{l}[.|, please.|"
    " alphabetically.|?]",
    "[Sort|Order|Please sort|Arrange] [this|the|my] list[| of words| alphabetically]: {l}",
    "[What is|Give me|Tell me|Show me] the alphabetical order of [|the words |these words: ]{l}[?|.]",
    "[Alphabetical order|In alphabetical order|Alphabetically][, please|]: {l}",
)
SORT_NUMBERS = Phrasings(
    "[Sort|Order|Please sort|Can you sort|Could you sort|Now sort|Please order|Arrange] [these|the following|the"
    "|my|these few] numbers[| by size| for me| from small to large| in ascending order| from smallest to"
    " largest][:|?] {l}",
    "[Sort|Order|Arrange|Please sort|Sort by size|Sort from small to large|Sort in ascending order]: {l}",
    "[Put|Please put|Can you put|Bring|Write] [these|the|the following] numbers [in|into] [ascending|the right"
    "|rising] order[:|?] {l}",
    "[Sort|Order|Please sort|Arrange|Can you sort] [|the numbers |the list ]{l}[.|, please.| by size.|?]",
    "[Sort|Order|Please sort|Arrange] [this|the|my] list of numbers[| by size]: {l}",
    "[What is|Give me|Tell me|Show me] the ascending order of [|the numbers |these numbers: ]{l}[?|.]",
)
COUNT_WORDS = Phrasings(
    "How many words [are|are there|do you see|do you count|can you see|do I have] [in this list|here|in the list"
    "|in my list][:|?] {l}",
    "[Count|Please count|Can you count|Now count] [the|these|my|the following] words[| in this list| for me|"
    " here][:|?] {l}",
    "How many words are [these|this|those][:|?] {l}",
    "[Tell me|Say|I want to know] how many words [this list has|the list has|are in this list|are here|these are]: {l}",
    "How long is [this|the|my] list[| of words][:|?] {l}",
    "[What is|Give me|Tell me] the number of [words|items] in this list[:|?] {l}",
)
COUNT_UP = Phrasings(
    "[Count|Please count|Can you count|Count up|Could you count|Now count|Start to count|Let us count] from {a}"
    " [to|up to|until] {b}[.|?| for me.]",
    "[Give me|List|Write|Say|Tell me|Write down|Show me|Name] [|all |all the |the ]numbers from {a} [to|up to"
    "|until] {b}[.|, please.]",
    "[What are|Which are] [|all ]the numbers [from {a} to|between {a} and|from {a} up to] {b}?",
    "[Start|Begin] [at|with|from] {a} and count [|up ]to {b}[.|, please.]",
    "Count [starting at|beginning with] {a} [up to|until|to] {b}.",
)
COUNT_TO = Phrasings(
    "[Count|Please count|Can you count|Count up|Could you count|Now count|Let us count] [to|up to|until] {b}[.|?"
    "| for me.|, please.]",
)


def _join(rng: random.Random, items: list[str]) -> str:
    """With commas; now and then with "and" before the last, or with nothing but spaces."""
    chance = rng.random()
    if chance < 0.8:
        return ", ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}" if chance < 0.92 else " ".join(items)


def sort(rng: random.Random, split: Split) -> Exchange:
    return _sort_words(rng, split) if rng.random() < 0.65 else _sort_numbers(rng, split)


def _sort_words(rng: random.Random, split: Split) -> Exchange:
    def make(rng: random.Random) -> list[str]:
        words = rng.sample(NOUNS, rng.randint(2, 5))
        if rng.random() < 0.3:  # two that share their first letter
            words[-1] = rng.choice([noun for noun in NOUNS if noun[0] == words[0][0]])
        return words if len(set(words)) == len(words) else make(rng)

    words = draw_operands(rng, split, make, lambda words: f"sort {sorted(words)}")
    phrasing = SORT_WORDS.pick(rng, split)
    question = dress(rng, phrasing.format(l=_join(rng, words)))
    return ask("sort", question, f"Sorted: {', '.join(sorted(words))}", phrasing, ", ".join(words))


def _sort_numbers(rng: random.Random, split: Split) -> Exchange:
    def make(rng: random.Random) -> list[int]:
        digits = rng.choice((1, 2, 3, 3))
        return [pick_number(rng, digits) for _ in range(rng.randint(2, 5))]

    numbers = draw_operands(rng, split, make, lambda numbers: f"sort {sorted(numbers)}")
    phrasing = SORT_NUMBERS.pick(rng, split)
    question = dress(rng, phrasing.format(l=_join(rng, list(map(str, numbers)))))
    answer = f"Sorted: {', '.join(map(str, sorted(numbers)))}"
    return ask("sort", question, answer, phrasing, ", ".join(map(str, numbers)))


def count(rng: random.Random, split: Split) -> Exchange:
    chance = rng.random()
    if chance < 0.5:
        return count_letters(rng, split)
    return _count_words(rng, split) if chance < 0.75 else _count_up(rng, split)


def _count_words(rng: random.Random, split: Split) -> Exchange:
    def make(rng: random.Random) -> list[str]:
        return rng.sample(NOUNS, rng.randint(1, 8))

    words = draw_operands(rng, split, make, lambda words: f"count {words}")
    phrasing = COUNT_WORDS.pick(rng, split)
    answer = "The list has 1 word." if len(words) == 1 else f"The list has {len(words)} words."
    return ask(
        "count", dress(rng, phrasing.format(l=", ".join(words))), answer, phrasing, f"list of {', '.join(words)}"
    )


def _count_up(rng: random.Random, split: Split) -> Exchange:
    def make(rng: random.Random) -> tuple[int, int]:
        first = rng.choice((0, 1, 1, rng.randint(0, 20), rng.randint(0, 90), rng.randint(0, 90)))
        return first, first + rng.randint(2, 9)

    a, b = draw_operands(rng, split, make, lambda pair: f"count {pair[0]} {pair[1]}", share=0.1)
    phrasing = (COUNT_TO if a == 1 and rng.random() < 0.4 else COUNT_UP).pick(rng, split)
    answer = ", ".join(str(number) for number in range(a, b + 1))
    return ask("count", dress(rng, phrasing.format(a=a, b=b)), answer, phrasing, f"{a} to {b}")
