"""Short lists: sort words or numbers, count what is in a list, count from one number to another."""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.letters import count_letters
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import NOUNS, pick_number

SORT_WORDS = Phrasings(
    "[Alphabetically sorted|Sorted from a to z|In alphabetical order|Sorted alphabetically|In order], [what do|how"
    " do] {l} look[| like]?",
    "[Could you|Can you|Please|Will you|I want you to] put {l} [into|in] [ABC order|alphabetical order|the right"
    " order|order|a-to-z order][?|.|, please.]",
    "[I need|I want|I would like|Give me|Show me|Let me see] [these|the following|those|them] [in alphabetical order"
    "|sorted|from a to z|in order|sorted alphabetically]: {l}",
    "[Line up|Rank|List|Arrange|Organize|Write down|Lay out|Give me] [these|the following|the|my] words [from a to z"
    "|alphabetically|in alphabetical order|by first letter|in ABC order][:|,] {l}",
    "[What order|In what order|In which order] [should|would|do] [the words |the following words |] {l} [go|come"
    "|stand|be][| alphabetically| in a dictionary| by the alphabet]?",
    "[Which|What] of [these|the words] comes first, second and so on[:|?] {l}",
    "{l}[:|.] [Sort them|Sort these|Put them in order|Put these in alphabetical order|Order them alphabetically"
    "|Alphabetical order|Sort this list|From a to z][.|, please.]",
    "[Here are some words|I have these words|These are my words|My list][:|] {l}. [Sort them|Please sort them|Put"
    " them in order|In alphabetical order, please|Sort them alphabetically][.|]",
    "[Help me|Can you help me|Please help me] [sort|to sort|order|to alphabetize] [|these words: |the words ]{l}[.|?]",
    "[Alphabetical sorting of|Alphabetize for me|Sorting task|Sort list|words to sort|To be sorted][:|] {l}",
    "[How would|How does] a dictionary [order|sort|list|arrange] {l}?",
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
    "[From smallest to biggest|From small to big|From low to high|In rising order|By size|Smallest first|Lowest"
    " first|Ascending|In ascending order][:|,] {l}",
    "[Rank|Please rank|Line up|List|Arrange|Organize|Write down|Lay out|Give me] [|the numbers |these numbers |the"
    " following numbers ]{l} [from low to high|from smallest to biggest|by size|in ascending order|from small to"
    " large|smallest first][.|, please.]",
    "[Arrange|Order|Sort|Rank|Line up] [by size|by value|from low to high|ascending|upwards|smallest first]: {l}",
    "[Which|What] is the [order|ascending order|right order] of [the numbers |]{l}[?| by size?]",
    "{l}[:|.] [Sort them|Sort these numbers|Put them in order|Order them by size|Smallest first|Sort these by size"
    "|From low to high][.|, please.]",
    "[Here are some numbers|I have these numbers|These are my numbers|My numbers][:|] {l}. [Sort them|Please sort"
    " them|Put them in order|Smallest first, please|Sort them by size][.|]",
    "[Could you|Can you|Please|Will you] put {l} [into|in] [ascending order|rising order|the right order|order|order"
    " of size][?|.|, please.]",
    "[I need|I want|I would like|Give me|Show me] [these|the following|those|the] numbers [sorted|in order|from low"
    " to high|in ascending order|by size]: {l}",
    "[Help me|Can you help me|Please help me] [sort|to sort|order|rank] [|the numbers |these numbers: ]{l}[.|?]",
    "[In what order|In which order|How] [should|would|do] [the numbers |]{l} [go|come|stand|be][| by size| from low"
    " to high]?",
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
    "[Here is|This is|I have|Look at] [a list|my list|this list|some words][:|] {l}. [How many words is that|How"
    " many words are there|How many words are in it|How many words do you count|Count them|Count the words][?|.]",
    "{l}[:|.] [How many words is that|How many words are these|How many words|Count these words|Count the words|What"
    " is the number of words][?|.]",
    "[How many words|How many items|How many things] does [this|my|the|the following] list [have|contain|hold][:|?]"
    " {l}",
    "[Number of words|Word count|The word count][:| in| of] {l}",
    "[What's|What is|Give me] the word count of [|this list: |the list ]{l}[?|.]",
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
    "[Go|Walk|Run|Move] from {a} to {b}[,| in steps of one,|] [one number at a time|number by number|one by one"
    "|counting up][.|, please.]",
    "[Please |Now |]do a count [beginning|starting] [at|with|from] {a} and [ending|stopping] [at|with] {b}[.|]",
    "[The|All|Every|Each of the] numbers [between|from] {a} [and|to] {b}[, both included|, please|, in order|][.|]",
    "[Recite|Enumerate|Print|Type|Read out|Call out] [|all |the |all the ]numbers from {a} [to|until|up to] {b}[.|,"
    " please.]",
    "[Can you|Could you|Will you|I want you to|Let me hear you|Help me] count [|up ]from {a} [to|up to|until"
    "|through] {b}[?|.]",
    "[Which|What] numbers [come|lie|are there|do I say] from {a} [to|up to|until] {b}?",
    "[With|At|From] {a} [as the start|as the first number] and {b} [as the end|as the last], count[ up|][.|, please.]",
    "{a} to {b}[:|,] [count|count it|count up|count them|one by one|all the numbers][.|, please.]",
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
