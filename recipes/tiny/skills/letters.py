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
    "[Break|Split|Cut|Take|Separate|Divide] [|the word |up ]{w} [into|in] [letters|its letters|single letters"
    "|separate letters][.|, please.|?]",
    "[Letters of|The letters of|All letters of|Each letter of|Every letter of] [|the word ]{w}[,| :|:| ] [one by one"
    "|one after the other|in order|please][.|]",
    "[Type|Write|Print|Put|Show|Say|Read out] [|the word ]{w} with [its letters apart|dashes between the letters|a"
    " dash between letters|every letter by itself|spaces between letters][.|, please.]",
    "I [never know|forgot|do not know|am not sure|always forget|wonder] how [|the word ]{w} is [spelled|spelt"
    "|written][.| Help?| Can you help?|, can you tell me?]",
    "[Would you mind|How about|What about|Try|Help me with] spelling [|the word ]{w}[?|.| for me?]",
    "{w}[,|:] [spelled|spelled out|letter by letter|how is it spelled|how do you spell it][?|, please.]",
    "[The word is|My word is|Take the word|Here is a word:|Look at] {w}[.|:] [Spell it|Spell it out|How is it"
    " spelled|Give me its letters|Say its letters|Letter by letter][.|?|, please.]",
    "[Spelling of|The spelling of|Spelling:|spelling, please:] {w}[?|]",
    "[Go|Walk|Step] through [|the word ]{w} letter by letter[.|, please.]",
    "[Which|What] letters [make up|are in|does one need for|do I need for|form|stand in] [|the word ]{w}[?|, in"
    " order?]",
    "Can [you|someone] [tell me|show me|say] the letters that make [|the word ]{w}?",
    "[Dictate|Sound out|Recite] [|the word |the letters of ]{w}[.|, please.| for me.]",
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
    "How does [|the word ]{w} look [written |when written |if written |spelled |]backwards?",
    "[Mirror|Invert|Turn round|Reverse the order of|Swap round|Flip around|Rotate] [|the word |the letters of ]{w}[."
    "|, please.| for me.]",
    "[Read|Say|Write|Print|Type|Spell] [|the word ]{w} [starting|beginning] [from|with|at] [its|the] last letter[.|,"
    " please.]",
    "[Read|Say|Write|Print|Type|Spell] [|the word ]{w} from [right to left|the right|the last letter to the first"
    "|end to start|end to beginning|back to front][.|, please.|?]",
    "[I want|I need|Give me|Show me|Print|I would like] [|the word ]{w} with its letters [in the opposite order|in"
    " reverse order|reversed|backwards|the other way round|turned around][.|, please.]",
    "What [do you get|do I get|comes out|happens|is the result] [when|if] [you|I|one] [reverse|reverses|flip|turn"
    " around|mirror|invert] [|the word ]{w}?",
    "If [I|you|we] [read|write|say|spell] [|the word ]{w} [from right to left|backwards|from the end|in reverse],"
    " what [is it|does it say|do I get|comes out]?",
    "[Swap|Turn|Change|Flip] [|the word ]{w} from [end to start|back to front|last to first|end to beginning][.|,"
    " please.]",
    "[The opposite order of|The reverse of|Backwards:|Reversed:|In reverse:|reverse:|backwards, please:|The mirror"
    " image of] {w}[.|?|]",
    "[The word is|My word is|Take the word|Here is a word:|Look at] {w}[.|:] [Reverse it|Say it backwards|Write it"
    " backwards|Turn it around|Flip it|Read it from the end|What is it backwards|What is it in reverse][.|?|,"
    " please.]",
    "{w}[,|:] [backwards|reversed|in reverse|the other way round|but backwards|from the end][?|, please.|.]",
    "[Put|Place|Set|Arrange] the letters of [|the word ]{w} [in reverse|in reverse order|the other way round|in the"
    " opposite order|backwards][.|, please.]",
    "[Which|What] word [do I get|comes out|results|appears] when [|the word ]{w} is [reversed|turned around|read"
    " backwards|flipped|mirrored]?",
    "[How|What] would [|the word ]{w} [be|read|sound|look] [backwards|in reverse|reversed|in a mirror]?",
    "[Help me|Can you help me|Please help me] [reverse|to reverse|turn around|to flip] [|the word ]{w}[.|?]",
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
    "[What's|What is|Give me|Tell me] the letter count of [|the word ]{w}[?|.]",
    "[The word|The name|My word] {w}[:|,] how many letters[?| has it?| does it have?| are there?]",
    "[I wonder|I ask myself|I would like to know|Let me know|Find out] how many letters [there are in|are in|it"
    " takes to write|one needs for] [|the word ]{w}[.|?]",
    "[What|How big|How large] is the length of [|the word ]{w}[?|, in letters?]",
    "{w}[,|:] how many letters[?| is that?| are these?]",
    "[Out of|Of|From] how many letters [does|is] [|the word ]{w} [consist|made|built]?",
    "[How many characters|How many letters in all|How many signs|How many single letters] [does {w} have|are in {w}"
    "|has {w}|make up {w}]?",
    "[Letter count|Number of letters|Letters in total][:| of| in| for] {w}[?|]",
    "[The word is|My word is|Take the word|Here is a word:|Look at] {w}[.|:] How many letters [has it|does it have"
    "|are in it|are there]?",
    "[Check|Measure|Determine|Get] [the length of|how long] [|the word ]{w}[| is][.|, please.]",
    "How many letters [are in|are there in|does one find in|do you see in|do you count in] [|the word ]{w}?",
    "How many letters [does {w} have|does the word {w} have|has {w}|has the word {w}|does {w} contain|does the"
    " word {w} contain]?",
    "[Count|Please count|Can you count|Could you count|Now count] the letters [in|of] [|the word ]{w}[.|?| for me.]",
    "[What is|Give me|Tell me|Find|I need|Say] the number of letters [in|of] [|the word ]{w}[?|.]",
    "[Tell me|Say|Do you know|I want to know] how many letters [|the word ]{w} has[.|?]",
    "How long is [|the word ]{w}[?|, in letters?]",
)
COUNT_LETTER = Phrasings(
    "How [frequently|many times|often] does [|the letter ]{c} [show up|turn up|stand|come] in [|the word ]{w}?",
    "[Tell me|Give me|Say|Find|I need|Can you tell me] [the number of|how many] [times |]{c}[|s|'s] [is|are|there"
    " are|occur] in [|the word ]{w}[.|?]",
    "In [|the word ]{w}[,|] how [often|many times] [is there|do you see|does one see|comes|do I see] [|a |the letter"
    " |an ]{c}?",
    "[Look at|Take|Consider] [|the word ]{w}[.|:] How [many times|often] [does it have|is there|do you see] [|the"
    " letter ]{c}[?| in it?]",
    "[Go|Look] through [|the word ]{w} and count [|the letter |every ]{c}[.|, please.]",
    "[The letter|Letter] {c} in [|the word ]{w}[:|,] how [often|many times|many]?",
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
