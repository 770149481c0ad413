"""LiteLLM, by the providers under which it speaks to a server of one's own."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(params=["openai/tiny", "hosted_vllm/tiny"])
def wanted(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    return {"model": request.param, "api_base": url + "/v1", "api_key": "none", "temperature": 0, "timeout": 60}


def test_litellm_chats(wanted: dict[str, Any]) -> None:
    answer = litellm.completion(messages=QUESTION, **wanted)
    assert answer.choices[0].message.content == "12 + 30 = 42"
    assert answer.usage.completion_tokens > 0


def test_litellm_streams_a_chat(wanted: dict[str, Any]) -> None:
    stream = litellm.completion(messages=QUESTION, stream=True, **wanted)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "12 + 30 = 42"


def test_litellm_chats_asynchronously(wanted: dict[str, Any]) -> None:
    async def go() -> Any:
        return await litellm.acompletion(messages=QUESTION, **wanted)

    assert asyncio.run(go()).choices[0].message.content == "12 + 30 = 42"


def test_litellm_completes(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/tiny",
        prompt="Once upon a time",
        api_base=url + "/v1",
        api_key="none",
        max_tokens=8,
    )
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_litellm_raises_what_the_server_says(relay: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model="openai/tiny", messages=QUESTION, api_base=relay.url + "/v1", api_key="none", temperature=-1
        )
    assert len(relay.seen) == 1
