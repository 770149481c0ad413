"""/v1/rerank as SGLang has it: documents in the order of how well they fit a query.

A classifier with one label scores each pair of query and document. An embedding model compares their embeddings. A model that generates
text can do it if its chat template asks whether a document fits: it is scored by how likely it is to say yes rather than no.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
from msgspec import Struct

from srt.entrypoints.embeddings.answer_types import Ranked
from srt.entrypoints.embeddings.bodies import Prompt, RerankBody
from srt.entrypoints.embeddings.embedding_routes import meta_of
from srt.entrypoints.embeddings.score import label_logprobs, softmax
from srt.entrypoints.embeddings.vectors import Vector, embedding, inputs_of, vectors_of
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.models import check_model
from srt.entrypoints.request_schema import bad_parameter, renamed
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.utils.pooling_config import PoolingSpec

NAMES_HERE = {"text": "documents", "input_ids": "documents"}
RERANKS = 'can only be "yes" or "no"'  # a reranker's chat template says this to the model


class _Scored(Struct, frozen=True):
    """A document's score, and the counts of its request."""

    score: float
    rid: str
    prompt_tokens: int
    cached_tokens: int


async def rerank(exchange: Exchange, service: Service) -> None:
    """Rank documents by how well they fit a query, the best first. Needs a classifier with one label, an embedding model or a reranker."""
    body = RerankBody.parse(await exchange.read_json())
    check_model(body.model, service)
    engine = service.engine()

    async def answer() -> None:
        await exchange.send_json(await ranked(engine, body))

    await exchange.run_while_connected(answer())


async def ranked(engine: TokenizerManager, body: RerankBody) -> list[Ranked]:
    """Return the answer to a rerank body."""
    body.check()
    pooling = engine.model.pooling
    if body.instruct is not None and pooling is not None:
        raise bad_parameter("instruct", "needs a model that generates text and has a reranker's chat template")
    try:
        if pooling is None:
            found = await _by_words(engine, body)
        elif pooling.is_classifier:
            found = await _by_classifier(engine, body)
        else:
            found = await _by_embeddings(engine, body, pooling)
    except RequestError as error:
        raise renamed(error, NAMES_HERE) from error
    order = sorted(range(len(found)), key=lambda index: -found[index].score)  # equal ones stay in the client's order
    return [_answer(engine, found[index], index, body) for index in order[: body.top_n]]


def _answer(engine: TokenizerManager, one: _Scored, index: int, body: RerankBody) -> Ranked:
    answer: Ranked = {"score": one.score, "index": index, "meta_info": meta_of(engine, one)}
    if body.return_documents:
        answer["document"] = body.documents[index]
    return answer


async def _by_classifier(engine: TokenizerManager, body: RerankBody) -> list[_Scored]:
    pairs: list[Prompt] = []
    for document in body.documents:
        pairs.append(await engine.text.tokenize_pair(body.query, document))
        await asyncio.sleep(0)  # let other tasks run between the documents of a large batch
    vectors = await vectors_of(engine, inputs_of(engine, body, pairs, is_batch=True))
    return [_scored(_sigmoid(float(vector.values[0])), vector) for vector in vectors]


async def _by_embeddings(engine: TokenizerManager, body: RerankBody, pooling: PoolingSpec) -> list[_Scored]:
    texts: list[Prompt] = [body.query, *body.documents]
    query, *vectors = await vectors_of(engine, inputs_of(engine, body, texts, is_batch=True))
    unit = PoolingSpec(pooling.pooling, normalize=True)
    wanted = embedding(query, unit)
    return [_scored(float(np.dot(wanted, embedding(vector, unit))), vector) for vector in vectors]


async def _by_words(engine: TokenizerManager, body: RerankBody) -> list[_Scored]:
    yes, no = engine.text.single_token("yes"), engine.text.single_token("no")
    if not engine.text.template_knows(RERANKS) or yes is None or no is None:
        raise RequestError(
            501,
            "/v1/rerank is not supported: this server generates text, and its chat template is not a reranker's: use a server with"
            " a classifier or an embedding model, or /v1/score.",
        )
    variables = {} if body.instruct is None else {"instruct": body.instruct}
    prompts: list[Prompt] = [
        engine.text.apply_chat_template(
            [{"role": "user", "content": body.query}, {"role": "user", "content": document}],
            add_generation_prompt=False,
            variables=variables,
        )
        for document in body.documents
    ]
    rows = await label_logprobs(engine, body, prompts, [[yes, no]] * len(prompts), add_special_tokens=False)
    return [_Scored(softmax(row.values)[0], row.rid, row.prompt_tokens, row.cached_tokens) for row in rows]


def _scored(score: float, vector: Vector) -> _Scored:
    return _Scored(score, vector.rid, vector.prompt_tokens, vector.cached_tokens)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
