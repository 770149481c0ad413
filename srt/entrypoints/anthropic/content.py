"""The content blocks of a message, from the parts of a chat's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import orjson
from pydantic_core import from_json, to_json

from srt.entrypoints.answers import ChatDelta, ToolCallDelta
from srt.entrypoints.anthropic.answers import BlockEvent, ContentBlock, Delta
from srt.parsers.json_scanner import JsonScanner


class BlockWriter:
    """The events of the blocks as they grow. A block begins with its first piece; reasoning, text and each call have their own."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._kind = ""  # of the block that is open; empty: none is
        self._index = -1
        self._input = CallInput()

    def push(self, deltas: Iterable[ChatDelta]) -> list[BlockEvent]:
        """Return the events of the new parts of a chat's message."""
        events: list[BlockEvent] = []
        for delta in deltas:
            if self._shows_thinking and (thinking := delta.get("reasoning_content")):
                if self._kind != "thinking":
                    events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._delta({"type": "thinking_delta", "thinking": thinking}))
            if text := delta.get("content"):
                if self._kind != "text":
                    events += self._begin({"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": text}))
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
        return events

    def finish(self) -> list[BlockEvent]:
        """Return the end of the last block, if there is one."""
        if not self._kind:
            return []
        self._kind = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _begin(self, block: ContentBlock) -> list[BlockEvent]:
        events = self.finish()
        self._kind = block["type"]
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _call(self, call: ToolCallDelta) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        function = call["function"]
        if "name" in function:
            self._input = CallInput()
            events += self._begin({"type": "tool_use", "id": call.get("id", ""), "name": function["name"], "input": {}})
        if piece := self._input.push(function.get("arguments", "")):
            events.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
        return events

    def _delta(self, delta: Delta) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_content(deltas: Sequence[ChatDelta], *, shows_thinking: bool = True) -> list[ContentBlock]:
    """Return the blocks of a whole message: what the events of its stream add up to."""
    writer = BlockWriter(shows_thinking=shows_thinking)
    blocks: list[ContentBlock] = []
    pieces: list[list[str]] = []
    for event in writer.push(deltas):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    pieces[-1].append(delta["text"])
                case "thinking_delta":
                    pieces[-1].append(delta["thinking"])
                case "input_json_delta":
                    pieces[-1].append(delta["partial_json"])
    return [_filled(block, "".join(parts)) for block, parts in zip(blocks, pieces, strict=True)]


def _filled(block: ContentBlock, whole: str) -> ContentBlock:
    match block["type"]:
        case "text":
            return {**block, "text": whole}
        case "thinking":
            return {**block, "thinking": whole}
        case "tool_use":
            return {**block, "input": input_object(whole)}


class CallInput:
    """The arguments of a call as they come, up to where they stop being JSON: clients parse what is there at any time."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._rest = ""  # what only the following text decides

    def push(self, piece: str) -> str:
        """Return the JSON that has become certain."""
        self._rest += piece
        at, read = self._scanner.scan(self._rest, 0, is_end=False)
        self._rest = self._rest[at:]
        return read


def input_object(written: str) -> dict[str, Any]:
    """Return the arguments that `CallInput` let pass, to be encoded by orjson. Of arguments that were cut off, what is there is kept."""
    scanner = JsonScanner()
    scanner.scan(written, 0, is_end=True)
    if not scanner.is_done:
        try:
            value = from_json(written, allow_partial=True)  # as Anthropic's clients read a stream
        except ValueError:
            return {}
        # Numbers may be larger than orjson takes.
        return cast(dict[str, Any], orjson.Fragment(to_json(value, inf_nan_mode="null")))
    return cast(dict[str, Any], orjson.Fragment(written.encode()))
