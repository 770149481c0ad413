"""Types of the JSON that Anthropic's routes answer, with the text that describes each field, as in `srt.entrypoints.answers`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from srt.entrypoints.answers import Count

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# ---- Errors


class AnthropicErrorFields(TypedDict):
    type: Annotated[str, "The kind of error."]
    message: Annotated[str, "One sentence that says what is wrong."]


class AnthropicError(TypedDict):
    type: Annotated[Literal["error"], "The kind of object."]
    error: Annotated[AnthropicErrorFields, "The reason why there is no answer."]
    request_id: Annotated[str, "The request's id, as in the header."]


# ---- Parts of messages


class TextBlock(TypedDict):
    type: Annotated[Literal["text"], "The kind of block."]
    text: Annotated[str, "The text."]


class ThinkingBlock(TypedDict):
    type: Annotated[Literal["thinking"], "The kind of block."]
    thinking: Annotated[str, "The reasoning."]
    signature: Annotated[str, "Always empty: reasoning is not signed."]


class ToolUseBlock(TypedDict):
    type: Annotated[Literal["tool_use"], "The kind of block."]
    id: Annotated[str, "A name for the call, to answer it."]
    name: Annotated[str, "The tool's name."]
    input: Annotated[dict[str, Any], "Its arguments."]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(TypedDict):
    thinking_tokens: Annotated[Count, "Tokens of the reasoning."]


class MessageUsage(TypedDict):
    input_tokens: Annotated[Count, "Tokens of the prompt that were not found in the prefix cache."]
    cache_read_input_tokens: Annotated[Count, "Tokens of the prompt that were found there."]
    cache_creation_input_tokens: Annotated[Count, "Always 0: what a cache entry takes is not counted apart."]
    output_tokens: Annotated[Count, "Tokens of the output so far."]
    output_tokens_details: NotRequired[
        Annotated[OutputTokensDetails, "If reasoning is told from the text: its part of output_tokens."]
    ]


class MessageEnd(TypedDict):
    stop_reason: Annotated[StopReason | None, "Why the output ended; null while it runs."]
    stop_sequence: Annotated[str | None, "The stop sequence that ended it, if one did."]


class Message(MessageEnd):
    id: Annotated[str, "A random name for the request, which /abort_request knows."]
    type: Annotated[Literal["message"], "The kind of object."]
    role: Annotated[Literal["assistant"], "The author of the message."]
    model: Annotated[str, "The model name of the request."]
    content: Annotated[list[ContentBlock], "The parts of the message, in order; none while the stream begins."]
    usage: Annotated[MessageUsage, "The tokens of the call."]


class TokenCount(TypedDict):
    input_tokens: Annotated[Count, "Tokens of the prompt, whether they are cached or not."]


# ---- Events of a stream


class MessageStart(TypedDict):
    type: Annotated[Literal["message_start"], "The stream begins."]
    message: Annotated[Message, "The message, without content yet."]


class BlockStart(TypedDict):
    type: Annotated[Literal["content_block_start"], "A block begins."]
    index: Annotated[Count, "The block's place in the content."]
    content_block: Annotated[ContentBlock, "The block, with what is known of it."]


class TextDelta(TypedDict):
    type: Annotated[Literal["text_delta"], "The kind of piece."]
    text: Annotated[str, "The new part of the text."]


class ThinkingDelta(TypedDict):
    type: Annotated[Literal["thinking_delta"], "The kind of piece."]
    thinking: Annotated[str, "The new part of the reasoning."]


class InputDelta(TypedDict):
    type: Annotated[Literal["input_json_delta"], "The kind of piece."]
    partial_json: Annotated[str, "The new part of the arguments."]


Delta = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(TypedDict):
    type: Annotated[Literal["content_block_delta"], "A block goes on."]
    index: Annotated[Count, "The block's place in the content."]
    delta: Annotated[Delta, "Its new part."]


class BlockStop(TypedDict):
    type: Annotated[Literal["content_block_stop"], "A block ends."]
    index: Annotated[Count, "The block's place in the content."]


class MessageDelta(TypedDict):
    type: Annotated[Literal["message_delta"], "The message ends."]
    delta: Annotated[MessageEnd, "Why it ends."]
    usage: Annotated[MessageUsage, "The tokens of the whole call."]


class MessageStop(TypedDict):
    type: Annotated[Literal["message_stop"], "The stream ends."]


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop
