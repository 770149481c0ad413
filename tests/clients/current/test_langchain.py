"""LangChain's ChatOpenAI and OpenAI."""

from __future__ import annotations

import asyncio

import pytest
from langchain_openai import ChatOpenAI, OpenAI

WANTED = {"model": "tiny", "api_key": "none", "temperature": 0, "timeout": 60}


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url + "/v1", **WANTED)


def test_langchain_chats(chat: ChatOpenAI) -> None:
    answer = chat.invoke([("system", "Be brief."), ("human", "What is 12 + 30?")])
    assert "42" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 0


def test_langchain_streams_what_it_says_in_one_piece(chat: ChatOpenAI) -> None:
    pieces = list(chat.stream("Sort: pear, fig, apple", stream_usage=True))
    assert len(pieces) > 2
    assert "".join(piece.content for piece in pieces) == chat.invoke("Sort: pear, fig, apple").content
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0


def test_langchain_runs_a_batch_asynchronously(chat: ChatOpenAI) -> None:
    answers = asyncio.run(chat.abatch(["What is 12 + 30?", "What is 11 + 11?"]))
    assert ["42" in answers[0].content, "22" in answers[1].content] == [True, True]


def test_langchain_reads_logprobs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("What is 12 + 30?")
    rows = answer.response_metadata["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == answer.content + "<|im_end|>"
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_langchain_completes(url: str) -> None:
    answer = OpenAI(base_url=url + "/v1", max_tokens=8, **WANTED).generate(["Once upon a time", "There was"])
    assert [len(row) for row in answer.generations] == [1, 1]
    assert all(row[0].text for row in answer.generations)
    assert answer.llm_output["token_usage"]["completion_tokens"] == 16
