"""The writer of a call's answer as a response: one JSON, or the events of a stream. Both come from the same items."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Literal

from srt.entrypoints.openai.chat import ChatCall
from srt.entrypoints.openai.parts import Usage
from srt.entrypoints.openai.responses.output_items import OutputItems
from srt.entrypoints.openai.responses.response_types import (
    OutputEvent,
    RequestEcho,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    StatusEvent,
)
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.entrypoints.streaming import event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager

Status = Literal["completed", "incomplete", "failed"]
OnEnd = Callable[[Response], None]


class ResponseAnswer:
    """The response of one call. `on_end` gets it when it has ended, before the client does."""

    def __init__(
        self, body: ResponsesBody, call: ChatCall, engine: TokenizerManager, is_stored: bool, on_end: OnEnd
    ) -> None:
        self._body = body
        self._call = call
        self._is_stored = is_stored
        self._on_end = on_end
        self._parts = None if call.form is None else call.form.new_parts(engine, call.request.params)
        self._usage = Usage(call.body)
        self._usage.parts = [] if self._parts is None else [self._parts]
        self._num_events = itertools.count()
        self._items = OutputItems(self._next_number)
        self._has_begun = False
        self._finish: Finish | None = None

    # ---- Whole

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add the output; `update` is all of it."""
        self._push(prompt, update)

    def result(self) -> Response:
        response = self._ended()
        self._on_end(response)
        return response

    def failed(self, error: RequestError) -> Response:
        """Return the response that ends with this error, with what there was of its output."""
        self._items.finish("incomplete")
        code: Literal["rate_limit_exceeded", "invalid_prompt", "server_error"] = "server_error"
        if error.status < 500:
            code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        response = self._response("failed", {"code": code, "message": error.message})
        self._on_end(response)
        return response

    def in_progress(self) -> Response:
        """Return the response as it is before it ends."""
        return self._response("in_progress")

    # ---- Streamed

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        return self._first_events() + b"".join(map(_written, self._push(prompt, update)))

    def last_events(self) -> bytes:
        response = self.result()
        match response["status"]:
            case "completed":
                return _written(self._status_event("response.completed", response))
            case "incomplete":
                return _written(self._status_event("response.incomplete", response))
        return _written(self._status_event("response.failed", response))

    def failed_events(self, error: RequestError) -> bytes:
        """Return the end of a stream that has begun and fails."""
        events = self._first_events() + b"".join(map(_written, self._items.finish("incomplete")))
        return events + _written(self._status_event("response.failed", self.failed(error)))

    def _first_events(self) -> bytes:
        """Return the events before the first item; empty if they were returned before."""
        if self._has_begun:
            return b""
        self._has_begun = True
        created = self._status_event("response.created", self.in_progress())
        return _written(created) + _written(self._status_event("response.in_progress", self.in_progress()))

    def _push(self, prompt: int, update: ChoiceUpdate) -> list[OutputEvent]:
        self._usage.add(prompt, update)
        if self._parts is not None:
            events = self._items.push(self._parts.push(update))
        else:
            events = self._items.push([{"content": update.text}] if update.text else [])
        if update.finish is not None:
            self._finish = update.finish if self._parts is None else self._parts.finish(update.finish)
            events += self._items.finish("completed" if self._finish.kind == "stop" else "incomplete")
        return events

    # ---- Parts

    def _ended(self) -> Response:
        assert self._finish is not None, "the last update has a finish"
        match self._finish.kind:
            case "stop":
                return self._response("completed")
            case "length":
                return self._response("incomplete")
        message = self._finish.message or "The request was aborted."
        return self._response("failed", {"code": "server_error", "message": message})

    def _response(self, status: Literal["in_progress"] | Status, error: ResponseError | None = None) -> Response:
        identity = self._call.identity
        return {
            "id": identity.id,
            "object": "response",
            "created_at": identity.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": identity.model,
            "output": list(self._items.finished),
            "usage": None if status == "in_progress" else self._write_usage(),
            **self._echo(),
        }

    def _echo(self) -> RequestEcho:
        body, params = self._body, self._call.request.params
        return {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "temperature": params.temperature,
            "text": {"format": body.text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "background": body.background,
            "store": self._is_stored,
        }

    def _write_usage(self) -> ResponseUsage:
        usage = self._usage.write()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
            "total_tokens": usage["total_tokens"],
        }

    def _status_event(
        self,
        kind: Literal[
            "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
        ],
        response: Response,
    ) -> StatusEvent:
        return {"type": kind, "sequence_number": self._next_number(), "response": response}

    def _next_number(self) -> int:
        return next(self._num_events)


def _written(one: ResponseEvent) -> bytes:
    return event(one, one["type"])
