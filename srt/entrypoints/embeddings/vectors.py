"""The vectors of texts: requests whose only result is what the model's pooling makes of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from srt.entrypoints.embeddings.bodies import Prompt, TextsBody
from srt.entrypoints.request_schema import bad_parameter
from srt.entrypoints.streaming import run_all
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, LogprobRequest, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle, TokenizerManager
from srt.protocol.messages import Float32Array
from srt.utils.pooling_config import PoolingSpec

LEAST_LENGTH = 1e-12  # a vector that is shorter than this is not scaled to length 1


class Vector(Struct, frozen=True):
    """The vector of one text, as the model gives it, or the scores of a classifier's labels."""

    values: Float32Array
    rid: str
    prompt_tokens: int
    cached_tokens: int


def inputs_of(
    engine: TokenizerManager, body: TextsBody, prompts: Sequence[Prompt], *, is_batch: bool
) -> list[GenerateInput]:
    """Return the requests for the vectors of texts or lists of token ids. The engine draws one token behind each; nobody sees it."""
    params = engine.sampling_params({"max_new_tokens": 1, "temperature": 0, "ignore_eos": True})
    return [
        GenerateInput(
            params=params,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            rid=rid,
            logprobs=LogprobRequest(output=True),
            priority=body.priority,
            is_logged=not body.no_logs,
            is_counted=body.log_metrics,
        )
        for prompt, rid in zip(prompts, body.rids(len(prompts), is_batch=is_batch), strict=True)
    ]


async def vectors_of(engine: TokenizerManager, inputs: Sequence[GenerateInput]) -> list[Vector]:
    """Run the requests of one call together; RequestError if one is refused, and then none of them runs on."""
    vectors: list[Vector | None] = [None] * len(inputs)

    async def collect(prompt: int, handle: RequestHandle) -> None:
        (update,) = await handle.collect()
        vectors[prompt] = _vector(update)

    await run_all(engine, inputs, collect)
    return [vector for vector in vectors if vector is not None]


def _vector(update: ChoiceUpdate) -> Vector:
    values = update.output_logprobs[0].vector if update.output_logprobs else None
    if values is None:
        raise RequestError(503, "The request was aborted before its vector was computed.")
    return Vector(values, update.rid, update.prompt_tokens, update.cached_tokens)


def pooling_of(engine: TokenizerManager) -> PoolingSpec:
    """Return how the engine's model pools. Routes that call this are refused to models that generate."""
    assert engine.model.pooling is not None, "the model generates text"
    return engine.model.pooling


def embedding(vector: Vector, spec: PoolingSpec, dimensions: int | None = None) -> Float32Array:
    """Return the embedding: the first `dimensions` values, or all, scaled to length 1 if the model does that."""
    values = vector.values[:dimensions]
    if not spec.normalize:
        return values
    length = float(np.linalg.norm(values.astype(np.float64)))
    scaled: Float32Array = (values / max(length, LEAST_LENGTH)).astype(np.float32)
    return scaled


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise bad_parameter(
            "dimensions", f"must lie between 1 and {hidden_size}, the size of an embedding, not {dimensions}"
        )
