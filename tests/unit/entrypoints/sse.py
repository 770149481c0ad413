"""Reading server-sent events in tests."""

from __future__ import annotations

from typing import Any

import httpx
import orjson


def events(response: httpx.Response) -> list[Any]:
    """All JSON events of a complete stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in data)
    return [orjson.loads(block.removeprefix("data: ")) for block in data]


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Name and JSON of all events of a complete stream whose events have names, and which has no [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    told = [block.split("\n") for block in blocks if not block.startswith(":")]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in told)
    return [(name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))) for name, data in told]
