"""Types of the routes' JSON answers, with the text that describes each field in /openapi.json and docs/api.md.

At run time an answer is a plain dict, and its type costs nothing. mypy checks that the code builds these fields, and `answer_schemas`
derives the JSON Schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict


class AtLeast(NamedTuple):
    """The smallest value of a number."""

    minimum: int


Count = Annotated[int, AtLeast(0)]

# ---- Errors


class NativeErrorFields(TypedDict):
    message: Annotated[str, "One sentence that says what is wrong."]


class OpenAIErrorFields(NativeErrorFields):
    type: Annotated[str, "The kind of error."]
    param: Annotated[str | None, "The parameter at fault, if any."]
    code: Annotated[str | None, "A machine-readable code, such as model_not_found."]


class NativeError(TypedDict):
    error: Annotated[NativeErrorFields, "The reason why there is no answer."]


class OpenAIError(TypedDict):
    error: Annotated[OpenAIErrorFields, "The reason why there is no answer."]


# ---- /v1


class CachedTokensDetails(TypedDict):
    device: Annotated[Count, "Tokens cached in the device's memory."]
    host: Annotated[Count, "Tokens cached in the host's memory."]


class SglExtFields(TypedDict):
    cached_tokens_details: Annotated[CachedTokensDetails, "The places of the prompts' cached tokens."]


class SglExt(TypedDict, total=False):
    sglext: Annotated[SglExtFields, "If return_cached_tokens_details is set; in a stream, behind the choices."]


class PromptLogprob(TypedDict):
    logprob: Annotated[float, "The token's logprob."]
    rank: Annotated[Count | None, "The token's rank by likelihood; null if it is below those asked for."]
    decoded_token: Annotated[str, "The token as text."]


class PromptIds(TypedDict, total=False):
    prompt_token_ids: Annotated[list[Count], "If return_token_ids is set; in a stream, in a choice's first chunk."]


class PromptFields(PromptIds, total=False):
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprob] | None],
        "If asked for: for each prompt token, it and the likeliest ones by id; null for the first.",
    ]


class OutputFields(TypedDict, total=False):
    token_ids: Annotated[list[Count], "If return_token_ids is set; in a stream, the ids of the new tokens."]


class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[Count, "Prompt tokens found in the prefix cache."]


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: Annotated[Count, "Tokens of the reasoning."]


class ReasoningUsage(TypedDict, total=False):
    reasoning_tokens: Annotated[
        Count, "If reasoning is told from the text: its tokens, which completion_tokens includes."
    ]
    completion_tokens_details: Annotated[CompletionTokensDetails, "The same, where OpenAI has it."]


class TokenUsage(ReasoningUsage):
    prompt_tokens: Annotated[Count, "Tokens of all prompts. Each counts once, for any number of choices."]
    completion_tokens: Annotated[Count, "Tokens of all choices."]
    total_tokens: Annotated[Count, "The sum of both."]
    prompt_tokens_details: Annotated[PromptTokensDetails, "Details of the prompts' tokens."]


class ChunkUsage(TypedDict, total=False):
    usage: Annotated[TokenUsage | None, "If stream_options ask for it; null in chunks for which they do not."]


class Head(TypedDict):
    id: Annotated[str, "The request's rid, or a random name."]
    object: Annotated[str, "The kind of object."]
    created: Annotated[Count, "Seconds since the epoch."]
    model: Annotated[str, "The model name of the request."]


class Ending(TypedDict):
    finish_reason: Annotated[
        Literal["stop", "length", "abort", "tool_calls", None],
        "Why the output ended; tool_calls in place of stop if it has calls; null while it runs.",
    ]
    matched_stop: Annotated[int | str | None, "The stop token id, string or expression that ended it."]


Seed = Annotated[int, "The seed that reproduces this choice."]


class CompletionLogprobLists(TypedDict):
    tokens: Annotated[list[str], r"The tokens as text; parts of characters as bytes:\xe6\x97."]
    token_logprobs: Annotated[list[float | None], "The tokens' logprobs; null for the first token of a prompt."]
    top_logprobs: Annotated[list[dict[str, float] | None], "The likeliest tokens at each position, and the chosen one."]
    text_offset: Annotated[list[Count], "Offset in characters of each token, or of the character that it is part of."]


class CompletionText(TypedDict):
    index: Annotated[Count, "Prompt p's choice c of n has the index p * n + c."]
    text: Annotated[str, "The output; in a stream, its new part."]
    logprobs: Annotated[CompletionLogprobLists | None, "Logprobs, if asked for."]


class CompletionChoice(CompletionText, Ending, OutputFields, PromptFields):
    seed: Seed


class CompletionChoices(Head):
    choices: Annotated[
        list[CompletionChoice],
        "One for each prompt and choice; in a stream, the one that the chunk continues.",
    ]


class Completion(CompletionChoices, SglExt):
    usage: Annotated[TokenUsage, "The tokens of the whole call."]


class CompletionTextChunk(CompletionChoices, ChunkUsage):
    """A chunk with a choice."""


class CompletionChunk(CompletionTextChunk, SglExt):
    """Any chunk: also the one with sglext and the one with the usage, which have no choice."""


class ChatToken(TypedDict):
    token: Annotated[str, "The token as text."]
    logprob: Annotated[float | None, "The token's logprob."]
    bytes: Annotated[list[Count], "The token's bytes, which need not be whole characters."]


class ChatTokenWithTop(ChatToken):
    top_logprobs: Annotated[list[ChatToken], "The likeliest tokens at this position."]


class ChatLogprobLists(TypedDict):
    content: Annotated[list[ChatTokenWithTop], "One entry for each token."]
    refusal: Annotated[None, "Always null."]


class CalledFunction(TypedDict):
    name: Annotated[str, "The tool's name."]
    arguments: Annotated[str, "Its arguments: JSON, if the model wrote such."]


class ToolCall(TypedDict):
    id: Annotated[str, "A name for the call, to answer it."]
    type: Annotated[Literal["function"], "The kind of call."]
    function: Annotated[CalledFunction, "What is called."]


class ChatMessage(TypedDict):
    role: Annotated[Literal["assistant"], "The author of the message."]
    content: Annotated[str | None, "The text of the message; null beside calls, if there is none."]
    refusal: Annotated[None, "Always null."]
    reasoning_content: NotRequired[Annotated[str | None, "The reasoning, if it is told from the text."]]
    tool_calls: NotRequired[Annotated[list[ToolCall], "Calls of tools, if there are any."]]


class CalledFunctionDelta(TypedDict, total=False):
    name: Annotated[str, "The tool's name; only in the first delta of a call."]
    arguments: Annotated[str, "The new part of the arguments."]


class ToolCallBegin(TypedDict, total=False):
    id: Annotated[str, "A name for the call; only in its first delta."]
    type: Annotated[Literal["function"], "The kind of call; only in its first delta."]


class ToolCallDelta(ToolCallBegin):
    index: Annotated[Count, "The call's place in the message."]
    function: Annotated[CalledFunctionDelta, "The new part of the call."]


class ChatDelta(TypedDict, total=False):
    role: Annotated[Literal["assistant"], "The author; only in the first chunk."]
    content: Annotated[str, "The new part of the text."]
    reasoning_content: Annotated[str, "The new part of the reasoning."]
    tool_calls: Annotated[list[ToolCallDelta], "The new part of a call."]


class ChatIndex(TypedDict):
    index: Annotated[Count, "The choice's index, from 0 to n - 1."]


class ChatEnd(Ending, OutputFields):
    logprobs: Annotated[ChatLogprobLists | None, "Logprobs, if asked for."]
    seed: Seed


class ChatChoice(ChatIndex, ChatEnd):
    message: Annotated[ChatMessage, "The next message of the conversation."]


class ChatChunkChoice(ChatIndex, ChatEnd):
    delta: Annotated[ChatDelta, "The continuation of the message."]


class ChatCompletion(Head, PromptFields, SglExt):
    choices: Annotated[list[ChatChoice], "One entry for each choice."]
    usage: Annotated[TokenUsage, "The tokens of the whole call."]


class ChatTextChunk(Head, ChunkUsage):
    choices: Annotated[list[ChatChunkChoice], "The choice that the chunk continues; none beside sglext and the usage."]


class ChatChunk(ChatTextChunk, PromptIds, SglExt):
    """Any chunk: also the one with sglext and the one with the usage, which have no choice."""


class ModelCard(TypedDict):
    id: Annotated[str, "A model name for requests."]
    object: Annotated[Literal["model"], "The kind of object."]
    created: Annotated[Count, "Seconds since the epoch."]
    owned_by: Annotated[str, "The serving software."]
    root: Annotated[str, "The path of the checkpoint, or an adapter's folder."]
    parent: Annotated[str | None, "Of a LoRA adapter, the model that it adapts; else null."]
    max_model_len: Annotated[Count, "The largest number of tokens in a prompt and its output together."]


class ModelCards(TypedDict):
    object: Annotated[Literal["list"], "The kind of object."]
    data: Annotated[list[ModelCard], "All model names of the server."]


# ---- The native API


class Tokens(TypedDict):
    tokens: Annotated[list[Count] | list[list[Count]], "The ids; a list of lists for a list of texts."]
    count: Annotated[Count | list[Count], "The number of ids; a list for a list of texts."]
    max_model_len: Annotated[Count, "The largest number of tokens in a prompt and its output together."]


class Texts(TypedDict):
    text: Annotated[str | list[str], "The text; a list of texts for a list of lists."]


class ParsedCall(TypedDict):
    name: Annotated[str, "The name of the tool."]
    parameters: Annotated[str, "Its arguments, as JSON."]
    tool_index: Annotated[Count, "The position of the tool in `tools`."]


class ParsedCalls(TypedDict):
    normal_text: Annotated[str, "The text beside the calls."]
    calls: Annotated[list[ParsedCall], "The calls, in order."]


class SeparatedReasoning(TypedDict):
    reasoning_text: Annotated[str, "The reasoning."]
    text: Annotated[str, "The text behind it."]


class Done(TypedDict):
    message: Annotated[str, "One sentence that says what was done."]
    status: Annotated[Literal["ok"], "Always ok."]


class LoadedAdapters(TypedDict):
    success: Annotated[Literal[True], "Always true: a refusal has another status."]
    loaded_adapters: Annotated[dict[str, str], "The folders of all adapters that requests may name, by name."]


class UpdatedWeights(TypedDict):
    success: Annotated[Literal[True], "Always true: a refusal has another status."]
    message: Annotated[str, "One sentence that says what was done."]
    num_paused_requests: Annotated[Count, "Requests that waited for the update, and go on with the new weights."]


class Succeeded(TypedDict):
    success: Annotated[Literal[True], "Always true: a refusal has another status."]
    message: Annotated[str, "One sentence that says what was done."]


class RankHashes(TypedDict):
    dp_rank: Annotated[Count, "The number of the replica."]
    rank: Annotated[Count, "The number of the rank in its replica."]
    checksums: Annotated[dict[str, str], "The hash of each of the rank's weights, by its name in the server."]


class WeightHashes(TypedDict):
    success: Annotated[Literal[True], "Always true: a refusal has another status."]
    message: Annotated[str, "One sentence that says what was done."]
    ranks: Annotated[list[RankHashes], "The hashes of each rank."]


class RenamedWeights(TypedDict):
    success: Annotated[Literal[True], "Always true: a refusal has another status."]
    message: Annotated[str, "One sentence that says what was done."]
    new_version: Annotated[str, "The name of the weights from now on."]


class Stopped(TypedDict):
    type: Annotated[Literal["stop"], "A stop ended the output."]
    matched: NotRequired[Annotated[int | str, "The stop token id, string or expression."]]


class ReachedLimit(TypedDict):
    type: Annotated[Literal["length"], "The output reached its limit."]
    length: Annotated[Count, "The length of the output, in tokens."]


class Aborted(TypedDict):
    type: Annotated[Literal["abort"], "The output was aborted."]
    message: Annotated[str, "The reason of the abort."]
    status_code: Annotated[Count | None, "Always null."]
    err_type: Annotated[str | None, "Always null."]


FinishReason = Stopped | ReachedLimit | Aborted
# A list with these three entries: logprob, token id, text.
Row = Annotated[list[Any], tuple[float | None, Count, str | None]]


class Times(TypedDict, total=False):
    e2e_latency: Annotated[float, "Seconds from the request to the end."]
    first_token_latency: Annotated[float | None, "Seconds from the request to the first token."]
    decode_throughput: Annotated[float | None, "Tokens per second, without the first token."]
    queue_time: Annotated[float | None, "Seconds of waiting in the scheduler; null if unknown, as after a stop string."]
    forward_entry_time: Annotated[float | None, "End of the waiting, in seconds since the epoch."]
    prefill_finished_time: Annotated[float | None, "Arrival of the first token, in seconds since the epoch."]
    request_received_ts: Annotated[float, "Arrival of the request, in seconds since the epoch."]
    request_finished_ts: Annotated[float, "End of the output, in seconds since the epoch."]
    response_sent_to_client_ts: Annotated[float, "Sending of the answer, in seconds since the epoch."]


class Logprobs(TypedDict, total=False):
    input_token_logprobs: Annotated[
        list[Row], "[logprob, id, text or null] of prompt tokens from logprob_start_len on."
    ]
    output_token_logprobs: Annotated[list[Row], "The same for each token of the output."]
    output_token_logprobs_length: Annotated[Count, "The number of the output's logprobs so far."]
    input_top_logprobs: Annotated[list[list[Row] | None], "The likeliest tokens at each position of the prompt."]
    output_top_logprobs: Annotated[list[list[Row] | None], "The likeliest tokens at each position of the output."]
    input_token_ids_logprobs: Annotated[
        list[list[Row] | None], "The tokens of token_ids_logprob at each position of the prompt."
    ]
    output_token_ids_logprobs: Annotated[
        list[list[Row] | None], "The tokens of token_ids_logprob at each position of the output."
    ]


class Speculation(TypedDict, total=False):
    spec_verify_ct: Annotated[Count, "Steps that verified drafts, at the end of an answer of a server that drafts."]
    spec_accept_length: Annotated[float, "Tokens that such a step brought, on average."]
    spec_accept_rate: Annotated[float, "Share of the drafts that a step may have that were right."]


class MetaInfo(Times, Logprobs, Speculation):
    id: Annotated[str, "The request's rid, or a random name."]
    finish_reason: Annotated[FinishReason | None, "Why the output ended; null while it runs."]
    prompt_tokens: Annotated[Count, "Tokens of the prompt."]
    completion_tokens: Annotated[Count, "Tokens of the output so far."]
    cached_tokens: Annotated[Count, "Prompt tokens found in the prefix cache."]
    cached_tokens_details: Annotated[
        CachedTokensDetails | None, "The places of the cached tokens; null if there are none."
    ]
    reasoning_tokens: Annotated[Count, "Always 0."]
    weight_version: Annotated[str, "The version of the weights."]
    num_retractions: Annotated[Count, "Number of times the request lost its place to others, and was resumed."]
    dp_rank: Annotated[Count | None, "The replica that runs the request, of a server with --dp-size; else null."]
    seed: Seed
    deterministic: NotRequired[
        Annotated[bool, "True from a server with --enable-deterministic-inference; others leave it out."]
    ]


class Generated(TypedDict):
    text: Annotated[str, "The output so far, or its new part with --incremental-streaming-output."]
    output_ids: Annotated[list[Count], "The output as token ids."]
    prompt_token_ids: NotRequired[Annotated[list[Count], "The prompt's token ids, if asked for."]]
    meta_info: Annotated[MetaInfo, "Counts, times and logprobs of the request."]
    index: NotRequired[Annotated[Count, "The output's index, in a stream of several outputs."]]
