"""/v1/models: the model names that this server answers to."""

from __future__ import annotations

import time

from srt.entrypoints.answers import ModelCard, ModelCards
from srt.entrypoints.errors import ApiError
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import bad_parameter
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


def find_model(name: str | None, lora_path: str | None, service: Service) -> tuple[str, str | None]:
    """Return (the model name for the answer, the name of the LoRA adapter or None) of a request.

    An adapter is named in place of the model, behind one of its names as `model:adapter`, or by `lora_path`.
    """
    names = service.args.model_names()
    adapter = None if name is None or name in names else _adapter_named(name, service)
    if adapter is None:
        return check_model(name, service), lora_path or None
    if lora_path and lora_path != adapter:
        raise bad_parameter("lora_path", f"is {lora_path[:200]!r}, but model names the adapter {adapter[:200]!r}")
    return name or adapter, adapter


def _adapter_named(model: str, service: Service) -> str | None:
    """Return the name of the adapter that a request's `model` names; None if it names none."""
    known = service.engine().adapters
    if known is None:
        return None
    behind = [model.removeprefix(f"{name}:") for name in service.args.model_names() if model.startswith(f"{name}:")]
    return next((name for name in (model, *behind) if known.find(name) is not None), None)


def adapter_names(service: Service) -> list[str]:
    """Return the names of all LoRA adapters; none before the server is ready."""
    known = service.engine().adapters if service.is_ready else None
    return [] if known is None else list(known.all())


async def list_models(exchange: Exchange, service: Service) -> None:
    names = service.args.model_names()
    cards: ModelCards = {"object": "list", "data": [_card(name, service) for name in names] + _adapter_cards(service)}
    await exchange.send_json(cards)


async def one_model(exchange: Exchange, service: Service) -> None:
    """Return one model's card. Everything behind the prefix is the name, which may contain slashes."""
    name = exchange.path.removeprefix(_PREFIX)
    found = [card for card in _adapter_cards(service) if card["id"] == name]
    await exchange.send_json(found[0] if found else _card(check_model(name, service), service))


def _adapter_cards(service: Service) -> list[ModelCard]:
    known = service.engine().adapters
    if known is None:
        return []
    base = _card(service.args.model_names()[0], service)
    return [
        {**base, "id": name, "created": one.created, "root": one.folder, "parent": base["id"]}
        for name, one in known.all().items()
    ]


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
