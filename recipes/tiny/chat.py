"""Conversations, and their text as the model reads it. `render` writes what chat_template.jinja writes, without Jinja's time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, TOOL_RESPONSE_END = "<tool_response>", "</tool_response>"
CONTROL_TOKENS = (END_OF_TEXT, START, END)
"""Left out of decoded text."""
MARKS = (TOOL_CALL, TOOL_CALL_END, TOOL_RESPONSE, TOOL_RESPONSE_END)
"""One token each, and part of the text."""

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text("utf-8")

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """system, user, assistant or tool."""
    content: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that practise one skill. The last is the assistant's, and the one that the evaluation checks."""

    skill: str
    messages: tuple[Message, ...]
    phrasing: str
    operands: str = ""
    """What the phrasing was filled with; empty where there is nothing to fill in, or too little to set some aside."""
    tools: tuple[Tool, ...] = ()

    @property
    def answer(self) -> str:
        return self.messages[-1].content


def ask(skill: str, question: str, answer: str, phrasing: str, operands: str = "") -> Exchange:
    """The common case: one question, one answer."""
    return Exchange(skill, (Message("user", question), Message("assistant", answer)), phrasing, operands)


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """What the assistant says to call a tool."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{TOOL_CALL}\n{call}\n{TOOL_CALL_END}"


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = False) -> str:
    """The conversation as text, special tokens included."""
    parts = []
    has_system = bool(messages) and messages[0].role == "system"
    system = messages[0].content if has_system else ""
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(
            f"{START}system\n{system}{chr(10) * 2 if system else ''}# Tools\nYou may call these tools:\n<tools>\n{listed}\n</tools>\n"
            f'To call one, answer:\n{TOOL_CALL}\n{{"name": ..., "arguments": {{...}}}}\n{TOOL_CALL_END}{END}\n'
        )
    elif system:
        parts.append(f"{START}system\n{system}{END}\n")
    for message in messages[1:] if has_system else messages:
        if message.role == "tool":
            parts.append(f"{START}user\n{TOOL_RESPONSE}\n{message.content}\n{TOOL_RESPONSE_END}{END}\n")
        else:
            parts.append(f"{START}{message.role}\n{message.content}{END}\n")
    if add_generation_prompt:
        parts.append(f"{START}assistant\n")
    return "".join(parts)
