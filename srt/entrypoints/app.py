"""The ASGI application: the table of routes and their handlers, the check of API keys and origins, and the answers to errors."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from srt.entrypoints import (
    adapters,
    health,
    memory_loan,
    metrics,
    native,
    openapi,
    operations,
    parsing,
    profiling,
    tokenizing,
    web_page,
    weight_groups,
    weight_saving,
    weights,
)
from srt.entrypoints.anthropic import messages
from srt.entrypoints.cors import Cors
from srt.entrypoints.embeddings import embedding_routes, rerank, score
from srt.entrypoints.embeddings.served_routes import CLASSIFY, EMBEDDINGS, ENCODE, RERANK, SCORE, check_path
from srt.entrypoints.errors import ApiError, is_anthropic
from srt.entrypoints.exchange import ClientGone, Exchange, Receive, Scope, Send
from srt.entrypoints.openai import chat, completions, models
from srt.entrypoints.openai.responses import routes as responses
from srt.entrypoints.route_access import ADMIN, OPEN_TO_ALL
from srt.entrypoints.service import Service
from srt.managers.process.tracer import HTTP
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.utils.host import is_loopback
from srt.utils.logs import REQUEST_ID

Handler = Callable[[Exchange, Service], Awaitable[None]]


async def _describe(exchange: Exchange, service: Service) -> None:
    """Return this OpenAPI description."""
    await exchange.send_json(openapi.describe(ROUTES, service))


_MODELS = "/v1/models"
ROUTES: Mapping[str, Mapping[str, Handler]] = {
    "/health": {"GET": health.health},
    "/ping": {"GET": health.health},
    "/ready": {"GET": health.ready},
    "/health_generate": {"GET": health.health_generate},
    "/v1/models": {"GET": models.list_models},
    "/v1/completions": {"POST": completions.complete},
    "/v1/chat/completions": {"POST": chat.chat},
    responses.PATH: {"POST": responses.create},
    "/v1/messages": {"POST": messages.create_message},
    "/v1/messages/count_tokens": {"POST": messages.count_tokens},
    EMBEDDINGS: {"POST": embedding_routes.create_embeddings},
    ENCODE: {"POST": embedding_routes.encode},
    CLASSIFY: {"POST": embedding_routes.classify},
    RERANK: {"POST": rerank.rerank},
    SCORE: {"POST": score.score},
    "/generate": {"POST": native.generate, "PUT": native.generate},
    "/tokenize": {"POST": tokenizing.tokenize},
    "/v1/tokenize": {"POST": tokenizing.tokenize},
    "/detokenize": {"POST": tokenizing.detokenize},
    "/v1/detokenize": {"POST": tokenizing.detokenize},
    "/parse_function_call": {"POST": parsing.parse_function_call},
    "/separate_reasoning": {"POST": parsing.separate_reasoning},
    "/model_info": {"GET": native.model_info},
    "/get_model_info": {"GET": native.model_info},
    "/server_info": {"GET": native.server_info},
    "/get_server_info": {"GET": native.server_info},
    "/flush_cache": {"GET": native.flush_cache, "POST": native.flush_cache},
    "/pause_generation": {"POST": native.pause_generation},
    "/continue_generation": {"POST": native.continue_generation},
    "/abort_request": {"POST": native.abort_request},
    "/update_weights_from_disk": {"POST": weights.update_weights_from_disk},
    "/update_weights_from_tensor": {"POST": weights.update_weights_from_tensor},
    "/init_weights_update_group": {"POST": weight_groups.init_weights_update_group},
    "/update_weights_from_distributed": {"POST": weight_groups.update_weights_from_distributed},
    "/destroy_weights_update_group": {"POST": weight_groups.destroy_weights_update_group},
    "/release_memory_occupation": {"POST": memory_loan.release_memory_occupation},
    "/resume_memory_occupation": {"POST": memory_loan.resume_memory_occupation},
    "/weights_checker": {"POST": weights.weights_checker},
    "/get_weights_by_name": {"POST": weights.get_weights_by_name},
    "/save_sharded_model": {"POST": weight_saving.save_sharded_model},
    "/update_weight_version": {"POST": weights.update_weight_version},
    **{path: {"POST": adapters.load_lora_adapter} for path in ("/load_lora_adapter", "/v1/load_lora_adapter")},
    **{path: {"POST": adapters.unload_lora_adapter} for path in ("/unload_lora_adapter", "/v1/unload_lora_adapter")},
    **{path: {"GET": web_page.file} for path in web_page.FILES},
    "/page/stats": {"GET": web_page.stats},
    "/metrics": {"GET": metrics.metrics},
    "/configure_logging": {"POST": operations.configure_logging},
    "/freeze_gc": {"GET": operations.freeze_gc, "POST": operations.freeze_gc},
    "/start_profile": {"GET": profiling.start_profile, "POST": profiling.start_profile},
    "/stop_profile": {"GET": profiling.stop_profile, "POST": profiling.stop_profile},
    "/openapi.json": {"GET": _describe},
}

_log = logging.getLogger(__name__)


class App:
    """The ASGI application. It turns every error into an answer in the format of the API that was called."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cors = Cors(service.args.cors_allow_origins, is_loopback(service.args.host))
        self._num_traced = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.count_response(message["status"])
                message["headers"] += self._cors.headers(origin)
            await send(message)

        if self._service.tracer.is_on:
            await self._traced(scope, receive, send_counted)
        else:
            await self._handle(Exchange(scope, receive, send_counted))

    async def _handle(self, exchange: Exchange) -> None:
        REQUEST_ID.set(exchange.request_id)
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except RequestError as error:
            await exchange.send_error(error, _challenge(error))
        except Exception:
            _log.exception("%s %s failed", exchange.method, exchange.path)
            await exchange.send_error(
                RequestError(500, "The server failed with an internal error: its log has the details.")
            )

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path
        if self._cors.is_preflight(exchange):
            await self._cors.answer_preflight(exchange)
            return
        self._cors.check(exchange, changes_something=path in ADMIN)
        self._check_key(exchange)
        if path in native.UNSUPPORTED:
            raise RequestError(501, f"{path} is not supported: this server {native.UNSUPPORTED[path]}.")
        methods = _methods(path)
        if methods is None:
            raise ApiError(404, _missing(path), code="not_found")
        if "GET" in methods and path not in ADMIN:  # a HEAD request must not change anything
            methods = {**methods, "HEAD": methods["GET"]}
        handler = methods.get(exchange.method)
        if handler is None:
            await _send_methods(exchange, [*methods, "OPTIONS"])
            return
        check_path(path, self._service)
        await handler(exchange, self._service)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, and trace its whole duration and each wait for the socket."""
        tracer = self._service.tracer
        self._num_traced += 1
        number = self._num_traced << 16 | self._service.index  # unique over all frontends
        name = f"{scope['method']} {scope['path']}"

        async def send_traced(message: MutableMapping[str, Any]) -> None:
            began_s = time.monotonic()
            await send(message)
            tracer.mark(
                HTTP, number, "sent", num_bytes=len(message.get("body", b"")), waited_s=time.monotonic() - began_s
            )

        exchange = Exchange(scope, receive, send_traced)
        tracer.begin(HTTP, number, name, request_id=exchange.request_id)
        try:
            await self._handle(exchange)
        finally:
            tracer.end(HTTP, number, name)

    def _check_key(self, exchange: Exchange) -> None:
        args, path = self._service.args, exchange.path
        if path in OPEN_TO_ALL or (path == "/metrics" and args.enable_metrics):
            return
        is_for_admin = path in ADMIN and args.admin_api_key is not None
        if args.api_key is None and not is_for_admin:
            return
        given = _given_keys(exchange)
        if any(_is_key(one, args.admin_api_key) for one in given):
            return
        if any(_is_key(one, args.api_key) for one in given):
            if not is_for_admin:
                return
            raise ApiError(403, f"{path} needs the admin API key.", code="admin_api_key_needed")
        which = "admin API key" if is_for_admin else "API key"
        where = "in the header x-api-key or as a bearer token" if is_anthropic(path) else "as a bearer token"
        hint = "; --enable-metrics opens /metrics to all" if path == "/metrics" else ""
        raise ApiError(401, f"A valid {which} is needed, {where}{hint}.", code="invalid_api_key")


def _methods(path: str) -> Mapping[str, Handler] | None:
    """Return the handlers of a path by method; None for an unknown path."""
    if path.startswith(_MODELS + "/") and path.strip("/") != _MODELS.strip("/"):
        return {"GET": models.one_model}
    if path.startswith(responses.PATH + "/"):
        return responses.methods(path)
    return ROUTES.get(path)


async def _send_methods(exchange: Exchange, methods: list[str]) -> None:
    """Answer OPTIONS with the allowed methods; refuse any other method."""
    allowed = ", ".join(methods)
    headers = [(b"allow", allowed.encode())]
    if exchange.method == "OPTIONS":
        await exchange.send(200, b"", headers)
        return
    sentence = f"{exchange.path} accepts {allowed}, not {exchange.method}."
    await exchange.send_error(ApiError(405, sentence, code="method_not_allowed"), headers)


def _missing(path: str) -> str:
    """Return the message for an unknown path. It suggests a known path that differs only in slashes or in /v1."""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    without = plain
    while without.startswith("/v1/"):
        without = without[3:]
    for meant in (plain, "/v1" + without, without):
        if meant != path and (_methods(meant) is not None or meant in native.UNSUPPORTED):
            return f"This server has no {path[:200]}; did you mean {meant[:200]}?"
    return f"This server has no {path[:200]}: /openapi.json lists what it has."


def _given_keys(exchange: Exchange) -> list[bytes]:
    """Return what the client gives as its key: the bearer token, and on Anthropic's routes the header that its clients send."""
    kind, _, token = (exchange.header(b"authorization") or b"").partition(b" ")
    keys = [token] if kind.lower() == b"bearer" else []
    own = exchange.header(b"x-api-key") if is_anthropic(exchange.path) else None
    return keys if own is None else [*keys, own]


def _is_key(given: bytes, key: str | None) -> bool:
    return key is not None and hmac.compare_digest(given.strip(), key.encode())


def _challenge(error: RequestError) -> list[tuple[bytes, bytes]]:
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
