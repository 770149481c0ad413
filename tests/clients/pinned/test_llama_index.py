"""LlamaIndex's OpenAILike."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

QUESTION = [ChatMessage(role="user", content="What is 12 + 30?")]


@pytest.fixture
def chat(url: str) -> OpenAILike:
    return OpenAILike(model="tiny", api_base=url + "/v1", api_key="none", is_chat_model=True, temperature=0, timeout=60)


def test_llama_index_chats(chat: OpenAILike) -> None:
    answer = chat.chat(QUESTION)
    assert answer.message.content == "12 + 30 = 42"
    assert answer.additional_kwargs["completion_tokens"] > 0


def test_llama_index_streams_a_chat(chat: OpenAILike) -> None:
    assert "".join(part.delta for part in chat.stream_chat(QUESTION)) == "12 + 30 = 42"


def test_llama_index_streams_a_chat_asynchronously(chat: OpenAILike) -> None:
    async def go() -> str:
        return "".join([part.delta async for part in await chat.astream_chat(QUESTION)])

    assert asyncio.run(go()) == "12 + 30 = 42"


def test_llama_index_completes(url: str) -> None:
    llm = OpenAILike(model="tiny", api_base=url + "/v1", api_key="none", temperature=0, max_tokens=8, timeout=60)
    whole = llm.complete("Once upon a time").text
    assert whole
    assert "".join(part.delta for part in llm.stream_complete("Once upon a time")) == whole
