"""/v1/embeddings as OpenAI has it, /encode and /classify as SGLang has them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Protocol

import numpy as np
import orjson

from srt.entrypoints.embeddings.answer_types import Embedding, Embeddings, Encoded, EncodedMeta
from srt.entrypoints.embeddings.bodies import DimensionsBody, EmbeddingsBody, EncodeBody
from srt.entrypoints.embeddings.vectors import (
    Vector,
    check_dimensions,
    embedding,
    inputs_of,
    pooling_of,
    vectors_of,
)
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.models import check_model
from srt.entrypoints.request_schema import renamed
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.protocol.messages import Float32Array


class Counted(Protocol):
    """The result of a text's request."""

    @property
    def rid(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


async def create_embeddings(exchange: Exchange, service: Service) -> None:
    """Embed a text, or each of a list of texts. Needs an embedding model."""
    body = EmbeddingsBody.parse(await exchange.read_json())
    model = check_model(body.model, service)
    engine = service.engine()

    async def answer() -> None:
        try:
            vectors = await embedded(engine, body)
        except RequestError as error:
            raise renamed(error, {"text": "input", "input_ids": "input"}) from error
        await exchange.send_json(await _embeddings(body, model, vectors, engine))

    await exchange.run_while_connected(answer())


async def embedded(engine: TokenizerManager, body: EmbeddingsBody) -> list[Vector]:
    check_dimensions(body.dimensions, engine.model.hidden_size)
    prompts = body.prompts()
    is_batch = not isinstance(body.input, str) and prompts[0] is not body.input
    return await vectors_of(engine, inputs_of(engine, body, prompts, is_batch=is_batch))


async def _embeddings(body: EmbeddingsBody, model: str, vectors: list[Vector], engine: TokenizerManager) -> Embeddings:
    data: list[Embedding] = []
    for index, vector in enumerate(vectors):
        values = embedding(vector, pooling_of(engine), body.dimensions)
        written = _base64(values) if body.encoding_format == "base64" else _numbers(values)
        data.append({"object": "embedding", "index": index, "embedding": written})
        await asyncio.sleep(0)  # let other tasks run between the vectors of a large batch
    num_tokens = sum(vector.prompt_tokens for vector in vectors)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}  # type: ignore[typeddict-item]  # see _numbers


def _base64(values: Float32Array) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _numbers(values: Float32Array) -> Any:
    """Return the JSON of the values, each with as few digits as tell it from other float32 numbers."""
    return orjson.Fragment(orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY))


async def encode(exchange: Exchange, service: Service) -> None:
    """Embed a text, or each of a list of texts. Needs an embedding model."""
    body = DimensionsBody.parse(await exchange.read_json())
    await _send_encoded(exchange, service, body, body.dimensions)


async def classify(exchange: Exchange, service: Service) -> None:
    """Score a text, or each of a list of texts: a number for each label of the classifier, without a softmax. Needs a classifier."""
    await _send_encoded(exchange, service, EncodeBody.parse(await exchange.read_json()), None)


async def _send_encoded(exchange: Exchange, service: Service, body: EncodeBody, dimensions: int | None) -> None:
    engine = service.engine()

    async def answer() -> None:
        vectors, is_batch = await encoded(engine, body, dimensions)
        answers = []
        for vector in vectors:
            values = _numbers(embedding(vector, pooling_of(engine), dimensions))
            answers.append(encoded_answer(engine, vector, values))
            await asyncio.sleep(0)  # let other tasks run between the vectors of a large batch
        await exchange.send_json(answers if is_batch else answers[0])

    await exchange.run_while_connected(answer())


async def encoded(
    engine: TokenizerManager, body: EncodeBody, dimensions: int | None = None
) -> tuple[list[Vector], bool]:
    """Return the vectors of the body's texts, and whether the answer is a list."""
    check_dimensions(dimensions, engine.model.hidden_size)
    prompts, is_batch = body.prompts()
    return await vectors_of(engine, inputs_of(engine, body, prompts, is_batch=is_batch)), is_batch


def encoded_answer(engine: TokenizerManager, vector: Vector, values: Any) -> Encoded:
    return {"embedding": values, "meta_info": meta_of(engine, vector)}


def meta_of(engine: TokenizerManager, one: Counted) -> EncodedMeta:
    """Return the counts of a text's request."""
    return {
        "id": one.rid,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "weight_version": engine.limits.weight_version,
    }
