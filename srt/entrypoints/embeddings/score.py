"""/v1/score as SGLang has it: how likely each of some tokens is to follow a text. Needs a model that generates text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from srt.entrypoints.embeddings.answer_types import Scores
from srt.entrypoints.embeddings.bodies import Prompt, ScoreBody, TextsBody
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.models import check_model
from srt.entrypoints.request_schema import renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import run_all
from srt.managers.tokenizer_manager.api_types import GenerateInput, LogprobRequest, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager

NAMES_HERE = {"text": "items", "input_ids": "items", "token_ids_logprob": "label_token_ids"}


class LabelLogprobs(Struct, frozen=True):
    """The log-probabilities of a prompt's labels as its next token."""

    values: list[float]
    rid: str
    prompt_tokens: int
    cached_tokens: int


async def label_logprobs(
    engine: TokenizerManager,
    body: TextsBody,
    prompts: Sequence[Prompt],
    labels: Sequence[list[int]],
    *,
    add_special_tokens: bool = True,
) -> list[LabelLogprobs]:
    """Return what the model says about the labels behind each prompt. One token is drawn behind each; nobody sees it."""
    params = engine.sampling_params({"max_new_tokens": 1, "temperature": 0, "ignore_eos": True})
    inputs = [
        GenerateInput(
            params=params,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            rid=rid,
            logprobs=LogprobRequest(output=True, ids=tuple(ids)),
            priority=body.priority,
            is_logged=not body.no_logs,
            is_counted=body.log_metrics,
            add_special_tokens=add_special_tokens,
        )
        for prompt, ids, rid in zip(prompts, labels, body.rids(len(prompts), is_batch=True), strict=True)
    ]
    found: dict[int, LabelLogprobs] = {}

    async def collect(prompt: int, handle: RequestHandle) -> None:
        (update,) = await handle.collect()
        if not update.output_logprobs:
            raise RequestError(503, "The request was aborted before its labels were scored.")
        values = [logprob for logprob, _ in update.output_logprobs[0].of_ids]
        found[prompt] = LabelLogprobs(values, update.rid, update.prompt_tokens, update.cached_tokens)

    await run_all(engine, inputs, collect)
    return [found[prompt] for prompt in range(len(inputs))]


async def score(exchange: Exchange, service: Service) -> None:
    """Score items: the probability of each label token behind the query and an item. Needs a model that generates text."""
    body = ScoreBody.parse(await exchange.read_json())
    model = check_model(body.model, service)
    engine = service.engine()

    async def answer() -> None:
        await exchange.send_json(await scores_of(engine, body, model))

    await exchange.run_while_connected(answer())


async def scores_of(engine: TokenizerManager, body: ScoreBody, model: str) -> Scores:
    prompts = body.prompts()
    try:
        rows = await label_logprobs(engine, body, prompts, body.labels(len(prompts)))
    except RequestError as error:
        raise renamed(error, NAMES_HERE) from error
    num_tokens = sum(row.prompt_tokens for row in rows)
    return {
        "scores": [_scores(row.values, body) for row in rows],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "object": "scoring",
    }


def _scores(logprobs: list[float], body: ScoreBody) -> list[float]:
    return (
        softmax([value / body.temperature for value in logprobs])
        if body.apply_softmax
        else list(map(math.exp, logprobs))
    )


def softmax(values: Sequence[float]) -> list[float]:
    """Return shares that add up to 1, also where all values are -inf."""
    most = max(values)
    weights: list[Any] = [math.exp(value - most) if most > -math.inf else 1.0 for value in values]
    return [weight / sum(weights) for weight in weights]
