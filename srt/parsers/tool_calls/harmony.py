"""gpt-oss: harmony messages, `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`.

Messages of the channel `analysis` are reasoning, those to `functions.f` are calls, all others text. What the prompt ends with,
`<|start|>assistant`, is not part of the output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from srt.parsers.base_parser import NotThisForm, Steps, TextEnded
from srt.parsers.call_format import CallFormat
from srt.parsers.events import Reasoning, Text
from srt.parsers.forms import ANY_TEXT, CallableTool, Node, calls, const, either, members, sequence, tag

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(CallFormat):
    BEGINS = _BEGINS

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        """Return the form without its end `<|call|>`, which ends the answer."""
        return tag(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json{_MESSAGE}", tool.arguments, "")

    @classmethod
    def calls_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        """Return the form of one call: this format has no second one in an answer. Reasoning may come first."""
        return _behind_messages(calls(list(map(cls.call_form, tools)), "", several=False), "analysis")

    @classmethod
    def free_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        called = calls(list(map(cls.call_form, tools)), "", several=False)
        return _behind_messages(
            either(called, tag(f"<|channel|>final{_MESSAGE}", ANY_TEXT, "")), "analysis", "commentary"
        )

    def _opening(self) -> Steps[None]:
        """Read a first message whose recipient stands in front of its channel, right behind the prompt: ` to=functions.f<|channel|>…`."""
        yield from self._space()
        recipient = yield from self._expect("to=")
        self._at -= len(recipient)  # it belongs to the header
        yield from self._part()

    def _part(self) -> Steps[None]:
        header = yield from self._until(_MESSAGE)
        yield from self._expect(_MESSAGE)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            yield from self._call(recipient[1])
        elif channel is not None and channel[1] == "analysis":
            yield from self._content(Reasoning)
        else:
            yield from self._content(Text)

    def _call(self, recipient: str) -> Steps[None]:
        if not recipient.startswith("functions."):
            raise NotThisForm
        yield from self._space()
        yield from self._begin_json_call(recipient.removeprefix("functions."))
        yield from self._skip(*_ENDS)

    def _content(self, kind: type[Text] | type[Reasoning]) -> Steps[None]:
        """Read a message's content as events of this kind, up to its end or the begin of the next message."""

        def tell(piece: str) -> None:
            self._events.append(kind(self._take(), piece))

        tell("")
        try:
            end = yield from self._pieces((*_ENDS, *_BEGINS), tell)
        except TextEnded:
            self._at = len(self._text)
            tell(self._text[self._start :])
            return
        if end in _BEGINS:
            self._at -= len(end)
        else:
            tell("")


def in_final_message(text: Node) -> Node:
    """Return the form of an answer whose final message has this form. Reasoning may come first."""
    return _behind_messages(tag(f"<|channel|>final{_MESSAGE}", text, ""), "analysis")


def _behind_messages(last: Node, *channels: str) -> Node:
    """Return the form of an answer whose last message has this form, behind any number of messages of these channels."""
    before = [tag(f"<|channel|>{channel}{_MESSAGE}", ANY_TEXT, "<|end|>") for channel in channels]
    ended = sequence(calls(before, "<|start|>assistant", several=True), const("<|start|>assistant"))
    return members([ended, last], [False, True])
