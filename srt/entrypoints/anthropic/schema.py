"""Request bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from srt.entrypoints.anthropic.blocks import MESSAGE_SCHEMA, TEXT_BLOCK_SCHEMA
from srt.entrypoints.anthropic.settings import OUTPUT_CONFIG_SCHEMA, THINKING_SCHEMA
from srt.entrypoints.anthropic.tools import TOOL_CHOICE_SCHEMA, TOOL_SCHEMA
from srt.entrypoints.openai.messages import MAX_MESSAGES
from srt.entrypoints.openai.tools import MAX_TOOLS
from srt.entrypoints.request_schema import MODEL_NAME, NOT_EMPTY, RequestBody, described
from srt.sampling.sampling_params import MAX_STOP_CHARS, MAX_STOPS, PARAMETERS


class PromptBody(RequestBody):
    """The fields of a request from which the prompt is made."""

    model: str | None = described(
        "One of the server's model names (/v1/models); its first one if absent or `default`.", string=MODEL_NAME
    )
    messages: list[dict[str, Any]] = described(
        "The conversation so far. A last message of the assistant is continued.",
        ...,
        minItems=1,
        maxItems=MAX_MESSAGES,
        items=MESSAGE_SCHEMA,
    )
    system: str | list[dict[str, Any]] | None = described(
        "What the model is told before the conversation: a text, or a list of text blocks.",
        array=NOT_EMPTY,
        object=TEXT_BLOCK_SCHEMA,
    )
    tools: list[dict[str, Any]] = described("Tools that the model may call.", [], items=TOOL_SCHEMA, maxItems=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = described("Which tools the model calls.", object=TOOL_CHOICE_SCHEMA)
    thinking: dict[str, Any] | None = described(
        "Whether the model reasons first. Absent: as its chat template does.", object=THINKING_SCHEMA
    )
    output_config: dict[str, Any] | None = described("Effort and form of the answer.", object=OUTPUT_CONFIG_SCHEMA)


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    FAMILY: ClassVar[str] = "count_tokens"


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    FAMILY: ClassVar[str] = "messages"
    SAMPLING: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
    )

    max_tokens: int = described(
        "Most tokens to generate, reasoning included. With 0 only the prompt is computed, for the prefix cache.",
        ...,
        integer=PARAMETERS["max_new_tokens"].check.schema(),
    )
    stop_sequences: list[str] = described(
        "Texts that end the output.",
        [],
        string={"minLength": 1, "maxLength": MAX_STOP_CHARS},
        array={"maxItems": MAX_STOPS},
    )
    stream: bool = described("Send the answer as server-sent events, as it is generated.", False)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
