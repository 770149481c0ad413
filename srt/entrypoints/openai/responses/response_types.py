"""Types of a response, its items and the events of its stream, with the texts that describe them in the API's description."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from srt.entrypoints.answers import Count

ItemStatus = Annotated[
    Literal["in_progress", "completed", "incomplete"], "incomplete: the output reached its limit within this item."
]


# ---- Items


class OutputText(TypedDict):
    type: Annotated[Literal["output_text"], "The kind of part."]
    text: Annotated[str, "The text."]
    annotations: Annotated[list[Any], "Always empty."]
    logprobs: Annotated[list[Any], "Always empty."]


class ReasoningText(TypedDict):
    type: Annotated[Literal["reasoning_text"], "The kind of part."]
    text: Annotated[str, "The text."]


class ItemHead(TypedDict):
    id: Annotated[str, "A random name of the item."]
    status: ItemStatus


class MessageItem(ItemHead):
    type: Annotated[Literal["message"], "The kind of item."]
    role: Annotated[Literal["assistant"], "The author."]
    content: Annotated[list[OutputText], "The text, in one part."]


class ReasoningItem(ItemHead):
    type: Annotated[Literal["reasoning"], "The kind of item."]
    summary: Annotated[list[Any], "Always empty: the reasoning itself is in content."]
    content: Annotated[list[ReasoningText], "The reasoning, in one part."]


class CallItem(ItemHead):
    type: Annotated[Literal["function_call"], "The kind of item."]
    call_id: Annotated[str, "A name for the call, to answer it."]
    name: Annotated[str, "The tool's name."]
    arguments: Annotated[str, "Its arguments: JSON, if the model wrote such."]


OutputItem = MessageItem | ReasoningItem | CallItem


# ---- The response


class InputTokensDetails(TypedDict):
    cached_tokens: Annotated[Count, "Tokens found in the prefix cache."]
    cache_write_tokens: Annotated[Count, "Always 0: nothing is charged for what enters the cache."]


class OutputTokensDetails(TypedDict):
    reasoning_tokens: Annotated[Count, "Tokens of the reasoning."]


class ResponseUsage(TypedDict):
    input_tokens: Annotated[Count, "Tokens of the prompt."]
    input_tokens_details: Annotated[InputTokensDetails, "Details of the prompt's tokens."]
    output_tokens: Annotated[Count, "Tokens of the output."]
    output_tokens_details: Annotated[OutputTokensDetails, "Details of the output's tokens."]
    total_tokens: Annotated[Count, "The sum of both."]


class IncompleteDetails(TypedDict):
    reason: Annotated[Literal["max_output_tokens"], "The output reached max_output_tokens or the context's end."]


class ResponseError(TypedDict):
    code: Annotated[Literal["server_error", "rate_limit_exceeded", "invalid_prompt"], "The kind of error."]
    message: Annotated[str, "One sentence that says what is wrong."]


class ReasoningEcho(TypedDict):
    effort: Annotated[str | None, "reasoning.effort of the request."]
    summary: Annotated[None, "Always null."]


class TextEcho(TypedDict):
    format: Annotated[dict[str, Any], "text.format of the request."]
    verbosity: Annotated[Literal["medium"], "Always medium."]


class RequestEcho(TypedDict):
    """The fields of the request that a response repeats."""

    instructions: Annotated[str | None, "instructions of the request."]
    max_output_tokens: Annotated[int | None, "max_output_tokens of the request."]
    metadata: Annotated[dict[str, str], "metadata of the request."]
    parallel_tool_calls: Annotated[bool, "parallel_tool_calls of the request."]
    previous_response_id: Annotated[str | None, "previous_response_id of the request."]
    reasoning: Annotated[ReasoningEcho, "reasoning of the request."]
    temperature: Annotated[float, "The temperature of the draws."]
    text: Annotated[TextEcho, "text of the request."]
    tool_choice: Annotated[str | dict[str, Any], "tool_choice of the request."]
    tools: Annotated[list[Any], "tools of the request."]
    top_logprobs: Annotated[Literal[0], "Always 0."]
    top_p: Annotated[float, "The top_p of the draws."]
    truncation: Annotated[Literal["disabled"], "Always disabled."]
    background: Annotated[bool, "background of the request."]
    store: Annotated[bool, "Whether the response is stored."]


class Response(RequestEcho):
    id: Annotated[str, "The request_id of the request, or a random name."]
    object: Annotated[Literal["response"], "The kind of object."]
    created_at: Annotated[Count, "Seconds since the epoch."]
    completed_at: Annotated[Count | None, "Seconds since the epoch; null unless the status is completed."]
    status: Annotated[
        Literal["in_progress", "completed", "incomplete", "failed", "cancelled"],
        "incomplete: see incomplete_details; failed: see error.",
    ]
    error: Annotated[ResponseError | None, "Why the response failed."]
    incomplete_details: Annotated[IncompleteDetails | None, "Why the output is incomplete."]
    model: Annotated[str, "The model name of the request."]
    output: Annotated[list[OutputItem], "The items, in the order in which the model wrote them."]
    usage: Annotated[ResponseUsage | None, "The tokens of the call; null while it runs."]


class DeletedResponse(TypedDict):
    id: Annotated[str, "The id of the response."]
    object: Annotated[Literal["response"], "The kind of object."]
    deleted: Annotated[Literal[True], "Always true."]


# ---- Events


class Numbered(TypedDict):
    sequence_number: Annotated[Count, "The event's place in the stream, from 0 on."]


class StatusEvent(Numbered):
    type: Annotated[
        Literal[
            "response.created",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
        "The kind of event.",
    ]
    response: Annotated[Response, "The response as it is now."]


class OfItem(Numbered):
    output_index: Annotated[Count, "The item's place in the output."]


class ItemEvent(OfItem):
    type: Annotated[Literal["response.output_item.added", "response.output_item.done"], "The kind of event."]
    item: Annotated[OutputItem, "The item: empty when it is added, whole when it is done."]


class OfCall(OfItem):
    item_id: Annotated[str, "The id of the item."]


class OfPart(OfCall):
    content_index: Annotated[Literal[0], "The part's place in the item's content."]


class PartEvent(OfPart):
    type: Annotated[Literal["response.content_part.added", "response.content_part.done"], "The kind of event."]
    part: Annotated[OutputText | ReasoningText, "The part: empty when it is added, whole when it is done."]


class TextDelta(OfPart):
    type: Annotated[Literal["response.output_text.delta"], "The kind of event."]
    delta: Annotated[str, "The new text."]
    logprobs: Annotated[list[Any], "Always empty."]


class TextDone(OfPart):
    type: Annotated[Literal["response.output_text.done"], "The kind of event."]
    text: Annotated[str, "The whole text."]
    logprobs: Annotated[list[Any], "Always empty."]


class ReasoningDelta(OfPart):
    type: Annotated[Literal["response.reasoning_text.delta"], "The kind of event."]
    delta: Annotated[str, "The new text."]


class ReasoningDone(OfPart):
    type: Annotated[Literal["response.reasoning_text.done"], "The kind of event."]
    text: Annotated[str, "The whole text."]


class ArgumentsDelta(OfCall):
    type: Annotated[Literal["response.function_call_arguments.delta"], "The kind of event."]
    delta: Annotated[str, "The new part of the arguments."]


class ArgumentsDone(OfCall):
    type: Annotated[Literal["response.function_call_arguments.done"], "The kind of event."]
    name: Annotated[str, "The tool's name."]
    arguments: Annotated[str, "The whole arguments."]


OutputEvent = (
    ItemEvent | PartEvent | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)
ResponseEvent = StatusEvent | OutputEvent
