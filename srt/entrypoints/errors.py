"""The JSON of errors, in the shape of the API that was called: Anthropic's under /v1/messages, OpenAI's under the rest of /v1, the native
one elsewhere."""

from __future__ import annotations

import orjson

from srt.entrypoints.answers import NativeError, OpenAIError, OpenAIErrorFields
from srt.entrypoints.anthropic.answers import AnthropicError
from srt.managers.tokenizer_manager.api_types import RequestError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGES = "/v1/messages"
RETRYABLE = frozenset((429, 503))


class ApiError(RequestError):
    """A RequestError with the machine-readable code that clients look for, such as model_not_found."""

    def __init__(self, status: int, message: str, parameter: str | None = None, *, code: str) -> None:
        super().__init__(status, message, parameter)
        self.code = code


def is_anthropic(path: str) -> bool:
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def is_openai(path: str) -> bool:
    return path.startswith("/v1/") and not is_anthropic(path)


def error_body(path: str, error: RequestError, request_id: str) -> AnthropicError | OpenAIError | NativeError:
    """Return the JSON of an error response."""
    if is_anthropic(path):
        return _anthropic_error(error, request_id)
    if is_openai(path):
        return {"error": _openai_error(error)}
    return {"error": {"message": error.message}}


def last_events(path: str, error: RequestError, request_id: str) -> bytes:
    """Return the end of a stream that has begun and fails: an event with the error, and what ends the API's streams."""
    if is_anthropic(path):
        return b"event: error\ndata: " + orjson.dumps(_anthropic_error(error, request_id)) + b"\n\n"
    return b"data: " + orjson.dumps({"error": _error_in_stream(path, error)}) + b"\n\ndata: [DONE]\n\n"


def _error_in_stream(path: str, error: RequestError) -> OpenAIErrorFields | dict[str, object]:
    if is_openai(path):
        return _openai_error(error)
    return {
        "message": error.message,
        "type": _error_type(error.status),
        "code": error.status,
        "retryable": error.status in RETRYABLE,
    }


def _anthropic_error(error: RequestError, request_id: str) -> AnthropicError:
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _openai_error(error: RequestError) -> OpenAIErrorFields:
    return {
        "message": error.message,
        "type": _error_type(error.status),
        "param": error.parameter,
        "code": getattr(error, "code", None),
    }


def _error_type(status: int) -> str:
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
