"""How a call runs, whatever the API."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from srt.entrypoints.local_engine import LocalEngine
from tests.unit.entrypoints.fake_engine import World


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hi", "sampling_params": {"n": 2}}),
        ("/v1/completions", {"model": "tiny", "prompt": ["hi", "ho"]}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_the_engine_is_told_whether_tokens_are_watched_as_they_come(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    world = World()
    assert world.post(path, {**body, "stream": stream}).status_code == 200
    asked = [handle.request for handle in world.engine.handles]
    assert asked
    assert all(one.stream == stream for one in asked)


def test_a_program_that_reads_a_stream_watches_too() -> None:
    world = World()
    engine = LocalEngine.__new__(LocalEngine)  # without processes
    engine._service, engine._args = cast(Any, world.service), world.service.args
    body = {"text": ["hi", "ho"]}
    asyncio.run(engine.open_stream(body))
    asyncio.run(engine.answer(body))
    assert [handle.request.stream for handle in world.engine.handles] == [True, True, False, False]
