"""An answer in `srt chat`: gathered for the next question, and printed as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class Answer:
    """The model's message, as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)

    def add(self, delta: dict[str, Any]) -> None:
        """Add a piece, as the API streams it."""
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            if function.get("name"):
                named = {"name": function["name"], "arguments": ""}
                self.calls.append({"id": call["id"], "type": "function", "function": named})
            self.calls[-1]["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """Return the message in the form in which the API takes it back."""
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": self.calls} if self.calls else {}),
        }


class Printer:
    """Prints the pieces of one answer: text as it is, each call of a tool as `name(arguments)` on a line of its own.

    Of reasoning a terminal shows one dim line, which counts its tokens; elsewhere nothing is printed.
    """

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._part = ""  # which part of the answer the current line belongs to: reasoning, text, call; none at first

    def show(self, delta: dict[str, Any], num_reasoning_tokens: int) -> None:
        if self._is_terminal and (delta.get("reasoning_content") or self._part == "reasoning"):
            self._begin("reasoning")
            count = f", {num_reasoning_tokens} tokens" if num_reasoning_tokens > 1 else ""
            _write(f"\r{DIM}… reasoning{count}{PLAIN}")
        if text := delta.get("content"):
            self._begin("text")
            _write(text)
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            if name := function.get("name"):
                self._begin("call", is_new=True)
                _write(f"{name}(")
            _write(function.get("arguments") or "")

    def end(self) -> None:
        """End the last line."""
        _write(")\n" if self._part == "call" else "\n")

    def break_off(self) -> None:
        """End the line of an answer that is not whole, if it has one: what follows is not the model's."""
        if self._part:
            _write("\n")

    def _begin(self, part: str, *, is_new: bool = False) -> None:
        if self._part and (is_new or part != self._part):
            self.end()
        self._part = part


def _write(text: str) -> None:
    print(text, end="", flush=True)
