"""/tokenize and /detokenize: the server's tokenizer, for clients that count tokens or truncate prompts."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from srt.entrypoints.answers import Texts, Tokens
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.native_shapes import MAX_BATCH
from srt.entrypoints.openai.models import check_model
from srt.entrypoints.request_schema import MODEL_NAME, TOKEN_ID, RequestBody, bad_parameter, described, renamed
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError


class TokenizeBody(RequestBody):
    """POST /tokenize."""

    FAMILY: ClassVar[str] = "tokenize"

    prompt: str | list[str] = described("The text, or a list of texts.", ...)
    model: str | None = described("A name that the server answers to.", string=MODEL_NAME)
    add_special_tokens: bool = described("Put the model's special tokens (BOS) around the text.", True)


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    FAMILY: ClassVar[str] = "detokenize"

    tokens: list[int] | list[list[int]] = described("Token ids, or a list of lists of them.", ..., integer=TOKEN_ID)
    model: str | None = described("A name that the server answers to.", string=MODEL_NAME)
    skip_special_tokens: bool = described("Leave special tokens out of the text.", True)


async def tokenize(exchange: Exchange, service: Service) -> None:
    """Convert text to the token ids that /generate and /v1/completions compute. A list of texts gives a list of lists."""
    body = TokenizeBody.parse(await exchange.read_json())
    check_model(body.model, service)
    engine = service.engine()
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    _check_batch("prompt", len(texts))
    try:
        tokens = []
        for text in texts:
            tokens.append(await engine.text.tokenize(text, body.add_special_tokens))
            await asyncio.sleep(0)  # let other tasks run in between
    except RequestError as error:
        raise renamed(error, {"text": "prompt"}) from error
    counts = [len(ids) for ids in tokens]
    is_batch = isinstance(body.prompt, list)
    answer: Tokens = {
        "tokens": tokens if is_batch else tokens[0],
        "count": counts if is_batch else counts[0],
        "max_model_len": engine.limits.max_request_tokens,
    }
    await exchange.send_json(answer)


async def detokenize(exchange: Exchange, service: Service) -> None:
    """Convert token ids to text. A list of lists gives a list of texts."""
    body = DetokenizeBody.parse(await exchange.read_json())
    check_model(body.model, service)
    engine = service.engine()
    answer: Texts
    rows = [ids for ids in body.tokens if isinstance(ids, list)]
    if not rows:
        flat = [token for token in body.tokens if isinstance(token, int)]
        answer = {"text": engine.text.detokenize(flat, body.skip_special_tokens)}
        await exchange.send_json(answer)
        return
    _check_batch("tokens", len(rows))
    texts = []
    for ids in rows:
        texts.append(engine.text.detokenize(ids, body.skip_special_tokens))
        await asyncio.sleep(0)
    answer = {"text": texts}
    await exchange.send_json(answer)


def _check_batch(name: str, count: int) -> None:
    if count > MAX_BATCH:
        raise bad_parameter(name, f"may have at most {MAX_BATCH} entries, not {count}")
