"""/v1/models: the names that this server answers to."""

from __future__ import annotations

import time
from typing import Any

from srt.entrypoints.errors import ApiError
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service

_PREFIX = "/v1/models/"
OWNER = "srt"
DEFAULT_MODEL = "default"  # what SGLang's request classes call the model where a client names none


def check_model(name: str | None, service: Service) -> str:
    """The name to answer under: the one asked for, or the first of ours if none was. 404 if it is not served."""
    names = service.args.model_names()
    if name is None or (name == DEFAULT_MODEL and name not in names):
        return names[0]
    if name not in names:
        raise ApiError(404, f"The model {name[:200]!r} does not exist.", "model", code="model_not_found")
    return name


async def list_models(exchange: Exchange, service: Service) -> None:
    await exchange.send_json({"object": "list", "data": [_card(name, service) for name in service.args.model_names()]})


async def one_model(exchange: Exchange, service: Service) -> None:
    """A name may hold slashes: everything behind the prefix is the name."""
    await exchange.send_json(_card(check_model(exchange.path.removeprefix(_PREFIX), service), service))


def _card(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": OWNER,
        "root": service.args.model_path,
        "parent": None,
        "max_model_len": service.engine().limits.max_request_tokens,
    }
