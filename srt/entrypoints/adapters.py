"""Routes that load and unload LoRA adapters while the server runs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar

from srt.entrypoints.answers import LoadedAdapters
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import NAME, RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.lora.adapter_names import AdapterNames
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.utils.model_error import ModelError

LOAD, UNLOAD = "load", "unload"


class LoadAdapterBody(RequestBody):
    """POST /load_lora_adapter."""

    FAMILY: ClassVar[str] = "load_lora_adapter"

    lora_name: str = described("The name that requests use.", ..., string=NAME)
    lora_path: str = described(
        "The folder on the server's machine, as PEFT has saved it.", ..., string={"minLength": 1}
    )
    pinned: bool = described("The workers hold it always, and it never makes room for others.", False)


class UnloadAdapterBody(RequestBody):
    """POST /unload_lora_adapter."""

    FAMILY: ClassVar[str] = "unload_lora_adapter"

    lora_name: str = described("The name of the adapter.", ..., string=NAME)


async def load_lora_adapter(exchange: Exchange, service: Service) -> None:
    """Read and check an adapter, and answer requests that name it from now on. Under a known name it replaces the other one."""
    await exchange.send_json(await load(LoadAdapterBody.parse(await exchange.read_json()), service))


async def unload_lora_adapter(exchange: Exchange, service: Service) -> None:
    """Forget an adapter's name. Requests that run with it go on to their end."""
    await exchange.send_json(unload(UnloadAdapterBody.parse(await exchange.read_json()), service))


async def load(body: LoadAdapterBody, service: Service) -> LoadedAdapters:
    names = _names(service, LOAD)
    if body.lora_name in service.args.model_names():
        raise bad_parameter("lora_name", "is the name of the model itself: choose another one")
    try:
        await asyncio.to_thread(partial(names.add, body.lora_name, body.lora_path, is_pinned=body.pinned))
    except ModelError as error:
        raise RequestError(400, str(error), "lora_path") from error
    service.engine().pin_adapters()
    return _loaded(names)


def unload(body: UnloadAdapterBody, service: Service) -> LoadedAdapters:
    names = _names(service, UNLOAD)
    if not names.remove(body.lora_name):
        raise bad_parameter("lora_name", f"{body.lora_name[:200]!r} is not the name of an adapter")
    service.engine().pin_adapters()
    return _loaded(names)


def _names(service: Service, what: str) -> AdapterNames:
    names = service.engine().adapters
    if names is None:
        raise RequestError(501, f"This server cannot {what} LoRA adapters: start it with --enable-lora.")
    return names


def _loaded(names: AdapterNames) -> LoadedAdapters:
    return {"success": True, "loaded_adapters": {name: known.folder for name, known in names.all().items()}}
