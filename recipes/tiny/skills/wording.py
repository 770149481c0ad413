"""How people dress one question: a greeting before it, no capital, no full stop. Training and evaluation share these clothes."""

from __future__ import annotations

import random

_OPENINGS = (
    "Please tell me: ",
    "Hello! ",
    "Hi. ",
    "Hey, ",
    "Tell me, ",
    "Quick question: ",
    "One more thing: ",
    "Okay, ",
    "Can you help me? ",
    "And now: ",
)
_CLOSINGS = (" Thanks.", " Thank you!", " Please.", " Be brief.")


def dress(rng: random.Random, text: str) -> str:
    """The text, half of the time as it is. Its meaning stays, so it must not end in something to be copied."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.35:
        text = lower_start(text)
    if rng.random() < 0.3:
        text = text.rstrip("?.")
    elif rng.random() < 0.15 and text[-1] in "?.":
        text += rng.choice(_CLOSINGS)
    if rng.random() < 0.25:
        text = rng.choice(_OPENINGS) + text
    return text


def lower_start(text: str) -> str:
    """Without the capital, unless it belongs to the word."""
    word = text.split(" ", 1)[0]
    return text if word in ("I", "I'm") or not word[1:].islower() else text[0].lower() + text[1:]
