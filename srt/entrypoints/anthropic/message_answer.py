"""The answer to a call of /v1/messages: one message, or the events of its stream."""

from __future__ import annotations

from srt.entrypoints.anthropic.answers import (
    BlockEvent,
    Message,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageUsage,
)
from srt.entrypoints.anthropic.content import BlockWriter, whole_content
from srt.entrypoints.openai.message_parts import MessageParts
from srt.entrypoints.openai.parts import Identity
from srt.entrypoints.streaming import TextEvent, event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, RequestError

_RUNS: MessageEnd = {"stop_reason": None, "stop_sequence": None}


class MessageAnswer:
    """The writer of a call's answer as a message in Anthropic's shape."""

    def __init__(self, identity: Identity, parts: MessageParts, *, max_tokens: int, shows_thinking: bool) -> None:
        self._identity = identity
        self._parts = parts
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._blocks = BlockWriter(shows_thinking=shows_thinking)
        self._has_begun = False
        self._abort: RequestError | None = None
        self._whole: Message | None = None
        self._text_event_of: dict[
            int, TextEvent
        ] = {}  # templates of events that differ only in text, by the block's index

    # ---- Whole

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add the message; `update` is all of it. RequestError if it was aborted: a message has no reason for that."""
        assert update.finish is not None, "a whole message has ended"
        if update.finish.kind == "abort":
            raise _aborted(update.finish)
        content = whole_content(self._parts.push(update), shows_thinking=self._shows_thinking)
        self._whole = {**self._message(update), "content": content, **self._end(update, update.finish)}

    def result(self) -> Message | None:
        return self._whole

    # ---- Streamed

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        finish = update.finish
        if finish is not None and finish.kind == "abort":
            self._abort = _aborted(finish)
            if not self._has_begun:
                return b""
            finish = None
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events = _named({"type": "message_start", "message": self._message(update)})
        blocks = self._blocks.push(self._parts.push(update))
        if finish is not None:
            blocks += self._blocks.finish()
        events += b"".join([self._block_event(one) for one in blocks])
        if finish is not None:
            end: MessageDelta = {
                "type": "message_delta",
                "delta": self._end(update, finish),
                "usage": self._usage(update),
            }
            events += _named(end)
        return events

    def last_events(self) -> bytes:
        """Return the end of the stream; raise RequestError if it was aborted."""
        if self._abort is not None:
            raise self._abort
        return _named({"type": "message_stop"})

    def _block_event(self, one: BlockEvent) -> bytes:
        """Return an event of a block; one with text by a template."""
        if one["type"] != "content_block_delta":
            return _named(one)
        delta = one["delta"]
        match delta["type"]:
            case "text_delta":
                return self._text_event(one["index"], "text", "text_delta", delta["text"])
            case "thinking_delta":
                return self._text_event(one["index"], "thinking", "thinking_delta", delta["thinking"])
        return _named(one)

    def _text_event(self, index: int, field: str, kind: str, text: str) -> bytes:
        template = self._text_event_of.get(index)
        if template is None:
            template = self._text_event_of[index] = TextEvent(
                lambda text: {
                    "type": "content_block_delta",
                    "index": index,
                    "delta": {"type": kind, field: text},
                },
                "content_block_delta",
            )
        return template.write(text)

    # ---- What both have

    def _message(self, update: ChoiceUpdate) -> Message:
        """Return the message without content."""
        return {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": [],
            **_RUNS,
            "usage": self._usage(update),
        }

    def _end(self, update: ChoiceUpdate, finish: Finish) -> MessageEnd:
        if finish.kind == "length":
            is_full = update.completion_tokens < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if isinstance(finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        return {"stop_reason": "tool_use" if self._parts.has_calls else "end_turn", "stop_sequence": None}

    def _usage(self, update: ChoiceUpdate) -> MessageUsage:
        usage: MessageUsage = {
            "input_tokens": update.prompt_tokens - update.cached_tokens,
            "cache_read_input_tokens": update.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": update.completion_tokens,
        }
        if self._parts.counts_reasoning and update.finish is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self._parts.num_reasoning_tokens}
        return usage


def _named(one: MessageEvent) -> bytes:
    return event(one, one["type"])


def _aborted(finish: Finish) -> RequestError:
    """Return the error that an abort is here. Its status is one after which clients do not try again."""
    return RequestError(400, finish.message or "The request was aborted.")
