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
