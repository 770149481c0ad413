"""Words taken letter by letter: spell, reverse, count. Words stand in quotes, where the tokenizer shows every letter.

Training has words without quotes too, a quarter of them, because people write so; the evaluation promises only what is quoted.
"""

from __future__ import annotations

import random

from recipes.tiny.chat import Exchange, ask
from recipes.tiny.holdout import Phrasings, Split, draw_operands
from recipes.tiny.skills.wording import dress
from recipes.tiny.words import SHORT_WORDS, invent_word

SPELL = Phrasings(
    "[Spell|Spell out|Please spell|Can you spell|Could you spell|Now spell|Let me hear you spell] [|the word"
    " ]{w}[.|?| for me.| letter by letter.]",
    "How [do you|do I|would you|can I|does one|should I|do we] spell [|the word ]{w}?",
    "How is [|the word ]{w} [spelled|spelt|written letter by letter]?",
    "[Give me|Tell me|What is|What's|Show me|I need] the spelling of [|the word ]{w}[?|.]",
    "[Say|Write|Read|Give me|Tell me|Show me] [|the word ]{w} letter by letter[.|, please.]",
    "[What are|Tell me|Give me|List|Show me|Name] [|all ]the letters [of|in] [|the word ]{w}[?|.]",
    "[Show me|Tell me|I want to know|Do you know|Teach me] how to spell [|the word ]{w}[.|?]",
)
REVERSE = Phrasings(
    "[Reverse|Please reverse|Can you reverse|Could you reverse|Now reverse] [|the word |the letters of |the"
    " letters in |the string ]{w}[.|?| for me.]",
    "[Write|Say|Spell|Read|Give me|Show me|Tell me|Print|Please write|Can you write|Can you say] [|the word ]{w}"
    " [backwards|in reverse|backward|from the end|in reverse order|from back to front][.|?]",
    "[What is|What's|What would be|How do you write|How do I write|How do you say|How would you write|What does"
    " one get for] [|the word ]{w} [backwards|in reverse|backward|reversed|in reverse order]?",
    "[What is|Give me|Tell me|Show me|Write|I need] the [reverse|reversal] of [|the word ]{w}[?|.]",
    "[Turn|Flip|Please turn] [|the word |the letters of ]{w} [around|backwards|over][.|, please.]",
)
COUNT_LETTERS = Phrasings(
    "How many letters [are in|are there in|does one find in|do you see in|do you count in] [|the word ]{w}?",
    "How many letters [does {w} have|does the word {w} have|has {w}|has the word {w}|does {w} contain|does the"
    " word {w} contain]?",
    "[Count|Please count|Can you count|Could you count|Now count] the letters [in|of] [|the word ]{w}[.|?| for me.]",
    "[What is|Give me|Tell me|Find|I need|Say] the number of letters [in|of] [|the word ]{w}[?|.]",
    "[Tell me|Say|Do you know|I want to know] how many letters [|the word ]{w} has[.|?]",
    "How long is [|the word ]{w}[?|, in letters?]",
)
COUNT_LETTER = Phrasings(
    "How [many times|often] [does|do you see|can I find] [|the letter ]{c} [appear |occur |come up |]in [|the"
    " word ]{w}?",
    "How [many times|often] is [|the letter ]{c} in [|the word ]{w}?",
    "[Count|Please count|Can you count|Now count] [how often |how many times |]the letter {c} [in|appears in"
    "|occurs in|is in] [|the word ]{w}[.|?]",
    "[Tell me|Say|Do you know|I want to know] how [many times|often] [|the letter ]{c} [is|appears|occurs] in ["
    "|the word ]{w}[.|?]",
    "How many {c}[|s|'s] [are|are there|do you see|do you find|can I find|do you count] in [|the word ]{w}?",
    "[What is|Give me] the [number|count] of the letter {c} in [|the word ]{w}[?|.]",
)


def _word(rng: random.Random) -> str:
    return rng.choice(SHORT_WORDS) if rng.random() < 0.5 else invent_word(rng)


def _held_out_key(word: str) -> str:
    return f"letters {word}"


def _quoted(rng: random.Random, word: str, split: Split) -> str:
    chance = rng.random()
    if split is Split.TRAINING and chance < 0.25:
        return word
    return f"'{word}'" if chance < 0.35 else f'"{word}"'


def _draw_word(rng: random.Random, split: Split) -> str:
    return draw_operands(rng, split, _word, _held_out_key, share=0.05)


def spell(rng: random.Random, split: Split) -> Exchange:
    word, phrasing = _draw_word(rng, split), SPELL.pick(rng, split)
    return ask("spell", dress(rng, phrasing.format(w=_quoted(rng, word, split))), "-".join(word), phrasing, word)


def reverse(rng: random.Random, split: Split) -> Exchange:
    word, phrasing = _draw_word(rng, split), REVERSE.pick(rng, split)
    return ask("reverse", dress(rng, phrasing.format(w=_quoted(rng, word, split))), word[::-1], phrasing, word)


def count_letters(rng: random.Random, split: Split) -> Exchange:
    word = _draw_word(rng, split)
    if rng.random() < 0.5:
        phrasing = COUNT_LETTERS.pick(rng, split)
        question = phrasing.format(w=_quoted(rng, word, split))
        answer = f'"{word}" has {len(word)} letters.'
    else:
        phrasing = COUNT_LETTER.pick(rng, split)
        letter = rng.choice(word if rng.random() < 0.85 else "aeiourst")
        question = phrasing.format(c=_quoted(rng, letter, split), w=_quoted(rng, word, split))
        times = word.count(letter)
        answer = f'"{letter}" appears {times} time{"" if times == 1 else "s"} in "{word}".'
    return ask("count", dress(rng, question), answer, phrasing, word)
