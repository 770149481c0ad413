"""JSON Schemas of the routes' answers. Every field is listed: the routes' tests validate their answers against them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}
IDS: Schema = {"type": "array", "items": COUNT}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def fields(_optional: str = "", /, **described: tuple[Schema, str]) -> Schema:
    """Return the schema of an object with these fields and no others; those in `_optional` may be absent."""
    return {
        "type": "object",
        "properties": {name: {**schema, "description": text} for name, (schema, text) in described.items()},
        "required": [name for name in described if name not in _optional.split()],
        "additionalProperties": False,
    }


# ---- Errors

OPENAI_ERROR = fields(
    error=(
        fields(
            message=(TEXT, "One sentence that says what is wrong."),
            type=(TEXT, "The kind of error."),
            param=(optional(TEXT), "The parameter at fault, if any."),
            code=(optional(TEXT), "A machine-readable code, such as model_not_found."),
        ),
        "The reason why there is no answer.",
    )
)
NATIVE_ERROR = fields(
    error=(fields(message=(TEXT, "One sentence that says what is wrong.")), "The reason why there is no answer.")
)

DONE = fields(message=(TEXT, "One sentence that says what was done."), status=({"const": "ok"}, "Always ok."))

# ---- /v1

_CACHED_DETAILS = fields(
    device=(COUNT, "Tokens cached in the device's memory."), host=(COUNT, "Tokens cached in the host's memory.")
)
_SGLEXT = (
    fields(cached_tokens_details=(_CACHED_DETAILS, "The places of the prompts' cached tokens.")),
    "Present if return_cached_tokens_details is set; in a stream, in a chunk behind the choices.",
)
_PROMPT_LOGPROBS = (
    array(
        optional(
            {
                "type": "object",
                "additionalProperties": fields(
                    logprob=(NUMBER, "The token's logprob."),
                    rank=(optional(COUNT), "The token's rank by likelihood; null if it is below the ranks asked for."),
                    decoded_token=(TEXT, "The token as text."),
                ),
            }
        )
    ),
    "Present if asked for: for each prompt token, the token itself and the likeliest ones, by token id; null for the first.",
)
_TOKEN_IDS = (IDS, "Present if return_token_ids is set: the ids of the output; in a stream, of the new tokens.")
_PROMPT_TOKEN_IDS = (IDS, "Present if return_token_ids is set; in a stream, in the first chunk of a choice.")
USAGE = fields(
    prompt_tokens=(COUNT, "Tokens of all prompts. Each prompt counts once, for any number of choices."),
    completion_tokens=(COUNT, "Tokens of all choices."),
    total_tokens=(COUNT, "The sum of both."),
    prompt_tokens_details=(
        fields(cached_tokens=(COUNT, "Prompt tokens found in the prefix cache.")),
        "Details of the prompts' tokens.",
    ),
)
_ENDS: dict[str, tuple[Schema, str]] = {
    "finish_reason": (
        {"enum": ["stop", "length", "abort", None]},
        "Why the output ended: at a stop, at its limit, or by /abort_request; null while it runs.",
    ),
    "matched_stop": ({"type": ["integer", "string", "null"]}, "The stop token id, string or expression that ended it."),
    "seed": ({"type": "integer"}, "The seed that reproduces this choice."),
}
_HEAD: dict[str, tuple[Schema, str]] = {
    "id": (TEXT, "The request's rid, or a random name."),
    "object": (TEXT, "The kind of object."),
    "created": (COUNT, "Seconds since the epoch."),
    "model": (TEXT, "The model name of the request."),
}
_COMPLETION_LOGPROBS = fields(
    tokens=(array(TEXT), r"The tokens as text; tokens that are not whole characters as bytes:\xe6\x97."),
    token_logprobs=(array(optional(NUMBER)), "The tokens' logprobs; null for the first token of a prompt."),
    top_logprobs=(
        array(optional({"type": "object", "additionalProperties": NUMBER})),
        "The likeliest tokens at each position, and the chosen one.",
    ),
    text_offset=(
        array(COUNT),
        "The offset of each token in the choice's text, in characters. All tokens of one character have its offset.",
    ),
)
COMPLETION = fields(
    "sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids prompt_token_ids prompt_logprobs",
                index=(COUNT, "The choice's index: choice c of prompt p has p * n + c, with n choices per prompt."),
                text=(TEXT, "The output; in a stream, its new part."),
                logprobs=(optional(_COMPLETION_LOGPROBS), "Logprobs, if asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
                prompt_token_ids=_PROMPT_TOKEN_IDS,
                prompt_logprobs=_PROMPT_LOGPROBS,
            )
        ),
        "One entry for each prompt and choice; in a stream, only the choice that the chunk continues.",
    ),
    usage=(USAGE, "The tokens of the whole call."),
    sglext=_SGLEXT,
)
_TOKEN: dict[str, tuple[Schema, str]] = {
    "token": (TEXT, "The token as text."),
    "logprob": (optional(NUMBER), "The token's logprob."),
    "bytes": (IDS, "The token's bytes, which need not be whole characters."),
}
_CHAT_LOGPROBS = fields(
    content=(
        array(fields(**_TOKEN, top_logprobs=(array(fields(**_TOKEN)), "The likeliest tokens at this position."))),
        "One entry for each token.",
    ),
    refusal=(NULL, "Always null."),
)
CHAT_COMPLETION = fields(
    "prompt_token_ids prompt_logprobs sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids",
                index=(COUNT, "The choice's index, from 0 to n - 1."),
                message=(
                    fields(
                        role=({"const": "assistant"}, "The author of the message."),
                        content=(TEXT, "The text of the message."),
                        refusal=(NULL, "Always null."),
                    ),
                    "The next message of the conversation.",
                ),
                logprobs=(optional(_CHAT_LOGPROBS), "Logprobs, if asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
            )
        ),
        "One entry for each choice.",
    ),
    usage=(USAGE, "The tokens of the whole call."),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    prompt_logprobs=_PROMPT_LOGPROBS,
    sglext=_SGLEXT,
)
_CHUNK_USAGE = (optional(USAGE), "Present if stream_options ask for usage; null in chunks for which they do not.")
COMPLETION_CHUNK = {
    **COMPLETION,
    "properties": {**COMPLETION["properties"], "usage": {**_CHUNK_USAGE[0], "description": _CHUNK_USAGE[1]}},
    "required": [*_HEAD, "choices"],
}
CHAT_CHUNK = fields(
    "usage prompt_token_ids sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids",
                index=(COUNT, "The choice's index, from 0 to n - 1."),
                delta=(
                    fields(
                        "role content",
                        role=({"const": "assistant"}, "The author; only in the first chunk."),
                        content=(TEXT, "The new part of the text."),
                    ),
                    "The continuation of the message.",
                ),
                logprobs=(optional(_CHAT_LOGPROBS), "Logprobs, if asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
            )
        ),
        "The choice that the chunk continues; none in the chunks with sglext and the usage.",
    ),
    usage=_CHUNK_USAGE,
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    sglext=_SGLEXT,
)
_MODEL = fields(
    id=(TEXT, "A model name for requests."),
    object=({"const": "model"}, "The kind of object."),
    created=(COUNT, "Seconds since the epoch."),
    owned_by=(TEXT, "The serving software."),
    root=(TEXT, "The path of the checkpoint."),
    parent=(NULL, "Always null."),
    max_model_len=(COUNT, "The largest number of tokens in a prompt and its output together."),
)
MODEL = _MODEL
MODELS = fields(
    object=({"const": "list"}, "The kind of object."), data=(array(_MODEL), "All model names of the server.")
)
TOKENS = fields(
    tokens=({"anyOf": [IDS, array(IDS)]}, "The ids; a list of lists for a list of texts."),
    count=({"anyOf": [COUNT, array(COUNT)]}, "The number of ids; a list for a list of texts."),
    max_model_len=(COUNT, "The largest number of tokens in a prompt and its output together."),
)
TEXTS = fields(text=({"anyOf": [TEXT, array(TEXT)]}, "The text; a list of texts for a list of lists."))

# ---- The native API

_ROW: Schema = {
    "type": "array",
    "prefixItems": [optional(NUMBER), COUNT, optional(TEXT)],
    "minItems": 3,
    "maxItems": 3,
}
_FINISH: Schema = {
    "anyOf": [
        NULL,
        fields(
            "matched",
            type=({"const": "stop"}, "A stop ended the output."),
            matched=({"type": ["integer", "string"]}, "The stop token id, string or expression."),
        ),
        fields(
            type=({"const": "length"}, "The output reached its limit."),
            length=(COUNT, "The length of the output, in tokens."),
        ),
        fields(
            type=({"const": "abort"}, "The output was aborted."),
            message=(TEXT, "The reason of the abort."),
            status_code=(optional(COUNT), "Always null."),
            err_type=(optional(TEXT), "Always null."),
        ),
    ]
}
META_INFO = fields(
    "e2e_latency first_token_latency decode_throughput queue_time forward_entry_time prefill_finished_time"
    " request_received_ts request_finished_ts response_sent_to_client_ts"
    " input_token_logprobs output_token_logprobs output_token_logprobs_length input_top_logprobs output_top_logprobs"
    " input_token_ids_logprobs output_token_ids_logprobs",
    id=(TEXT, "The request's rid, or a random name."),
    finish_reason=(_FINISH, "Why the output ended; null while it runs."),
    prompt_tokens=(COUNT, "Tokens of the prompt."),
    completion_tokens=(COUNT, "Tokens of the output so far."),
    cached_tokens=(COUNT, "Prompt tokens found in the prefix cache."),
    cached_tokens_details=(optional(_CACHED_DETAILS), "The places of the cached tokens; null if there are none."),
    reasoning_tokens=(COUNT, "Always 0."),
    weight_version=(TEXT, "The version of the weights."),
    num_retractions=(COUNT, "Number of times the request lost its place to others, and was resumed."),
    dp_rank=(NULL, "Always null."),
    seed=({"type": "integer"}, "The seed that reproduces this choice."),
    e2e_latency=(NUMBER, "Seconds from the request to the end."),
    first_token_latency=(optional(NUMBER), "Seconds from the request to the first token."),
    decode_throughput=(optional(NUMBER), "Tokens per second, without the first token."),
    queue_time=(
        optional(NUMBER),
        "Seconds of waiting in the scheduler; null if the request never ran, or if a stop string or expression ended it.",
    ),
    forward_entry_time=(optional(NUMBER), "End of the waiting in the scheduler, in seconds since the epoch."),
    prefill_finished_time=(optional(NUMBER), "Arrival of the first token, in seconds since the epoch."),
    request_received_ts=(NUMBER, "Arrival of the request, in seconds since the epoch."),
    request_finished_ts=(NUMBER, "End of the output, in seconds since the epoch."),
    response_sent_to_client_ts=(NUMBER, "Sending of the answer, in seconds since the epoch."),
    input_token_logprobs=(
        array(_ROW),
        "[logprob, token id, text or null] for each prompt token from logprob_start_len on.",
    ),
    output_token_logprobs=(array(_ROW), "The same for each token of the output."),
    output_token_logprobs_length=(COUNT, "The number of the output's logprobs so far."),
    input_top_logprobs=(array(optional(array(_ROW))), "The likeliest tokens at each position of the prompt."),
    output_top_logprobs=(array(optional(array(_ROW))), "The likeliest tokens at each position of the output."),
    input_token_ids_logprobs=(
        array(optional(array(_ROW))),
        "The tokens of token_ids_logprob at each position of the prompt.",
    ),
    output_token_ids_logprobs=(
        array(optional(array(_ROW))),
        "The tokens of token_ids_logprob at each position of the output.",
    ),
)
_GENERATED = fields(
    "prompt_token_ids index",
    text=(TEXT, "The output; in a stream all of it so far, or only the new part with --incremental-streaming-output."),
    output_ids=(IDS, "The output as token ids."),
    prompt_token_ids=(IDS, "The prompt's token ids, if asked for."),
    meta_info=(META_INFO, "Counts, times and logprobs of the request."),
    index=(COUNT, "The output's index, in a stream of several outputs."),
)
GENERATED: Schema = {"anyOf": [_GENERATED, array(_GENERATED)]}
