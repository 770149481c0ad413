"""A streamed answer is the whole one, byte for byte, and both are what the tokens say: the model can say nothing but a corpus.

Its logits are all alike, so that logit_bias decides: each token of a text has less bias than the one before, and frequency_penalty
sends whatever was said behind all that was not. What is said is known beforehand, and so is where each stop cuts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 32
WORDS = (" the fox", " asked", " no", "ear", " co", " gre", ' ti"', "igh", " 2 and", " a box")
END, PAD = "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Saying:
    """A text and its tokens, each of which comes once."""

    ids: list[int]
    pieces: list[bytes]

    def text(self, num_tokens: int | None = None) -> str:
        return b"".join(self.pieces[:num_tokens]).decode(errors="replace")

    def parameters(self, **more: Any) -> dict[str, Any]:
        """In the words of the OpenAI API, what makes a flat model say it."""
        step = 1.9 / len(self.ids)
        bias = {str(token): 100 - place * step for place, token in enumerate(self.ids)}
        forced = {"logit_bias": bias, "frequency_penalty": 2, "temperature": 0, "ignore_eos": True}
        return {**forced, "max_tokens": len(self.ids), **more}

    def stops(self, num_tokens: int) -> dict[str, int]:
        """Every string that begins in one of its tokens, ends in another and lies in so many, with the place of the first of them."""
        text = self.text()
        token_of_byte = [place for place, piece in enumerate(self.pieces) for _ in piece]
        starts = [len(text[:at].encode()) for at in range(len(text) + 1)]
        found: dict[str, int] = {}
        for first in range(len(text)):
            for end in range(first + 1, len(text) + 1):
                began, ended = token_of_byte[starts[first]], token_of_byte[starts[end] - 1]
                if ended - began == num_tokens - 1:
                    found.setdefault(text[first:end], began)
        return found


@pytest.fixture(scope="module")
def flat_checkpoint(checkpoint: CheckpointFactory) -> Path:
    """A model to which all tokens are alike."""
    return checkpoint("qwen3", logit_std=0.0)


@pytest.fixture(scope="module")
def tokenizer(flat_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(flat_checkpoint)


@pytest.fixture(scope="module")
def urls(flat_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """By style of the answer: one server says in each chunk of /generate all there is, the other what is new."""
    words = ["--model-path", str(flat_checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float32"]
    words += ["--max-total-tokens", "16384", "--max-running-requests", str(NUM_CLIENTS)]
    tmp = tmp_path_factory.mktemp
    with (
        ServerProcess("srt.launch_server", words, tmp("cumulative")) as one,
        ServerProcess("srt.launch_server", [*words, "--incremental-streaming-output"], tmp("incremental")) as other,
    ):
        url, incremental_url = one.wait_ready(), other.wait_ready()
        yield {style: incremental_url if "incremental" in style else url for style in STYLES}


def saying(tokenizer: Tokenizer, *parts: str | bytes) -> Saying:
    """Words in the fewest tokens, bytes in a token each."""
    by_bytes = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    ids: list[int] = []
    for part in parts:
        more = [by_bytes[bytes([byte])] for byte in part] if isinstance(part, bytes) else tokenizer.encode(part, False)
        ids += [token for token in more if token not in ids or isinstance(part, bytes)]
    assert len(set(ids)) == len(ids), "a token comes twice"
    return Saying(ids, [tokenizer.token_bytes(token) for token in ids])


def sayings(tokenizer: Tokenizer) -> dict[str, Saying]:
    return {
        "words": saying(tokenizer, *WORDS),
        "an emoji of four tokens, characters of three and of two": saying(
            tokenizer, "the fox", "🙂".encode(), " 1", "世".encode(), "a b", "é".encode(), " no"
        ),
        "an emoji of seven tokens, as families have it": saying(tokenizer, "my ", "👩\u200d".encode(), " 3"),
        "special tokens": saying(tokenizer, "the fox", END, "é".encode(), PAD, "a b"),
    }


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


def native(asked: dict[str, Any]) -> dict[str, Any]:
    given = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in asked.items()}
    return {"text": "Say", "sampling_params": {**given, "sampling_seed": 1}}


def _generated(answer: Any, text: str, ids: list[int]) -> tuple[str, Any, Any]:
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(ids)
    return text, meta["finish_reason"]["type"], meta["finish_reason"].get("matched")


async def cumulative(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    whole = await post(client, "/generate", native(asked))
    told = await chunks(client, "/generate", native(asked))
    texts = [part["text"] for part in told]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert told[-1]["output_ids"] == whole["output_ids"]
    return [_generated(one, one["text"], one["output_ids"]) for one in (whole, told[-1])]


async def incremental(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[Answer]:
    whole = await post(client, "/generate", native(asked))
    parts = await chunks(client, "/generate", native(asked))
    text, ids = "".join(part["text"] for part in parts), [one for part in parts for one in part["output_ids"]]
    assert ids == whole["output_ids"]
    return [_generated(whole, whole["text"], whole["output_ids"]), _generated(parts[-1], text, ids)]


STYLES = {"completions": completion, "chat": chat, "generate": cumulative, "generate, incremental": incremental}


def run(urls: dict[str, str], style: str, requests: list[dict[str, Any]]) -> list[list[Answer]]:
    """Of each request the whole answer and the streamed one."""

    async def go() -> list[list[Answer]]:
        async with connected(urls[style]) as client:
            return await asyncio.gather(*[STYLES[style](client, asked) for asked in requests])

    return asyncio.run(go())


@pytest.mark.parametrize("style", STYLES)
def test_answers_that_end_at_any_token_are_told_alike(urls: dict[str, str], tokenizer: Tokenizer, style: str) -> None:
    """So they end in the middle of every character too."""
    asked, expected = [], []
    for name, one in sayings(tokenizer).items():
        if name != "special tokens":
            for length in range(1, len(one.ids) + 1):
                asked.append(one.parameters(max_tokens=length))
                expected.append((one.text(length), "length", None))
    assert sum(text.endswith("\N{REPLACEMENT CHARACTER}") for text, _, _ in expected) >= 3 + 2 + 1 + 5
    for request, right, answers in zip(asked, expected, run(urls, style, asked), strict=True):
        assert answers == [right, right], request


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_are_told_alike_shown_or_not(urls: dict[str, str], tokenizer: Tokenizer, style: str) -> None:
    one = sayings(tokenizer)["special tokens"]
    text = one.text()
    shown = {False: text, True: text.replace(END, "").replace(PAD, "")}
    assert END in text and PAD in text and "é" in text
    requests = [one.parameters(skip_special_tokens=skip) for skip in shown]
    requests += [one.parameters(skip_special_tokens=False, stop=END[1:-1], no_stop_trim=keep) for keep in (True, False)]
    expected: list[Answer] = [(said, "length", None) for said in shown.values()]
    cut = text.index(END[1:-1])
    expected += [(text[: cut + len(END) - 2], "stop", END[1:-1]), (text[:cut], "stop", END[1:-1])]
    for request, right, answers in zip(requests, expected, run(urls, style, requests), strict=True):
        assert answers == [right, right], request


@pytest.mark.parametrize("style", STYLES)
def test_a_stop_over_three_tokens_is_cut_off_at_every_offset(
    urls: dict[str, str], tokenizer: Tokenizer, style: str
) -> None:
    """At every token of the text, and at every character of the tokens in which the stop begins and ends; where characters have
    several tokens, over as many as that takes."""
    requests: list[dict[str, Any]] = []
    expected: list[Answer] = []
    for name, one in sayings(tokenizer).items():
        text, widths = one.text(), (3,) if name == "words" else (3, 4, 5, 8)
        for width in widths if name != "special tokens" else ():
            stops = one.stops(width)
            if name == "words":
                assert set(stops.values()) == set(range(len(one.ids) - 2))
            for stop in stops:
                keeps = len(requests) % 4 == 0
                end = text.index(stop) + (len(stop) if keeps else 0)
                requests.append(one.parameters(stop=stop, no_stop_trim=keeps))
                expected.append((text[:end], "stop", stop))
    assert len(requests) > 150
    assert any("🙂" in stop for _, _, stop in expected) and any("👩" in stop for _, _, stop in expected)
    for request, right, answers in zip(requests, expected, run(urls, style, requests), strict=True):
        assert answers == [right, right], request
