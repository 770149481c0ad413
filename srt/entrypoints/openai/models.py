"""/v1/models: the model names that this server answers to."""

from __future__ import annotations

import time

from srt.entrypoints.answers import ModelCard, ModelCards
from srt.entrypoints.errors import ApiError
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service

_PREFIX = "/v1/models/"
OWNER = "srt"
DEFAULT_MODEL = "default"  # the name that SGLang's request classes send if a client gives none


def check_model(name: str | None, service: Service) -> str:
    """Return the model name for the answer: the one asked for, or else the server's first. Raise ApiError (404) for an unknown name."""
    names = service.args.model_names()
    if name is None or (name == DEFAULT_MODEL and name not in names):
        return names[0]
    if name not in names:
        raise ApiError(404, f"The model {name[:200]!r} does not exist.", "model", code="model_not_found")
    return name


async def list_models(exchange: Exchange, service: Service) -> None:
    cards: ModelCards = {"object": "list", "data": [_card(name, service) for name in service.args.model_names()]}
    await exchange.send_json(cards)


async def one_model(exchange: Exchange, service: Service) -> None:
    """Return one model's card. Everything behind the prefix is the name, which may contain slashes."""
    await exchange.send_json(_card(check_model(exchange.path.removeprefix(_PREFIX), service), service))


def _card(name: str, service: Service) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": OWNER,
        "root": service.args.model_path,
        "parent": None,
        "max_model_len": service.engine().limits.max_request_tokens,
    }
