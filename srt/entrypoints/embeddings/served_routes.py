"""Which routes a model serves: one that generates text, one that embeds texts, and a classifier have different ones."""

from __future__ import annotations

from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.model_facts import ModelFacts

GENERATE, EMBEDDINGS, ENCODE, CLASSIFY, RERANK, SCORE = (
    "/generate",
    "/v1/embeddings",
    "/encode",
    "/classify",
    "/v1/rerank",
    "/v1/score",
)
GENERATING = frozenset((GENERATE, SCORE, "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
EMBEDDING = frozenset((EMBEDDINGS, ENCODE))
POOLING = EMBEDDING | {CLASSIFY, RERANK}


def check_served(path: str, model: ModelFacts) -> None:
    """Raise RequestError (501) if the route is not one that this model serves."""
    reason = reason_to_refuse(path, model)
    if reason is not None:
        raise RequestError(501, f"{path} is not supported: this server {reason}.")


def check_path(path: str, service: Service) -> None:
    """Do the same for a server that is ready. One that is not says so by itself."""
    if path in GENERATING | POOLING and service.is_ready:
        check_served(path, service.engine().model)


def reason_to_refuse(path: str, model: ModelFacts) -> str | None:
    """Return what the server does instead, as the rest of a sentence; None if the model serves the route."""
    pooling = model.pooling
    if pooling is None:
        if path not in EMBEDDING | {CLASSIFY}:
            return None
        return "generates text: use a server with an embedding model or a classifier, or start one with --is-embedding"
    if path in GENERATING:
        only = "scores texts with a classifier" if pooling.is_classifier else "embeds texts"
        return f"{only}, and generates none: use a server with a model that generates text"
    if path in EMBEDDING and pooling.is_classifier:
        return f"scores texts with a classifier: use {CLASSIFY}"
    if path == CLASSIFY and not pooling.is_classifier:
        return f"embeds texts and has no classes for them: use {EMBEDDINGS}"
    if path == RERANK and len(pooling.labels) > 1:
        return f"has a classifier of {len(pooling.labels)} labels, and ranks need a single score: use {CLASSIFY}"
    return None
