"""Stored responses: in one frontend's memory, bounded in number and bytes, and kept for a day."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from srt.entrypoints.errors import ApiError
from srt.entrypoints.openai.responses.input_items import Message
from srt.entrypoints.openai.responses.response_types import Response
from srt.managers.tokenizer_manager.api_types import RequestError

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20
KEPT_S = 24 * 3600.0
OPTION = "--enable-response-store"


@dataclass(slots=True)
class _Stored:
    """A response and the conversation up to and with it, both as JSON, so that their size is known."""

    response: bytes
    messages: bytes
    expires_s: float
    task: asyncio.Task[None] | None  # what still generates the response

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The stored responses by id, oldest first. The oldest are forgotten when there are too many, but not while they are generated."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._stored: dict[str, _Stored] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_new(self, response_id: str, in_background: bool) -> None:
        """Raise RequestError if the id is taken or no part of a path, or if there is no room for a response in the background."""
        self._forget_expired()
        if response_id in self._stored:
            raise RequestError(400, "request_id is the id of a stored response.", "request_id")
        if "/" in response_id:
            raise RequestError(400, "request_id must not contain / if the response is stored.", "request_id")
        running = [one.num_bytes for one in self._stored.values() if one.task is not None] if in_background else []
        if len(running) >= self._max_responses:
            raise RequestError(429, f"{len(running)} responses, the limit, are generated in the background.")
        if sum(running) >= self._max_bytes:
            raise RequestError(429, f"The responses that are generated in the background have {sum(running)} bytes.")

    def put(self, response: Response, messages: list[Message], task: asyncio.Task[None] | None = None) -> None:
        """Store a response, or what has become of it, and the conversation with it. `task` still generates it."""
        before = self._stored.pop(response["id"], None)
        expires_s = self._clock() + self._kept_s
        stored = _Stored(orjson.dumps(response), orjson.dumps(messages), expires_s, task)
        self._num_bytes += stored.num_bytes - (0 if before is None else before.num_bytes)
        self._stored[response["id"]] = stored
        self._forget_expired()
        self._forget_oldest()

    def get(self, response_id: str) -> Any:
        """Return the response, for orjson; raise RequestError (404) if there is none."""
        return orjson.Fragment(self._find(response_id).response)

    def conversation(self, response_id: str) -> list[Message]:
        """Return the messages up to and with a response that has ended; raise RequestError (400) if there is no such response."""
        self._forget_expired()
        stored = self._stored.get(response_id)
        if stored is None:
            sentence = f"previous_response_id is not the id of a stored response: {response_id[:100]!r}."
            raise ApiError(400, sentence, "previous_response_id", code="previous_response_not_found")
        status = orjson.loads(stored.response)["status"]
        if status not in ("completed", "incomplete"):
            sentence = f"previous_response_id is of a response with the status {status}, which cannot be continued."
            raise RequestError(400, sentence, "previous_response_id")
        messages: list[Message] = orjson.loads(stored.messages)
        return messages

    def delete(self, response_id: str) -> None:
        """Forget the response, and end what generates it; raise RequestError (404) if there is none."""
        stored = self._find(response_id)
        self._drop(response_id)
        if stored.task is not None:
            stored.task.cancel()

    def cancel(self, response_id: str) -> Any:
        """End what generates the response, and return the response; RequestError if there is none, or it was not in the background."""
        stored = self._find(response_id)
        response: Response = orjson.loads(stored.response)
        if not response["background"]:
            raise RequestError(400, "Only a response with background: true can be cancelled.", "response_id")
        if stored.task is not None:
            stored.task.cancel()
            response["status"] = "cancelled"
            self.put(response, orjson.loads(stored.messages))
        return response

    def _find(self, response_id: str) -> _Stored:
        self._forget_expired()
        stored = self._stored.get(response_id)
        if stored is None:
            raise not_found(f"No response with the id {response_id[:100]!r} is stored.")
        return stored

    def _forget_expired(self) -> None:
        now_s = self._clock()
        # They are in the order in which they expire.
        expired = list(itertools.takewhile(lambda one: one[1].expires_s <= now_s, self._stored.items()))
        for response_id, stored in expired:
            if stored.task is None:
                self._drop(response_id)

    def _forget_oldest(self) -> None:
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            oldest = next((response_id for response_id, one in self._stored.items() if one.task is None), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes


def not_found(sentence: str) -> ApiError:
    return ApiError(404, sentence, "response_id", code="not_found")
