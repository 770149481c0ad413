"""/openapi.json: the description of every route. Request bodies are described by the classes that parse them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from srt.entrypoints import (
    adapters,
    answers,
    health,
    memory_loan,
    metrics,
    native,
    operations,
    parsing,
    profiling,
    tokenizing,
    web_page,
    weight_groups,
    weight_saving,
    weights,
)
from srt.entrypoints.answer_schemas import answer_schema
from srt.entrypoints.anthropic import messages
from srt.entrypoints.anthropic.answers import AnthropicError, Message, MessageEvent, TokenCount
from srt.entrypoints.anthropic.schema import CountTokensBody, MessagesBody
from srt.entrypoints.body_schemas import Schema, body_schema, with_values
from srt.entrypoints.embeddings import answer_types, embedding_routes, rerank, score
from srt.entrypoints.embeddings.bodies import DimensionsBody, EmbeddingsBody, EncodeBody, RerankBody, ScoreBody
from srt.entrypoints.embeddings.served_routes import reason_to_refuse
from srt.entrypoints.errors import is_anthropic, is_openai
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai import chat, completions, models
from srt.entrypoints.openai.models import DEFAULT_MODEL
from srt.entrypoints.openai.responses import response_types
from srt.entrypoints.openai.responses import routes as responses
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.entrypoints.openai.schema import ChatBody, CompletionBody
from srt.entrypoints.request_schema import RequestBody
from srt.entrypoints.route_access import OPEN_TO_ALL
from srt.entrypoints.service import Service
from srt.server_args import ServerArgs
from srt.version import __version__

Handler = Callable[[Exchange, Service], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Handler]]

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain; charset=utf-8"
STATUSES = {
    400: "Something in the request is wrong, and the message names it.",
    401: "The API key is missing or wrong.",
    403: "The admin API key is needed, or the origin of the web page is not allowed.",
    404: "There is no such model or response.",
    413: "The body is too large.",
    415: "The body is not of the type that the route reads: JSON, unless it says otherwise.",
    429: "The queue is full: try again after the seconds that Retry-After says.",
    500: "The server failed with an internal error: its log has the details.",
    501: "The server does not support this; the message says why.",
    503: "The server is starting, ending, overloaded or without its engine: try again after the seconds that Retry-After says.",
    504: "The request ran longer than --request-running-timeout allows.",
}
_BODY = (400, 413, 415)
_RETRY = (429, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """A handler's parameters and answers. Its description is `text`, or else the handler's docstring."""

    tag: str
    answer: Any = None  # type of a 200's JSON, or its schema; None: no JSON
    content: str = JSON  # content type of a 200's body; empty: no body
    body: type[RequestBody] | None = None
    file: str = ""  # content type of a body that is a file
    query: Mapping[str, tuple[Schema, str]] = field(default_factory=dict)
    errors: tuple[int, ...] = (503,)
    chunk: Any = None  # type of a stream's events, if the body may ask for a stream
    text: str = ""


_OPTIONS = {
    f.name: {"description": f.metadata["help"][0].upper() + f.metadata["help"][1:] + "."}
    for f in dataclasses.fields(ServerArgs)
}
_OBJECT: Schema = {"type": "object"}
_GENERATING = (*_BODY, 404, *_RETRY, 504)

OPERATIONS: Mapping[Handler, Operation] = MappingProxyType(
    {
        completions.complete: Operation(
            "OpenAI",
            answers.Completion,
            body=CompletionBody,
            errors=_GENERATING,
            chunk=answers.CompletionChunk,
            text="Continue a text, for one prompt or many.",
        ),
        chat.chat: Operation(
            "OpenAI",
            answers.ChatCompletion,
            body=ChatBody,
            errors=_GENERATING,
            chunk=answers.ChatChunk,
            text="Generate the next message of a conversation.",
        ),
        messages.create_message: Operation(
            "Anthropic", Message, body=MessagesBody, errors=_GENERATING, chunk=MessageEvent
        ),
        messages.count_tokens: Operation("Anthropic", TokenCount, body=CountTokensBody, errors=(*_BODY, 404, 503)),
        responses.create: Operation(
            "OpenAI responses",
            response_types.Response,
            body=ResponsesBody,
            errors=_GENERATING,
            chunk=response_types.ResponseEvent,
            text="Generate the next items of a conversation.",
        ),
        responses.retrieve: Operation("OpenAI responses", response_types.Response, errors=(400, 404)),
        responses.delete: Operation("OpenAI responses", response_types.DeletedResponse, errors=(404,)),
        responses.cancel: Operation("OpenAI responses", response_types.Response, errors=(400, 404)),
        models.list_models: Operation("OpenAI", answers.ModelCards, text="List the server's model names."),
        models.one_model: Operation(
            "OpenAI", answers.ModelCard, errors=(404, 503), text="Describe one of the server's model names."
        ),
        native.generate: Operation(
            "Native",
            answers.Generated | list[answers.Generated],
            body=GenerateBody,
            errors=(*_BODY, *_RETRY, 504),
            chunk=answers.Generated | list[answers.Generated],
            text="Continue a text or token ids. A list in place of a single prompt makes it a batch.",
        ),
        embedding_routes.create_embeddings: Operation(
            "OpenAI", answer_types.Embeddings, body=EmbeddingsBody, errors=_GENERATING
        ),
        embedding_routes.encode: Operation(
            "Native",
            answer_types.Encoded | list[answer_types.Encoded],
            body=DimensionsBody,
            errors=(*_BODY, *_RETRY, 504),
        ),
        embedding_routes.classify: Operation(
            "Native",
            answer_types.Encoded | list[answer_types.Encoded],
            body=EncodeBody,
            errors=(*_BODY, *_RETRY, 504),
        ),
        rerank.rerank: Operation("Scores", list[answer_types.Ranked], body=RerankBody, errors=(*_GENERATING, 501)),
        score.score: Operation("Scores", answer_types.Scores, body=ScoreBody, errors=_GENERATING),
        tokenizing.tokenize: Operation(
            "Native", answers.Tokens, body=tokenizing.TokenizeBody, errors=(*_BODY, 404, 503)
        ),
        tokenizing.detokenize: Operation(
            "Native", answers.Texts, body=tokenizing.DetokenizeBody, errors=(*_BODY, 404, 503)
        ),
        parsing.parse_function_call: Operation(
            "Native", answers.ParsedCalls, body=parsing.ParseCallsBody, errors=(*_BODY, 503)
        ),
        parsing.separate_reasoning: Operation(
            "Native", answers.SeparatedReasoning, body=parsing.SeparateReasoningBody, errors=(*_BODY, 503)
        ),
        native.abort_request: Operation(
            "Native",
            content="",
            body=native.AbortBody,
            errors=(*_BODY, 503),
            text="Abort requests by name: one, all of a batch, or all that run. An unknown name is not an error.",
        ),
        native.pause_generation: Operation("Native", answers.Done, body=native.PauseBody, errors=(*_BODY, 503)),
        native.continue_generation: Operation(
            "Native",
            answers.Done,
            body=native.ContinueBody,
            errors=(*_BODY, 503),
            text="Continue after /pause_generation. Does nothing if generation is not paused.",
        ),
        native.flush_cache: Operation(
            "Native",
            content=PLAIN,
            query={
                "timeout": (
                    {"type": "number", "minimum": 0, "maximum": 600},
                    "Seconds to wait for running requests.",
                )
            },
            errors=(400, 503),
        ),
        native.model_info: Operation("Native", _OBJECT, text="Return facts about the model."),
        native.server_info: Operation(
            "Native",
            {"type": "object", "properties": _OPTIONS},
            query={
                "deep": (
                    {"enum": ["true", "false", "1", "0"]},
                    "Compare the tables of all processes; a difference is a 500 that names it.",
                )
            },
            errors=(400, 500, 503),
            text="Return all options with their resolved values, limits and counters.",
        ),
        metrics.metrics: Operation("Operation", content=metrics.CONTENT_TYPE.decode(), errors=()),
        operations.configure_logging: Operation("Operation", _OBJECT, body=operations.LoggingBody, errors=_BODY),
        adapters.load_lora_adapter: Operation(
            "Adapters", answers.LoadedAdapters, body=adapters.LoadAdapterBody, errors=(*_BODY, 501, 503)
        ),
        adapters.unload_lora_adapter: Operation(
            "Adapters", answers.LoadedAdapters, body=adapters.UnloadAdapterBody, errors=(*_BODY, 501, 503)
        ),
        weights.update_weights_from_disk: Operation(
            "Weights", answers.UpdatedWeights, body=weights.UpdateFromDiskBody, errors=(*_BODY, 503)
        ),
        weights.update_weights_from_tensor: Operation(
            "Weights",
            answers.UpdatedWeights,
            file=weights.TENSORS,
            query={
                weights.VERSION: (
                    {"type": "string"},
                    "The name of the weights from then on; unchanged if it is empty.",
                ),
                weights.ABORTS: ({"enum": ["true", "false"]}, "End what runs."),
            },
            errors=(*_BODY, 503),
        ),
        weight_groups.init_weights_update_group: Operation(
            "Weights", answers.Succeeded, body=weight_groups.InitGroupBody, errors=(*_BODY, 503)
        ),
        weight_groups.update_weights_from_distributed: Operation(
            "Weights", answers.UpdatedWeights, body=weight_groups.ReceiveBody, errors=(*_BODY, 503)
        ),
        weight_groups.destroy_weights_update_group: Operation(
            "Weights", answers.Succeeded, body=weight_groups.DestroyGroupBody, errors=(*_BODY, 503)
        ),
        memory_loan.release_memory_occupation: Operation(
            "Weights", answers.Succeeded, body=memory_loan.ReleaseBody, errors=(*_BODY, 503)
        ),
        memory_loan.resume_memory_occupation: Operation(
            "Weights", answers.Succeeded, body=memory_loan.ResumeBody, errors=(*_BODY, 503)
        ),
        weights.weights_checker: Operation(
            "Weights", answers.WeightHashes, body=weights.CheckBody, errors=(*_BODY, 503)
        ),
        weights.get_weights_by_name: Operation(
            "Weights", {"type": "array"}, body=weights.NamedBody, errors=(*_BODY, 503)
        ),
        weight_saving.save_sharded_model: Operation(
            "Weights", answers.Succeeded, body=weight_saving.SaveBody, errors=(*_BODY, 503)
        ),
        weights.update_weight_version: Operation(
            "Weights", answers.RenamedWeights, body=weights.RenameBody, errors=(*_BODY, 503)
        ),
        operations.freeze_gc: Operation("Operation", content=PLAIN, body=operations.NoBody, errors=_BODY),
        profiling.start_profile: Operation("Operation", _OBJECT, body=profiling.StartBody, errors=_BODY),
        profiling.stop_profile: Operation("Operation", _OBJECT, errors=(400, 500, 503)),
        health.health: Operation("Health", _OBJECT),
        health.ready: Operation("Health", _OBJECT),
        health.health_generate: Operation("Health", content=""),
        web_page.file: Operation("Page", content="text/html; charset=utf-8", errors=()),
        web_page.stats: Operation("Page", content=EVENTS, errors=()),
    }
)


# Paths that hold a name, and so are not in the table of routes.
WITH_PARAMETERS: Routes = MappingProxyType(
    {
        "/v1/models/{model}": {"GET": models.one_model},
        "/v1/responses/{response_id}": {"GET": responses.retrieve, "DELETE": responses.delete},
        "/v1/responses/{response_id}/cancel": {"POST": responses.cancel},
    }
)
_PATH_PARAMETERS: Mapping[str, tuple[Schema, str]] = MappingProxyType(
    {
        "model": ({"type": "string", "format": "model-name"}, "The model name, which may contain slashes."),
        "response_id": ({"type": "string", "minLength": 1, "pattern": "^[^/]+$"}, "The id of a stored response."),
    }
)


def describe(routes: Routes, service: Service) -> dict[str, Any]:
    """Return the OpenAPI description. Once the engine is ready, it includes the model's vocabulary size and limits, and which routes the
    model does not serve."""
    paths: dict[str, Any] = {path: _path(path, methods) for path, methods in routes.items()} | _refused(routes, service)
    paths |= {path: _path(path, methods) for path, methods in WITH_PARAMETERS.items()}
    paths |= {path: {"post": _missing(reason)} for path, reason in native.UNSUPPORTED.items()}
    description = {
        "openapi": "3.1.0",
        "info": {
            "title": "srt",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and SGLang's interfaces to a language model. Fields that are not described are refused.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                "AnthropicError": answer_schema(AnthropicError),
                "OpenAIError": answer_schema(answers.OpenAIError),
                "Error": answer_schema(answers.NativeError),
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "The server's --api-key."},
                "x-api-key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same, for /v1/messages.",
                },
            },
        },
        "security": [{"key": []}, {}],
    }
    filled: dict[str, Any] = with_values(description, _values(service))
    return filled


def _refused(routes: Routes, service: Service) -> dict[str, Any]:
    """Return the descriptions of the routes that the model does not serve."""
    if not service.is_ready:
        return {}
    reasons = {path: reason_to_refuse(path, service.engine().model) for path in routes}
    return {
        path: {method.lower(): _missing(reason) for method in routes[path]}
        for path, reason in reasons.items()
        if reason is not None
    }


def _values(service: Service) -> dict[str, dict[str, Any]]:
    adapters = models.adapter_names(service)
    names = list(dict.fromkeys((*service.args.model_names(), DEFAULT_MODEL, *adapters)))
    known: dict[str, dict[str, Any]] = {"model-name": {"enum": names}, "adapter-name": {"enum": ["", *adapters]}}
    if service.is_ready:
        engine = service.engine()
        known["token-id"] = {"maximum": engine.model.vocab_size - 1}
        most = min(engine.model.context_length, engine.limits.max_request_tokens)
        known["num-tokens"] = {"maximum": most}
    if not service.args.uses_priorities:
        known["priority"] = {"minimum": 0, "maximum": 0}
    known["replica"] = {"maximum": service.args.dp_size - 1}
    return known


def _path(path: str, methods: Mapping[str, Handler]) -> dict[str, Any]:
    return {method.lower(): _operation(path, method, handler) for method, handler in methods.items()}


def _operation(path: str, method: str, handler: Handler) -> dict[str, Any]:
    known = OPERATIONS.get(handler, Operation("Server", _OBJECT))
    text = known.text or inspect.getdoc(handler) or ""
    written: dict[str, Any] = {
        "operationId": f"{method} {path}",
        "tags": [known.tag],
        "summary": text.split(". ")[0].split("\n")[0].rstrip("."),
        "description": text,
        "responses": _responses(path, known),
    }
    parameters = [
        {"name": name, "in": "query", "required": False, "description": described, "schema": schema}
        for name, (schema, described) in known.query.items()
    ]
    parameters += [
        {"name": name, "in": "path", "required": True, "description": described, "schema": schema}
        for name, (schema, described) in _PATH_PARAMETERS.items()
        if f"{{{name}}}" in path
    ]
    if parameters:
        written["parameters"] = parameters
    if is_anthropic(path):
        written["security"] = [{"key": []}, {"x-api-key": []}, {}]
    if known.body is not None and method != "GET":
        written["requestBody"] = {"required": True, "content": {JSON: {"schema": body_schema(known.body)}}}
    if known.file:
        schema = {"type": "string", "format": "binary"}
        written["requestBody"] = {"required": True, "content": {known.file: {"schema": schema}}}
    return written


def _responses(path: str, known: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if known.content:
        content[known.content] = {"schema": answer_schema(str if known.answer is None else known.answer)}
    if known.chunk is not None:
        content[EVENTS] = {
            "schema": {"type": "string"},
            "x-event": answer_schema(known.chunk),
        }
    responses: dict[str, Any] = {"200": {"description": "The answer.", "headers": _REQUEST_ID, "content": content}}
    for status in sorted({*known.errors, 403, *(() if path in OPEN_TO_ALL else (401,))}):
        responses[str(status)] = _error(path, status)
    return responses


def _missing(reason: str) -> dict[str, Any]:
    return {
        "tags": ["Not supported"],
        "summary": f"Not supported: this server {reason}",
        "description": f"Answers 501: this server {reason}.",
        "responses": {str(status): _error("/", status) for status in (501, 401, 403)},
    }


def _error(path: str, status: int) -> dict[str, Any]:
    name = "AnthropicError" if is_anthropic(path) else "OpenAIError" if is_openai(path) else "Error"
    headers = dict(_REQUEST_ID)
    if status in _RETRY:
        headers["retry-after"] = {"description": "Seconds until another try.", "schema": {"type": "string"}}
    return {
        "description": STATUSES[status],
        "headers": headers,
        "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }


_REQUEST_ID = {
    "x-request-id": {"description": "The client's request id, or a random one.", "schema": {"type": "string"}}
}
