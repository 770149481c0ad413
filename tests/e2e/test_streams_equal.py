"""A streamed answer is the whole one, byte for byte, whatever the tokens are: logit_bias lets the model say only what is hard.

The same seed draws the same tokens, so the two can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.conftest import Server
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

NUM_TOKENS = 40
EMOJI, HAN, LATIN = "🙂", "世", "é"
NUM_CLIENTS = 16


@pytest.fixture(scope="module")
def tokenizer(qwen3_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(qwen3_checkpoint)


@pytest.fixture(scope="module")
def incremental_url(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["--model-path", str(qwen3_checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float32"]
    words += ["--max-total-tokens", "8192", "--incremental-streaming-output"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("incremental")) as process:
        yield process.wait_ready()


def byte_tokens(tokenizer: Tokenizer, character: str) -> list[int]:
    """A token for each byte of it."""
    by_bytes = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in character.encode()]


def corpora(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """What the model may say, by name. Drawn from a few bytes of characters, most answers have broken ones and unfinished ends."""
    letters = tokenizer.encode("a b", add_special_tokens=False)
    eos = [tokenizer.encode(tokenizer.special_tokens["eos_token"])[0]]
    pad = tokenizer.encode(tokenizer.special_tokens["pad_token"])[:1] if "pad_token" in tokenizer.special_tokens else []
    return {
        "an emoji's four bytes": byte_tokens(tokenizer, EMOJI),
        "three bytes and letters": byte_tokens(tokenizer, HAN) + letters,
        "two bytes": byte_tokens(tokenizer, LATIN),
        "special tokens between letters and bytes": [*letters, *eos, *pad, *byte_tokens(tokenizer, LATIN)],
    }


def parameters(allowed: list[int], seed: int, **more: Any) -> dict[str, Any]:
    """In the words of the OpenAI API."""
    bias = {str(token): 100 for token in allowed}
    return {"logit_bias": bias, "temperature": 5, "max_tokens": NUM_TOKENS, "seed": seed, "ignore_eos": True, **more}


def native(asked: dict[str, Any]) -> dict[str, Any]:
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    return {"text": "Say", "sampling_params": {names.get(name, name): value for name, value in asked.items()}}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


Answer = tuple[str, Any, Any]  # text, why it ended, what stopped it


async def completion(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    """Whole, then streamed."""
    body = {"prompt": "Say", **asked}
    whole = (await post(client, "/v1/completions", body))["choices"][0]
    parts = [chunk["choices"][0] for chunk in await chunks(client, "/v1/completions", body)]
    return [
        (whole["text"], whole["finish_reason"], whole["matched_stop"]),
        ("".join(part["text"] for part in parts), parts[-1]["finish_reason"], parts[-1]["matched_stop"]),
    ]


async def chat(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    body = {"messages": [{"role": "user", "content": "Say"}], **asked}
    whole = (await post(client, "/v1/chat/completions", body))["choices"][0]
    parts = [chunk["choices"][0] for chunk in await chunks(client, "/v1/chat/completions", body)]
    streamed = "".join(part["delta"].get("content", "") for part in parts)
    return [
        (whole["message"]["content"], whole["finish_reason"], whole["matched_stop"]),
        (streamed, parts[-1]["finish_reason"], parts[-1]["matched_stop"]),
    ]


def _generated(answer: Any, text: str, ids: list[int]) -> tuple[str, Any, Any]:
    meta = answer["meta_info"]
    return text, (meta["finish_reason"], ids), (meta["completion_tokens"], meta["seed"])


async def cumulative(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    whole = await post(client, "/generate", native(asked))
    last = (await chunks(client, "/generate", native(asked)))[-1]
    return [_generated(one, one["text"], one["output_ids"]) for one in (whole, last)]


async def incremental(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    whole = await post(client, "/generate", native(asked))
    parts = await chunks(client, "/generate", native(asked))
    text, ids = "".join(part["text"] for part in parts), [one for part in parts for one in part["output_ids"]]
    return [_generated(whole, whole["text"], whole["output_ids"]), _generated(parts[-1], text, ids)]


STYLES = {"completions": completion, "chat": chat, "generate": cumulative, "generate, incremental": incremental}


def run(url: str, style: str, requests: list[dict[str, Any]]) -> list[list[Answer]]:
    async def go() -> list[list[Answer]]:
        async with connected(url) as client:
            return await asyncio.gather(*[STYLES[style](client, asked) for asked in requests])

    return asyncio.run(go())


@pytest.mark.parametrize("style", STYLES)
def test_broken_characters_and_special_tokens_stream_as_they_are_told_whole(
    server: Server, incremental_url: str, tokenizer: Tokenizer, style: str
) -> None:
    url = incremental_url if style == "generate, incremental" else server.url
    requests = [
        parameters(allowed, seed, skip_special_tokens=seed % 2 == 0)
        for allowed in corpora(tokenizer).values()
        for seed in range(8)
    ]
    answers = run(url, style, requests)
    for asked, (whole, streamed) in zip(requests, answers, strict=True):
        assert streamed == whole, asked
    texts = [whole[0] for whole, _ in answers]
    assert any(EMOJI in text or HAN in text for text in texts)
    assert any(LATIN in text for text in texts)
    assert any(text.endswith("\N{REPLACEMENT CHARACTER}") for text in texts), "no unfinished end"
    assert any(tokenizer.special_tokens["eos_token"] in text for text in texts)


@pytest.mark.parametrize("style", STYLES)
def test_a_stop_over_three_tokens_is_cut_off_wherever_it_begins(
    server: Server, incremental_url: str, tokenizer: Tokenizer, style: str
) -> None:
    """Of an answer in letters, and of one in which each character is many tokens."""
    url = incremental_url if style == "generate, incremental" else server.url
    letters = tokenizer.encode("the fox sat on a box", add_special_tokens=False)
    for allowed in (letters, byte_tokens(tokenizer, LATIN)):
        asked = parameters(allowed, seed=3)
        ((whole, _, _), _) = run(url, style, [asked])[0]
        stops = sorted(
            {whole[at : at + length] for at in range(len(whole)) for length in (3, 5, 8) if whole[at : at + 3]}
        )
        requests = [
            {**asked, "stop": stop, "no_stop_trim": len(stop) == 5} for stop in stops[:: max(1, len(stops) // 32)]
        ]
        for one, (told, streamed) in zip(requests, run(url, style, requests), strict=True):
            assert streamed == told, one
            end = whole.index(one["stop"]) + (len(one["stop"]) if one["no_stop_trim"] else 0)
            assert told[0] == whole[:end], one
