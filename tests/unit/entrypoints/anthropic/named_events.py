"""Reading a stream of /v1/messages in tests, as Anthropic's clients do."""

from __future__ import annotations

from typing import Any

import jiter
import orjson


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of all events of a stream; each has the name that its type says."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        if not block.startswith(":"):
            name, data = block.split("\n")
            events.append(orjson.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream make, whose order is checked."""
    first, *middle, end, stop = events
    assert (first["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    return {**message, "content": accumulated_content(middle), **end["delta"], "usage": end["usage"]}


def accumulated_content(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that these events make. They are consecutive, one is open at a time, and none is empty but a call."""
    content: list[dict[str, Any]] = []
    written, is_open = "", False
    for one in events:
        if one["type"] == "content_block_start":
            assert not is_open and one["index"] == len(content)
            content.append(dict(one["content_block"]))
            written, is_open = "", True
            continue
        assert is_open and one["index"] == len(content) - 1
        block = content[-1]
        if one["type"] == "content_block_stop":
            assert written or block["type"] == "tool_use", "a block with nothing to say"
            is_open = False
            continue
        (piece,) = (value for name, value in one["delta"].items() if name != "type")
        assert piece
        written += piece
        match one["delta"]["type"]:
            case "text_delta":
                block["text"] = written
            case "thinking_delta":
                block["thinking"] = written
            case "input_json_delta":
                block["input"] = jiter.from_json(written.encode(), partial_mode=True)
    assert not is_open
    return content
