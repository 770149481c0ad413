"""pydantic-ai's agent."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    total: int


def model_at(url: str) -> OpenAIChatModel:
    return OpenAIChatModel(
        "tiny", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"), settings={"temperature": 0}
    )


def test_pydantic_ai_runs_an_agent(url: str) -> None:
    assert Agent(model_at(url)).run_sync("What is 12 + 30?").output == "12 + 30 = 42"


def test_pydantic_ai_streams_an_agent(url: str) -> None:
    async def go() -> list[str]:
        async with Agent(model_at(url)).run_stream("What is 12 + 30?") as run:
            return [text async for text in run.stream_text(debounce_by=None)]

    texts = asyncio.run(go())
    assert texts[-1] == "12 + 30 = 42"
    assert all(later.startswith(text) for text, later in pairwise(texts))


def test_pydantic_ai_gets_an_object_of_its_output_type(relay: Any) -> None:
    answer = Agent(model_at(relay.url), output_type=Sum).run_sync("What is 12 + 30?").output
    assert isinstance(answer, Sum)
    assert relay.seen == [("/v1/chat/completions", 200)]
