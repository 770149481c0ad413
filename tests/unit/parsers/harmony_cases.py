"""Outputs in harmony, and how OpenAI's own library reads them.

    TIKTOKEN_ENCODINGS_BASE=FOLDER python -m tests.unit.parsers.harmony_cases

writes harmony_cases.json anew. It needs the package openai-harmony, and in the folder its vocabulary, o200k_base.tiktoken. Tests have
neither, so they read the file.
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
NUM_RANDOM = 60
WRITTEN = (
    "<|channel|>final<|message|>Hi",
    "<|channel|>final<|message|>Hi<|return|>",
    "<|channel|>analysis<|message|>",
    '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>',
    ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "x"}<|call|>',
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "x"}<|call|>',
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x"}<|call|>',
    '<|channel|>commentary to=functions.get_weather<|message|>{"city": "x"}<|call|>',
    '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "x"}<|call|>',
    '<|channel|>analysis to=functions.get_weather <|constrain|>json<|message|>{"city": "x"}<|call|>',
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x',
)
_TEXTS = (
    "Hm.",
    "I look.",
    "",
    "two\n\nlines ",
    " to=functions.now",
    "größer 💡",
    "a < b | c > d",
    '{"city": "x"}',
    "final",
)
_ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"city": "Köln"}, {"city": "a\nb", "days": 3}, {"city": '<|"|>'})


def random_messages(draws: random.Random) -> list[tuple[str, str | None, str]]:
    """Return the messages of an answer: each message's channel, recipient and content."""
    messages: list[tuple[str, str | None, str]] = []
    for _ in range(draws.randrange(3)):
        messages.append((draws.choice(("analysis", "commentary")), None, draws.choice(_TEXTS)))
    if draws.random() < 0.5:
        arguments = json.dumps(draws.choice(_ARGUMENTS), ensure_ascii=draws.random() < 0.5)
        messages.append((draws.choice(("commentary", "analysis")), "functions.get_weather", arguments))
    else:
        messages.append(("final", None, draws.choice(_TEXTS)))
    return messages


def main() -> None:
    harmony = importlib.import_module("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

    def written(messages: list[tuple[str, str | None, str]]) -> str:
        text = ""
        for channel, recipient, content in messages:
            message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, content).with_channel(channel)
            if recipient is not None:
                message = message.with_recipient(recipient).with_content_type("<|constrain|>json")
            text += encoding.decode_utf8(encoding.render(message))
        return text.removeprefix("<|start|>assistant")

    draws = random.Random(1)
    texts = [*WRITTEN, *(written(random_messages(draws)) for _ in range(NUM_RANDOM))]
    cases = []
    for text in dict.fromkeys(texts):
        ids = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT, strict=False)
        read = [[one.channel, one.recipient, "".join(part.text for part in one.content)] for one in messages]
        cases.append({"text": text, "messages": read})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
